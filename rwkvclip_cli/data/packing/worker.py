"""What a packing process does: samples in, records out, over a channel. Forked by a `nursery.Nursery`.

>>> pack_samples([Sample("cat.jpg", image="cat.jpg", captions=("a cat",))], WorkerOptions())[0].kept
'kept'
"""

import contextlib
import os
import socket
import sys
import traceback
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from rwkvclip_cli.data.captions import CONTEXT_LENGTH, Tokenizer, clean_captions
from rwkvclip_cli.data.packing.channel import Channel
from rwkvclip_cli.data.packing.decoder import Decoder
from rwkvclip_cli.data.packing.digest import caption_hashes, picture_digest
from rwkvclip_cli.data.packing.images import read_file
from rwkvclip_cli.data.packing.prove import ImageOptions, prepare
from rwkvclip_cli.data.packing.samples import BadCaptions, BadImage, Caption, Reject, Sample, find_captions
from rwkvclip_cli.data.packing.tokens import BadTokens, is_marked, token_slots
from rwkvclip_cli.data.recordio import HEADER_BYTES, MAX_PAYLOAD_BYTES, record_checksum

LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker needs of `PackConfig`. dedupe: records are to carry digests."""

    captions: int = 3
    context_length: int = CONTEXT_LENGTH
    images: ImageOptions = field(default_factory=ImageOptions)
    dedupe: bool = False


@dataclass(frozen=True)
class Packed:
    """A record but for its number.

    labels: token ids of all slots. kept: as `prove.Prepared.kept`. width, height: pixels.
    token_counts: ids of each caption that has a slot, start and end counted, padding not.
    truncated, dropped: captions cut to the context length, captions beyond the slots.
    unmarked: captions given as ids without CLIP's start or end token. blank: captions that say nothing, left out.
    format: of the original picture, in small letters. digest: of the same, with `--dedupe` alone.
    hashes: `caption_hashes` of the captions that have a slot. checksum: `record_checksum` of labels and JPEG.
    """

    source: str
    labels: "array[float]"
    jpeg: bytes
    kept: str
    width: int
    height: int
    token_counts: tuple[int, ...]
    truncated: int
    dropped: int
    unmarked: int = 0
    blank: int = 0
    format: str = "jpeg"
    digest: bytes = b""
    hashes: bytes = b""
    checksum: int = 0


def pack_samples(
    samples: Sequence[Sample], options: WorkerOptions, decoder: Decoder | None = None
) -> list[Packed | Reject]:
    """Make a record of each sample, or say why not."""
    outcomes: list[Packed | Reject | None] = [None] * len(samples)
    captions: dict[int, list[str | tuple[int, ...]]] = {}
    blank: dict[int, int] = {}
    pictures: dict[int, bytes] = {}
    for index, sample in enumerate(samples):
        try:
            captions[index], blank[index] = _usable(find_captions(sample), options.context_length)
            if captions[index]:
                pictures[index] = sample.image if isinstance(sample.image, bytes) else read_file(sample.image)
            else:
                outcomes[index] = Reject(sample.source, "missing-caption", _without_caption(sample))
        except BadCaptions as fault:
            outcomes[index] = Reject(sample.source, "unreadable-caption", f"{sample.source}: {fault}")
        except BadTokens as fault:
            outcomes[index] = Reject(sample.source, "bad-tokens", f"{sample.source}: {fault}")
        except BadImage as fault:
            outcomes[index] = Reject(sample.source, fault.reason, f"{sample.source}: {fault.message}")
    tokenizer = Tokenizer()
    prepared = prepare(list(pictures.values()), options.images, decoder)
    for index, picture in zip(pictures, prepared, strict=True):
        source = samples[index].source
        if isinstance(picture, BadImage):
            outcomes[index] = Reject(source, picture.reason, f"{source}: {picture.message}")
            continue
        found = captions[index]
        labels, truncated = tokenizer.fill_slots(found, options.captions, options.context_length)
        if HEADER_BYTES + 4 * len(labels) + len(picture.jpeg) > MAX_PAYLOAD_BYTES:
            message = f"{source}: a JPEG of {len(picture.jpeg):,} bytes; a record holds less than {MAX_PAYLOAD_BYTES:,}"
            outcomes[index] = Reject(source, "too-large", message)
            continue
        slots = min(len(found), options.captions)
        outcomes[index] = Packed(
            source,
            labels,
            picture.jpeg,
            picture.kept,
            picture.width,
            picture.height,
            tuple(token_counts(labels, slots, options.context_length)),
            truncated,
            max(0, len(found) - options.captions),
            sum(not isinstance(caption, str) and not is_marked(caption) for caption in found[: options.captions]),
            blank[index],
            picture.format,
            picture_digest(pictures[index], options.images.max_pixels) if options.dedupe else b"",
            b"".join(caption_hashes(labels, slots, options.context_length)),
            record_checksum(labels, picture.jpeg),
        )
    return [outcome for outcome in outcomes if outcome is not None]


def _usable(captions: Sequence[Caption], context_length: int) -> tuple[list[str | tuple[int, ...]], int]:
    """The captions that say something, each for one slot, and how many do not; BadTokens for ids that are none."""
    found: list[str | tuple[int, ...]] = []
    blank = 0
    for caption in captions:
        before = len(found)
        found += clean_captions([caption]) if isinstance(caption, str) else token_slots(caption, context_length)
        given = 1 if isinstance(caption, str) else len(caption) // context_length
        blank += given - (len(found) - before)
    return found, blank


def _without_caption(sample: Sample) -> str:
    if sample.sidecars or sample.captions:
        # A key that was asked for and is not there leaves no caption either.
        keys = ", ".join(sample.caption_keys) if any(each.kind == "json" for each in sample.sidecars) else ""
        return f"{sample.source}: its captions are blank" + (f", or its .json has no {keys}" if keys else "")
    if sample.source == sample.image:
        return f"{sample.source}: no caption file of the same stem beside it"
    return f"{sample.source}: no caption in its row"


def token_counts(labels: "array[float]", slots: int, context_length: int) -> list[int]:
    """The ids of each of the first `slots` of a record's labels up to the end token, after which all is padding."""
    data, slot_bytes = labels.tobytes(), labels.itemsize * context_length
    # Of a number's bytes only trailing ones are zero too, and a slot is never blank.
    padded = (data[start : start + slot_bytes] for start in range(0, slots * slot_bytes, slot_bytes))
    return [-(-len(slot.rstrip(b"\0")) // labels.itemsize) for slot in padded]


def main(descriptor: int, shared: int) -> None:
    """Serve batches over the inherited socket and file until the other side closes the socket."""
    channel = Channel(socket.socket(fileno=descriptor), shared)
    try:
        options: WorkerOptions = channel.receive()
        decoder = Decoder()
        if options.images.proof == "decode":
            decoder.start()
        channel.send(("ready", None))
        while True:
            samples = channel.receive()
            try:
                answer: tuple[str, object] = ("done", pack_samples(samples, options, decoder))
            except Exception:
                answer = ("bug", traceback.format_exc())
            channel.send(answer)
            _trim_log()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the packing process has ended


def _trim_log() -> None:
    """Keep the file that takes stderr small: decoders write a line for every image that they refuse."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        if os.fstat(2).st_size > LOG_BYTES:
            os.ftruncate(2, 0)
            os.lseek(2, 0, os.SEEK_SET)
