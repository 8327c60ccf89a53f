"""The careful image reader: what a picture looks like, as 8-bit RGB, and JPEG bytes that say the same.

>>> rgb = read_rgb(Path("photo.png").read_bytes())  # (H, W, 3) uint8: upright, alpha on white, 16-bit scaled
"""

import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from rwkvclip_cli.data.packing.left_out import JPEG_FORMATS, STRIP_PIXELS, decode_whole
from rwkvclip_cli.data.packing.samples import MAX_IMAGE_BYTES, BadImage, without_waiting
from rwkvclip_cli.limits import MAX_PIXELS

RGB = NDArray[np.uint8]  # (height, width, 3)

MAX_JPEG_SIDE = 65_500  # JPEG_MAX_DIMENSION of libjpeg

# Formats whose reader starts another program (EPS: Ghostscript) or only names a file that it cannot decode.
UNSAFE_FORMATS = frozenset({"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG"})

# EXIF 2.32, tag 0x0112: how the stored picture has to be turned to stand upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TIFF_BITS_PER_SAMPLE = 258
TIFF_PHOTOMETRIC = 262
TIFF_WHITE_IS_ZERO = 0

# What stands in for pictures in scraped folders: first bytes and their meaning.
LOOKALIKES = (
    (b"version https://git-lfs", "a Git LFS pointer; git lfs pull brings the picture"),
    (b"<", "markup: an HTML page or an SVG drawing"),
    (b"data:", "a data URI, text"),
    (b"HTTP/", "an HTTP answer with its head"),
    (b"\x1f\x8b", "gzip data"),
    (b"PAR1", "a parquet table; give it as a source of its own"),
    (b"\xff\x0a", "JPEG XL, which no reader here decodes"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL, which no reader here decodes"),
    (b"\xff\xd8", "a JPEG of a kind that no reader here decodes (12 bits, JPEG-LS), or damaged"),
)
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"hevc", b"mif1", b"msf1")


@dataclass(frozen=True)
class Header:
    """What a picture's first bytes claim: Pillow's format name, the stored size, and that EXIF does not turn it."""

    format: str
    width: int
    height: int
    is_upright: bool = True

    @property
    def is_jpeg(self) -> bool:
        """Whether the bytes are JPEG."""
        return self.format in JPEG_FORMATS


def read_file(path: str) -> bytes:
    """Read a picture file, or raise BadImage: it is missing, no regular file, empty, unreadable or too large."""
    try:
        descriptor = without_waiting(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        raise BadImage("missing-image", f"no file {path}") from None
    except OSError as error:
        raise BadImage("unreadable-image", error.strerror or str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadImage("unreadable-image", "not a regular file")
        if status.st_size > MAX_IMAGE_BYTES:
            raise BadImage("too-large", f"{status.st_size:,} bytes; at most {MAX_IMAGE_BYTES:,} are read")
        pieces = []
        # One call reads all of an ordinary file, and another finds its end.
        while piece := os.read(descriptor, status.st_size + 1):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except OSError as error:
        raise BadImage("unreadable-image", error.strerror or str(error)) from None
    finally:
        os.close(descriptor)


def read_header(data: bytes, max_pixels: int = MAX_PIXELS) -> Header:
    """Read format and size without decoding; BadImage for what Pillow does not know or `max_pixels` forbids."""
    with _bounded(max_pixels), _open(data) as image:
        return Header(str(image.format), image.width, image.height, _is_upright(image))


def read_rgb(data: bytes, max_pixels: int = MAX_PIXELS) -> RGB:
    """Decode a picture to (H, W, 3) uint8 as a careful viewer shows it.

    The first frame, turned as EXIF says, transparency laid on white, 16-bit and float values scaled to
    8 bits. ICC profiles and gamma are ignored. Raises BadImage for what cannot be decoded completely.
    """
    with _bounded(max_pixels):
        image = _load(data)
        try:
            orientation = _orientation(image)
        except Exception:
            # A getexif() that failed half way can leave an object whose later conversions are damaged.
            image = _load(data)
            orientation = None
        try:
            flat = _flatten(image)
        except Exception as error:
            raise _unreadable(error) from error
    if orientation in UPRIGHT:
        flat = flat.transpose(UPRIGHT[orientation])
    return _array(flat)


def _array(image: Image.Image) -> RGB:
    """The pixels of an RGB image. Strip by strip: Pillow would hold two more copies of a large one on the way."""
    rows = max(1, STRIP_PIXELS // image.width)
    if image.height <= rows:
        return np.asarray(image)
    rgb = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        rgb[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    return rgb


def is_same(first: RGB, second: RGB) -> bool:
    """Whether two pictures are equal, strip by strip as well."""
    if first.shape != second.shape:
        return False
    rows = max(1, STRIP_PIXELS // first.shape[1])
    tops = range(0, first.shape[0], rows)
    return all(np.array_equal(first[top : top + rows], second[top : top + rows]) for top in tops)


def read_eighth(data: bytes) -> RGB | None:
    """Decode a JPEG, grey or YCbCr, as it is stored, at an eighth of its size: (ceil(H / 8), ceil(W / 8), 3) uint8.

    Each pixel is the mean of a block as the JPEG holds it; half the work of a whole decode. None for a JPEG that shows
    any fault.
    """
    try:
        with _bounded(MAX_JPEG_SIDE**2):
            image = _open(data)
            image.draft(None, (1, 1))
            image.decodermaxblock = len(data)  # else Pillow decodes what is behind 64 KiB in another go
            image.load()
            return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception:  # whatever it is, the whole decode tells it better
        return None


def shrink(rgb: RGB, max_side: int) -> RGB:
    """Scale (H, W, 3) down so that its longer side is `max_side` pixels; a smaller picture stays as it is."""
    height, width = rgb.shape[:2]
    longer = max(height, width)
    if longer <= max_side:
        return rgb
    size = (max(1, round(width * max_side / longer)), max(1, round(height * max_side / longer)))
    return np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.LANCZOS))


def encode_jpeg(rgb: RGB, quality: int) -> bytes:
    """Encode (H, W, 3) uint8 as a baseline JPEG without metadata.

    Chroma keeps its full resolution: with it halved, no quality brings coloured noise within 2 of 255.
    Raises BadImage where a side is beyond what JPEG holds.
    """
    height, width = rgb.shape[:2]
    if max(height, width) > MAX_JPEG_SIDE:
        raise BadImage("too-large", f"{width}x{height}: a JPEG side holds at most {MAX_JPEG_SIDE:,} pixels")
    for optimize in (True, False):
        buffer = io.BytesIO()
        try:
            Image.fromarray(rgb).save(buffer, "JPEG", quality=quality, subsampling=0, optimize=optimize)
        except OSError:
            # Pillow keeps an optimized picture in a buffer of fixed size, which noise outgrows.
            if not optimize:
                raise
        else:
            break
    return buffer.getvalue()


@cache
def formats() -> tuple[str, ...]:
    """The names of the picture formats that are tried. The first call loads a reader for each."""
    # The common formats first, as Pillow itself tries them: some of the rare ones have no magic to refuse by.
    Image.preinit()
    Image.init()
    return tuple(name for name in Image.ID if name not in UNSAFE_FORMATS)


@contextmanager
def _bounded(max_pixels: int) -> Iterator[None]:
    """Let Pillow refuse, before it decodes, more than `max_pixels`: a picture inside a picture (ICO) too."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _open(data: bytes) -> ImageFile.ImageFile:
    if not data:
        raise BadImage("empty-file", "no bytes at all")
    try:
        return Image.open(io.BytesIO(data), formats=formats())
    except UnidentifiedImageError as error:
        raise BadImage("unreadable-image", _resembles(data)) from error
    except Exception as error:
        raise _unreadable(error) from error


def _load(data: bytes) -> ImageFile.ImageFile:
    return decode_whole(lambda: _decode(data))


def _decode(data: bytes) -> ImageFile.ImageFile:
    image = _open(data)
    try:
        image.load()
    except Exception as error:
        raise _unreadable(error) from error
    return image


def _orientation(image: Image.Image) -> int | None:
    return image.getexif().get(ExifTags.Base.Orientation)


def _is_upright(image: Image.Image) -> bool:
    try:
        return _orientation(image) not in UPRIGHT
    except Exception:  # damaged EXIF, of any kind
        return False


def _resembles(data: bytes) -> str:
    """What bytes that no reader knows look like, for the user's next step."""
    if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS:
        return "HEIC, which no reader here decodes"
    start = data.lstrip()[:64]
    words = next((words for magic, words in LOOKALIKES if start.startswith(magic)), None)
    return words or "no picture format that can be read"


def _unreadable(error: Exception) -> BadImage:
    """What Pillow raised, as a reason. Its readers raise almost any type for damaged bytes, so none is excluded."""
    if isinstance(error, BadImage):
        return error
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        claimed = re.search(r"(\d+) pixels", words)
        count = f"{int(claimed[1]):,} pixels" if claimed else "too many pixels"
        return BadImage("too-many-pixels", f"{count}; --max-pixels is {Image.MAX_IMAGE_PIXELS:,}")
    if isinstance(error, EOFError) or any(each in words.lower() for each in ("truncated", "not enough")):
        return BadImage("truncated-image", words)
    return BadImage("unreadable-image", words)


def _flatten(image: Image.Image) -> Image.Image:
    """An RGB image of the same picture: whatever its mode, without transparency."""
    convert = _BY_MODE.get(image.mode)
    if convert is not None:
        return convert(image)
    if image.has_transparency_data:
        return _on_white(_narrow_colour_key(image))
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    canvas = Image.new("RGB", rgba.size, (255, 255, 255))
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas


def _narrow_colour_key(image: Image.Image) -> Image.Image:
    """Bring a 16-bit PNG's transparent colour to the 8 bits to which Pillow has cut the pixels."""
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and max(key) > 255:
        image.info["transparency"] = tuple(value >> 8 for value in key)
    return image


def _grey16(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    full = 65535.0
    tags: Any = getattr(image, "tag_v2", {})
    bits = tags.get(TIFF_BITS_PER_SAMPLE, (16,))[0]
    if 8 < bits < 16:
        full = float(2**bits - 1)
    scaled = values * 255.0 / full
    if tags.get(TIFF_PHOTOMETRIC) == TIFF_WHITE_IS_ZERO:
        scaled = 255.0 - scaled
    key = image.info.get("transparency")
    if isinstance(key, int):
        scaled[values == key] = 255.0
    return _grey8(scaled)


def _grey32(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    if image.format in ("PPM", "PNG"):  # Pillow widens these to the whole of 16 bits
        return _grey8(values * 255.0 / 65535.0)
    return _grey8(_to_byte_range(values, unit_is_white=False))


def _grey_float(image: Image.Image) -> Image.Image:
    values = np.nan_to_num(np.asarray(image).astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return _grey8(_to_byte_range(values, unit_is_white=True))


def _to_byte_range(values: NDArray[np.float64], unit_is_white: bool) -> NDArray[np.float64]:
    """Bring values without a declared range to 0..255: the narrowest usual range that holds them all, or a stretch."""
    low, high = float(values.min()), float(values.max())
    if low >= 0:
        for white in (1.0, 255.0, 65535.0) if unit_is_white else (255.0, 65535.0):
            if high <= white:
                return values * 255.0 / white
    return (values - low) * 255.0 / (high - low) if high > low else np.zeros_like(values)


def _grey8(values: NDArray[np.float64]) -> Image.Image:
    return Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8)).convert("RGB")


def _lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert converted is not None  # None is for inPlace alone
    return converted


_BY_MODE: dict[str, Callable[[Image.Image], Image.Image]] = {
    "I;16": _grey16,
    "I;16L": _grey16,
    "I;16B": _grey16,
    "I;16N": _grey16,
    "I": _grey32,
    "F": _grey_float,
    "LAB": _lab,
}
