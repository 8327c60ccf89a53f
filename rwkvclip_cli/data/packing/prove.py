"""From any picture to a JPEG that is proved to train: DALI decodes it to what the careful reader sees.

>>> prepare([Path("cat.png").read_bytes()], ImageOptions())[0].kept
're-encoded:png'
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rwkvclip_cli.config import MAX_PIXELS
from rwkvclip_cli.data.packing.images import RGB, Header, encode_jpeg, read_header, read_rgb, shrink
from rwkvclip_cli.data.packing.jpeg import check_scans, is_common_jpeg, lengthen_scans, walk_jpeg
from rwkvclip_cli.data.packing.samples import BadImage

KEPT = "kept"
RESIZED = "resized"

# Mean absolute difference, of 255, within which a re-encoded picture is the same picture.
FAITHFUL_MEAN = 2.0
# Tried after --quality, until the picture is faithful: noise needs more than photographs do.
HIGHER_QUALITIES = (98, 100)

# Pictures decoded side by side: beyond this a batch gains nothing and only holds memory, about 15 bytes a pixel.
GROUP_PIXELS = 2**21
GROUP_COUNT = 32


@dataclass(frozen=True)
class ImageOptions:
    """How pictures are treated; the fields are those of `PackConfig`."""

    proof: str = "decode"
    quality: int = 95
    max_side: int | None = None
    max_pixels: int = MAX_PIXELS


@dataclass(frozen=True)
class Prepared:
    """A JPEG for a record. `kept` is KEPT (the original bytes), RESIZED, or `re-encoded:` and why.

    width, height: in pixels, as decoded; as stored (before EXIF turns it) where the proof decodes nothing.
    """

    jpeg: bytes
    kept: str
    width: int
    height: int


class Decoder:
    """DALI's decoder on the CPU, the one that training uses. Holds its pipelines until a bad image spoils them."""

    def __init__(self, batch_size: int = GROUP_COUNT) -> None:
        self._batch_size = batch_size
        self._pipelines: dict[str, Any] = {}

    def decode(self, jpegs: Sequence[bytes], sizes: Sequence[tuple[int, int]]) -> list[RGB | None]:
        """The pixels of each JPEG, (H, W, 3) uint8; None where DALI refuses or sees another size than (W, H).

        The size is read first, so that a header that lies costs no memory.
        """
        shapes = self._run("peek", jpegs)
        fitting = [
            index
            for index, (shape, (width, height)) in enumerate(zip(shapes, sizes, strict=True))
            if shape is not None and tuple(shape[:2]) == (height, width)
        ]
        pixels: list[RGB | None] = [None] * len(jpegs)
        for index, decoded in zip(fitting, self._run("decode", [jpegs[index] for index in fitting]), strict=True):
            pixels[index] = decoded
        return pixels

    def _run(self, what: str, jpegs: Sequence[bytes]) -> list[Any]:
        results: list[Any] = []
        for start in range(0, len(jpegs), self._batch_size):
            results += self._run_batch(what, jpegs[start : start + self._batch_size])
        return results

    def _run_batch(self, what: str, jpegs: Sequence[bytes]) -> list[Any]:
        """One result a JPEG, None where DALI raises. It names no culprit, so the halves are tried again."""
        try:
            pipeline = self._pipelines.get(what) or self._build(what)
            self._pipelines[what] = pipeline
            pipeline.feed_input("jpegs", [np.frombuffer(jpeg, np.uint8) for jpeg in jpegs])
            (output,) = pipeline.run()
            return [output.at(index) for index in range(len(jpegs))]  # copies: DALI's own memory is used again
        except RuntimeError:
            self._pipelines.pop(what, None)  # invalid from now on
        if len(jpegs) == 1:
            return [None]
        half = len(jpegs) // 2
        return self._run_batch(what, jpegs[:half]) + self._run_batch(what, jpegs[half:])

    def _build(self, what: str) -> Any:
        from nvidia.dali import Pipeline, fn, types

        pipeline = Pipeline(
            batch_size=self._batch_size, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_async=False
        )
        with pipeline:
            jpegs = fn.external_source(name="jpegs", device="cpu")
            if what == "peek":
                pipeline.set_outputs(fn.peek_image_shape(jpegs))
            else:
                pipeline.set_outputs(fn.decoders.image(jpegs, device="cpu", output_type=types.RGB))
        pipeline.build()
        return pipeline


@dataclass
class _Picture:
    """A picture on its way: `rgb` are its careful pixels, `why` says why its own bytes will not do."""

    index: int
    data: bytes
    header: Header
    rgb: RGB | None = None
    why: str = ""
    quality: int = 0
    jpeg: bytes = b""


def prepare(
    pictures: Sequence[bytes], options: ImageOptions, decoder: Decoder | None = None
) -> list[Prepared | BadImage]:
    """Prepare each picture for a record, or say why it cannot be.

    A JPEG keeps its bytes where DALI's pixels equal the careful reader's and no scan lacks data. Everything else is
    encoded anew, and DALI's pixels of the new bytes come within FAITHFUL_MEAN of the careful ones; a `quality` too low
    for that is raised. With proof `structure` a JPEG keeps its bytes where its markers are whole, with `none` always;
    but a rare kind (lossless, arithmetic) is encoded anew whatever the proof.
    """
    decoder = decoder or Decoder()
    results: list[Prepared | BadImage | None] = [None] * len(pictures)
    group: list[_Picture] = []
    pixels = 0
    for index, data in enumerate(pictures):
        try:
            header = read_header(data, options.max_pixels)
            if header.is_jpeg:
                check_scans(data)
        except BadImage as fault:
            results[index] = fault
            continue
        if group and (pixels + header.width * header.height > GROUP_PIXELS or len(group) == GROUP_COUNT):
            _prepare_group(group, options, decoder, results)
            group, pixels = [], 0
        group.append(_Picture(index, data, header))
        pixels += header.width * header.height
    _prepare_group(group, options, decoder, results)
    return [result for result in results if result is not None]


def _prepare_group(
    group: list[_Picture], options: ImageOptions, decoder: Decoder, results: list[Prepared | BadImage | None]
) -> None:
    to_compare, to_encode = [], []
    for picture in group:
        try:
            kept = _examine(picture, options)
        except BadImage as fault:
            results[picture.index] = fault
            continue
        if kept is not None:
            results[picture.index] = kept
        elif picture.why:
            to_encode.append(picture)
        else:
            to_compare.append(picture)
    for picture, seen in zip(to_compare, _decode(decoder, to_compare, [p.data for p in to_compare]), strict=True):
        rgb = _pixels(picture)
        if seen is not None and np.array_equal(seen, rgb):
            results[picture.index] = Prepared(picture.data, KEPT, rgb.shape[1], rgb.shape[0])
            continue
        try:
            picture.rgb = _read_whole(picture, options)
        except BadImage as fault:
            results[picture.index] = fault
            continue
        picture.why = "re-encoded:refused-by-dali" if seen is None else "re-encoded:other-pixels-in-dali"
        to_encode.append(picture)
    _encode_all(to_encode, options, decoder, results)


def _examine(picture: _Picture, options: ImageOptions) -> Prepared | None:
    """Read the careful pixels and set `why` where the bytes cannot stay; or the result, where no pixels are needed.

    Where the bytes may stay, the pixels are those of the JPEG with its scans lengthened: what DALI has to see in the
    JPEG as it is. So the comparison, which is made anyway, shows missing data too, though both are libjpeg at heart.
    """
    header = picture.header
    is_long = options.max_side is not None and max(header.width, header.height) > options.max_side
    is_common = header.is_jpeg and is_common_jpeg(picture.data)
    if header.is_jpeg and not is_long and not is_common:
        picture.why = "re-encoded:rare-jpeg"
    elif header.is_jpeg and not is_long and options.proof != "decode":
        if options.proof == "none" or _is_whole(picture.data):
            return Prepared(picture.data, KEPT, header.width, header.height)
        picture.why = "re-encoded:bad-structure"
    elif is_long:
        picture.why = RESIZED
    elif not header.is_jpeg:
        picture.why = f"re-encoded:{header.format.lower()}"
    if is_common and options.proof == "decode":
        picture.rgb = _read_lengthened(picture, options)
        if picture.why:
            picture.rgb = _read_whole(picture, options)
    else:
        picture.rgb = read_rgb(picture.data, options.max_pixels)
    if is_long and options.max_side is not None:
        picture.rgb = shrink(picture.rgb, options.max_side)
    return None


def _read_lengthened(picture: _Picture, options: ImageOptions) -> RGB:
    """The careful pixels of a JPEG, but other ones where a scan lacks data."""
    try:
        return read_rgb(lengthen_scans(picture.data), options.max_pixels)
    except BadImage:  # markers that are out of place: whatever is wrong, the bytes as they are tell it better
        return read_rgb(picture.data, options.max_pixels)


def _read_whole(picture: _Picture, options: ImageOptions) -> RGB:
    """The careful pixels of a JPEG whose lengthened ones are known; BadImage where a scan lacks data."""
    rgb = read_rgb(picture.data, options.max_pixels)
    if not np.array_equal(rgb, _pixels(picture)):
        raise BadImage("truncated-image", "the data of a scan ends before the picture does")
    return rgb


def _is_whole(data: bytes) -> bool:
    try:
        walk_jpeg(data)
    except BadImage:
        return False
    return True


def _encode_all(
    pictures: list[_Picture], options: ImageOptions, decoder: Decoder, results: list[Prepared | BadImage | None]
) -> None:
    qualities = [options.quality, *(quality for quality in HIGHER_QUALITIES if quality > options.quality)]
    for quality in qualities:
        for picture in pictures:
            try:
                picture.jpeg = encode_jpeg(_pixels(picture), quality)
            except BadImage as fault:
                results[picture.index] = fault
        pictures = [picture for picture in pictures if results[picture.index] is None]
        if options.proof == "decode":
            decoded = _decode(decoder, pictures, [picture.jpeg for picture in pictures])
            faithful = [_is_faithful(seen, picture) for seen, picture in zip(decoded, pictures, strict=True)]
        else:
            faithful = [True] * len(pictures)
        for picture, is_faithful in zip(pictures, faithful, strict=True):
            if is_faithful:
                height, width = _pixels(picture).shape[:2]
                results[picture.index] = Prepared(picture.jpeg, picture.why, width, height)
        pictures = [picture for picture in pictures if results[picture.index] is None]
    for picture in pictures:
        results[picture.index] = BadImage(
            "not-faithful", f"no JPEG of quality up to {qualities[-1]} comes within {FAITHFUL_MEAN:g} of 255 in DALI"
        )


def _is_faithful(seen: RGB | None, picture: _Picture) -> bool:
    if seen is None:
        return False
    rgb = _pixels(picture)
    # Unsigned bytes: the larger less the smaller is the difference, without a wider copy of both.
    difference = np.maximum(seen, rgb)
    difference -= np.minimum(seen, rgb)
    return float(difference.mean(dtype=np.float64)) <= FAITHFUL_MEAN


def _decode(decoder: Decoder, pictures: Sequence[_Picture], jpegs: Sequence[bytes]) -> list[RGB | None]:
    sizes = [(_pixels(picture).shape[1], _pixels(picture).shape[0]) for picture in pictures]
    if not sizes:
        return []
    return decoder.decode(jpegs, sizes)


def _pixels(picture: _Picture) -> RGB:
    assert picture.rgb is not None
    return picture.rgb
