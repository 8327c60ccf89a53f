"""What sources yield and packing consumes: samples, rejects, and how captions are found in files and rows.

>>> find_captions(Sample("cat.jpg", image="cat.jpg", sidecars=(Sidecar("txt", b"a cat\\na tabby"),)))
['a cat', 'a tabby']
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rwkvclip_cli.data.captions import CONTEXT_LENGTH, decode_caption_bytes
from rwkvclip_cli.documents import parse_json

REASONS = {
    "missing-image": "a caption without an image: no such file, or none named",
    "missing-caption": "an image without a caption, or with blank ones alone",
    "empty-file": "an image of no bytes",
    "unreadable-image": "no picture format that can be read, or damaged",
    "truncated-image": "the image's bytes end early, or the data of one of its scans does",
    "too-many-pixels": "more pixels than --max-pixels",
    "too-many-scans": "a JPEG of more than 100 scans: every one costs a decoder a pass over the whole picture",
    "too-large": "more bytes, or a longer side, than a record or a JPEG holds",
    "not-faithful": "no JPEG comes within 2 of 255 of the picture, or DALI sees other pixels in it",
    "duplicate": "the picture of an earlier record (--dedupe): equal bytes, or equal width, height and decoded pixels",
    "bad-structure": "JPEG markers out of place (--proof structure) and no reader that mends it",
    "internal-error": "a fault of rwkvclip's own at this input alone; its traceback is on stderr",
    "decoder-crash": "the process that decoded it died",
    "unreadable-caption": "a caption file that cannot be read or parsed",
    "bad-row": "a table row that cannot be read or parsed",
    "bad-tokens": "token ids that are none, or that fill no whole number of caption slots",
    "damaged-tar": "a tar that is cut off or damaged: what precedes is kept",
    "unreadable-folder": "a folder that cannot be listed",
}

DEFAULT_CAPTION_KEYS = ("captions", "caption", "text", "title")
DEFAULT_IMAGE_KEYS = ("image", "jpg", "file_name", "filepath", "path")
SIDECAR_KINDS: dict[str, Literal["txt", "json"]] = {"txt": "txt", "json": "json"}
LARGEST_NUMBER = 10**100
MAX_SIDECAR_BYTES = 2**24
SIDECAR_PIECE_BYTES = 2**16
MAX_IMAGE_BYTES = 2**31  # a 16-bit RGB picture of --max-pixels has half as many

# Text, or token ids: numbers as the source holds them, one or more whole slots of them, unchecked.
TokenIds = tuple[Any, ...]
Caption = str | TokenIds


@dataclass(frozen=True)
class SourceOptions:
    """What the generators need to know.

    format: a key of `sources.KINDS`, or auto. image_key, caption_keys: columns of a table, keys of a JSON sidecar; none
    means the usual ones. skip: absolute real paths that are no inputs, such as the files being written.
    context_length: token ids a caption slot. has_tokens: every sample gets captions from elsewhere (`--tokens`), so
    none are needed in the source.
    """

    format: str = "auto"
    image_key: str | None = None
    caption_keys: tuple[str, ...] = ()
    skip: frozenset[str] = frozenset()
    context_length: int = CONTEXT_LENGTH
    has_tokens: bool = False


@dataclass(frozen=True)
class Sidecar:
    """A caption file of one sample: its kind and its bytes, or the path that a worker is to read."""

    kind: Literal["txt", "json"]
    content: bytes | str


@dataclass(frozen=True)
class Sample:
    """One input. `source` names it for people; `image` is its bytes, or a path that a worker is to read.

    Its captions are `captions`, then those of `sidecars`, of which `caption_keys` (or the usual keys) are read.
    """

    source: str
    image: bytes | str
    captions: tuple[Caption, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()
    caption_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reject:
    """One input that cannot be packed: `reason` is a key of REASONS.

    is_sample: whether a list of the samples, such as the rows of `--tokens`, counts it too.
    """

    source: str
    reason: str
    message: str
    is_sample: bool = True


@dataclass(frozen=True)
class Ignored:
    """A file that is no input at all, such as the licence in a tar; counted, nothing more."""

    source: str


Item = Sample | Reject | Ignored


class BadImage(Exception):
    """A picture that cannot be packed: `reason` is a key of REASONS, `message` says it in words."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class BadCaptions(Exception):
    """A caption file that cannot be read or parsed."""


def find_captions(sample: Sample) -> list[Caption]:
    """All captions of a sample in order, blank ones included; reads the sidecars that are paths.

    A caption that both a .txt and a .json give (img2dataset writes both) counts once. Raises BadCaptions
    where a sidecar is unreadable and no other gives a caption.
    """
    found = list(sample.captions)
    faults = []
    for sidecar in sample.sidecars:
        try:
            more = _read_sidecar(sidecar, sample.caption_keys)
        except BadCaptions as fault:
            faults.append(str(fault))
            continue
        found += [caption for caption in more if caption not in found] if found else more
    if faults and not any(caption.strip() if isinstance(caption, str) else caption for caption in found):
        raise BadCaptions("; ".join(faults))
    return found


def captions_in(
    row: Mapping[str, Any], keys: Sequence[str], read: Callable[[Any], Sequence[Caption]] | None = None
) -> list[Caption]:
    """The captions of a row or JSON object: those of every key in `keys`, or of the first usual name that has any.

    `read` gives the captions of one value, by default its `texts`.
    """
    read = read or texts
    if keys:
        return [caption for key in keys for caption in read(row.get(key))]
    values = (row[name] for name in usual_names(row, DEFAULT_CAPTION_KEYS))
    return list(read(next((value for value in values if value not in (None, [])), None)))


def texts_or_tokens(value: Any) -> list[Caption]:
    """The captions in a table's cell: a list of numbers (nested or not) is token ids, the rest as `texts` reads it.

    >>> texts_or_tokens([49406, 320, 49407]), texts_or_tokens([["a", "b"], "c"]), texts_or_tokens(5)
    ([(49406, 320, 49407)], ['a', 'b', 'c'], ['5'])
    """
    if not isinstance(value, list):
        return [*texts(value)]
    numbers: list[Any] = []
    waiting: list[Any] = [value]
    while waiting:
        element = waiting.pop()
        if isinstance(element, list):
            waiting.extend(reversed(element))
        elif element is None or (isinstance(element, int | float) and not isinstance(element, bool)):
            numbers.append(element)
        else:
            return [*texts(value)]
    return [tuple(numbers)] if any(number is not None for number in numbers) else []


def usual_names(names: Iterable[str], usual: Sequence[str]) -> list[str]:
    """Those of `names` that are in `usual`, whatever their case, in the order of `usual`.

    >>> usual_names(["Text", "id", "Caption", "caption"], DEFAULT_CAPTION_KEYS)
    ['Caption', 'caption', 'Text']
    """
    found = [name for name in names if name.lower() in usual]
    return sorted(found, key=lambda name: usual.index(name.lower()))


def texts(value: Any) -> list[str]:
    """The strings in a cell: itself, its bytes' text, a number's digits, or each element of a list; no more speaks."""
    found: list[str] = []
    waiting = [value]  # not a call for each level: a list may be nested deeper than Python's calls may
    while waiting:
        element = waiting.pop()
        if isinstance(element, str):
            found.append(readable(element))
        elif isinstance(element, list | tuple):
            waiting.extend(reversed(element))
        elif isinstance(element, bytes):
            found.append(decode_caption_bytes(element))
        elif _is_number(element):
            found.append(str(element))
    return found


def _is_number(value: Any) -> bool:
    """Whether it has digits: JSON's NaN and infinities have none, and no caption has thousands."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def readable(text: str) -> str:
    """`text` with the undecoded bytes in it read as a legacy encoding, and lone surrogates replaced."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        pass
    try:
        return decode_caption_bytes(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:  # JSON's "\ud83d" without its other half
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def printable(text: str) -> str:
    r"""A file name or message as valid Unicode: bytes that are no UTF-8 appear as \xNN."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape" if _is_escaped(text) else "replace").decode(
        "utf-8", "backslashreplace"
    )


def _is_escaped(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" and not "\udc80" <= letter <= "\udcff" for letter in text)


def sidecar_kind(suffix: str) -> Literal["txt", "json"] | None:
    """The kind of caption file that a suffix (without its dot, any case) means."""
    return SIDECAR_KINDS.get(suffix.lower())


def _read_sidecar(sidecar: Sidecar, keys: Sequence[str]) -> Sequence[Caption]:
    content = sidecar.content if isinstance(sidecar.content, bytes) else _read_small(sidecar.content)
    text = decode_caption_bytes(content)
    if sidecar.kind == "txt":
        # A line end ends a line; no caption begins behind the last one.
        return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    where = "its .json" if isinstance(sidecar.content, bytes) else sidecar.content
    try:
        document = parse_json(text)
    except ValueError as error:
        raise BadCaptions(f"{where} is not valid JSON: {error}") from None
    if isinstance(document, dict):
        return captions_in(document, keys)
    return texts(document)


def without_waiting(path: str, flags: int) -> int:
    """Open a file as `os.open` does, or as the `opener` of `open`, but never wait for the writer of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_small(path: str) -> bytes:
    pieces: list[bytes] = []
    left_bytes = MAX_SIDECAR_BYTES + 1
    try:
        descriptor = without_waiting(path, os.O_RDONLY)
        try:
            # Not one buffer for the longest file: to get and give back so much takes longer than the reading.
            while left_bytes and (piece := os.read(descriptor, min(left_bytes, SIDECAR_PIECE_BYTES))):
                pieces.append(piece)
                left_bytes -= len(piece)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadCaptions(f"{path}: {error.strerror}") from None
    if not left_bytes:
        raise BadCaptions(f"{path}: a caption file has at most {MAX_SIDECAR_BYTES:,} bytes")
    return b"".join(pieces)
