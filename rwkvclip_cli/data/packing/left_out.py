"""Whether a decoder has given every pixel of a picture: what it leaves out shows what the memory held before.

>>> image = decode_whole(lambda: opened_and_loaded(Path("photo.png").read_bytes()))

Many decoders take the end of their data (a whole zlib stream of too few rows, say) for the end of the picture, and say
nothing. So a picture is decoded over one fill and, where a pixel may be that fill still, over another: pixels that
differ then are not the picture's.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from rwkvclip_cli.data.packing.jpeg import OTHER_SURPLUS, SURPLUS, lengthen_scans, walk_jpeg
from rwkvclip_cli.data.packing.samples import BadImage

JPEG_FORMATS = ("JPEG", "MPO")  # an MPO is a JPEG, followed by further views
STRIP_PIXELS = 2**21

# TIFF 6.0 and its Technical Note 2: offsets and sizes of strips, or of tiles.
TIFF_COMPRESSION, TIFF_JPEG, TIFF_JPEG_TABLES = 259, 7, 347
TIFF_PLACES = ((273, 279), (324, 325))
JPEG_END = b"\xff\xd9"
SURPLUSES = (SURPLUS, OTHER_SURPLUS[0])

# The palette of a PCX of 256 colours is behind everything else: a mark and three bytes a colour.
PCX_PALETTE_KIND_AT, PCX_GREY = 68, b"\2\0"
PCX_PALETTE_MARK, PCX_PALETTE_BYTES = b"\x0c", 769

# The first is a colour that few pictures have, opaque.
FIRST_FILL = (171, 3, 213, 255)
OTHER_FILL = (84, 252, 42, 0)


@dataclass
class _Fills:
    """What was filled with `fill`. modes: of each picture's memory, of those within a picture (ICO) too."""

    fill: tuple[int, ...]
    modes: list[str] = field(default_factory=list)
    has_planes: bool = False

    def may_be_left_in(self, image: Image.Image) -> bool:
        """Whether some pixel, or one plane of it, may be what was there before."""
        if not self.modes:
            return False
        return self.has_planes or self.modes != [image.mode] or _holds(image, self.fill)


def decode_whole(load: Callable[[], ImageFile.ImageFile]) -> ImageFile.ImageFile:
    """What `load` opens and loads; BadImage where its data does not give every pixel.

    JPEGs are not looked at: libjpeg gives every line, and `prove` sees what their scans lack.
    """
    with _filling(FIRST_FILL) as fills:
        image = load()
    if fills.may_be_left_in(image):
        with _filling(OTHER_FILL):
            other = load()
        if not _are_equal(image, other):
            raise BadImage("truncated-image", "its data ends before the picture does")
    return image


@contextmanager
def _filling(fill: tuple[int, ...]) -> Iterator[_Fills]:
    """Have Pillow fill the memory of the pictures that it loads, before it decodes them."""
    fills = _Fills(fill)
    ordinary = ImageFile.ImageFile.load_prepare

    def prepare(image: ImageFile.ImageFile) -> None:
        ordinary(image)
        if image.format in JPEG_FORMATS:
            return
        if check := CHECKS.get(str(image.format)):
            check(image)
        extents = [tile.extents for tile in image.tile]
        # The first frame of a GIF may cover a part of the picture alone.
        boxes = extents if image.format == "GIF" else [(0, 0, *image.im.size)]
        for box in boxes:
            image.im.paste(_ink(image.mode, fill), box)
            fills.modes.append(image.mode)
        fills.has_planes |= len(set(extents)) < len(extents)

    ImageFile.ImageFile.load_prepare = prepare  # type: ignore[method-assign, assignment]
    try:
        yield fills
    finally:
        ImageFile.ImageFile.load_prepare = ordinary  # type: ignore[method-assign]


def _check_tiff(image: Any) -> None:
    """Refuse a TIFF of which a strip or tile is left out, or is a JPEG whose scan gives fewer rows than it claims."""
    # Bytes 0 to 7 are the header: so GDAL marks a strip or tile that a sparse file leaves out.
    if any(tile.codec_name == "raw" and tile.offset == 0 for tile in image.tile):
        raise BadImage("truncated-image", "a strip or tile of it is left out")
    tags = image.tag_v2
    if tags.get(TIFF_COMPRESSION) != TIFF_JPEG:
        return
    tables = tags.get(TIFF_JPEG_TABLES, b"")
    for places in TIFF_PLACES:
        for offset, count in zip(*(tags.get(tag, ()) for tag in places), strict=False):
            image.fp.seek(offset)
            if _strip_lacks_data(tables[:-2] + image.fp.read(count)[2:] if tables else image.fp.read(count)):
                raise BadImage("truncated-image", "the data of a JPEG strip or tile ends before its rows do")


def _strip_lacks_data(jpeg: bytes) -> bool:
    """Whether a JPEG is another picture with bits behind its scans. What cannot be read is for others to judge."""
    walk = walk_jpeg(jpeg)
    if walk.fault:  # perhaps of its end mark alone
        walk = walk_jpeg(jpeg + JPEG_END)
    try:
        longer = [lengthen_scans(walk, surplus) for surplus in SURPLUSES]
        pixels = [_array(Image.open(io.BytesIO(data))) for data in (walk.data, *longer)]
    except (OSError, SyntaxError, ValueError, BadImage):
        return False
    return not all(np.array_equal(pixels[0], each) for each in pixels[1:])


def _check_pcx(image: Any) -> None:
    """Refuse a PCX of 256 colours without all of its palette, which Pillow takes for grey or reads from the picture."""
    if image.tile[0].args[0] not in ("L", "P"):
        return
    image.fp.seek(PCX_PALETTE_KIND_AT)
    is_grey = image.fp.read(2) == PCX_GREY
    end = image.fp.seek(0, io.SEEK_END) - PCX_PALETTE_BYTES
    image.fp.seek(max(end, 0))
    if end >= 0 and image.fp.read(1) == PCX_PALETTE_MARK:
        image.fp.truncate(end)  # what is the palette's is none of the picture's
    elif not is_grey:
        raise BadImage("truncated-image", "its palette is cut off, or not at its end")


CHECKS: dict[str, Callable[[Any], None]] = {"TIFF": _check_tiff, "PCX": _check_pcx}


def _ink(mode: str, fill: tuple[int, ...]) -> int | tuple[int, ...]:
    """A fill as Pillow takes it for a mode; the last of two or four bands is alpha."""
    bands = Image.getmodebands(mode)
    if bands == 1:
        return fill[3] if mode == "1" else fill[0]
    return (fill[0], fill[3]) if bands == 2 else fill[:bands]


def _holds(image: Image.Image, fill: tuple[int, ...]) -> bool:
    """Whether any pixel is the fill. Band by band, which is the faster the sooner one of them excludes it."""
    one = Image.new(image.mode, (1, 1))
    one.im.paste(_ink(image.mode, fill), (0, 0, 1, 1))
    values = [_array(band) for band in one.split()]
    for strip in _strips(image):
        found = np.ones(1, bool)
        for band, value in enumerate(values):
            found = found & (_array(strip if len(values) == 1 else strip.getchannel(band)) == value)
            if not found.any():
                break
        else:
            return True
    return False


def _are_equal(first: Image.Image, second: Image.Image) -> bool:
    """Whether two pictures of one mode and size have the same pixels."""
    pairs = zip(_strips(first), _strips(second), strict=True)
    return all(np.array_equal(_array(one), _array(other)) for one, other in pairs)


def _array(image: Image.Image) -> NDArray[Any]:
    # A truth value in Pillow's array of black and white is a byte of 255, which NumPy at times finds unequal to true.
    return np.asarray(image.convert("L") if image.mode == "1" else image)


def _strips(image: Image.Image) -> Iterator[Image.Image]:
    """A picture some rows at a time, because its pixels as an array are a copy."""
    rows = max(1, STRIP_PIXELS // image.width)
    if image.height <= rows:
        yield image
        return
    for top in range(0, image.height, rows):
        yield image.crop((0, top, image.width, min(top + rows, image.height)))
