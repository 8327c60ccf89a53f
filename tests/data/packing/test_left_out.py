"""Data that ends before the picture does, in a file that is otherwise whole: never a picture that is partly black."""

import io
import itertools
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageFile

from rwkvclip_cli.data.packing.images import read_rgb
from rwkvclip_cli.data.packing.left_out import FIRST_FILL, OTHER_FILL
from rwkvclip_cli.data.packing.prove import ImageOptions, prepare
from rwkvclip_cli.data.packing.samples import BadImage

WIDTH, HEIGHT = 24, 20
BITS = {"1": (1, 0), "L": (8, 0), "I;16": (16, 0), "RGB": (8, 2), "RGB;16": (16, 2), "P": (8, 3), "LA": (8, 4)}
BITS |= {"RGBA": (8, 6)}
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# First column, first row and steps of the passes of an interlaced PNG: PNG specification, 8.1.
PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(mode: str, rows: list[bytes], size: tuple[int, int] = (WIDTH, HEIGHT), interlaced: bool = False) -> bytes:
    """A PNG whose zlib stream, whole and of right checksums, holds these rows alone."""
    bits, colour = BITS[mode]
    head = struct.pack(">IIBBBBB", *size, bits, colour, 0, 0, interlaced)
    palette = chunk(b"PLTE", bytes(range(6))) if mode == "P" else b""
    data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + palette + data + chunk(b"IEND", b"")


def row_bytes(mode: str, width: int = WIDTH) -> int:
    bits, colour = BITS[mode]
    return -(-width * bits * SAMPLES[colour] // 8)


def interlaced_rows(mode: str, size: tuple[int, int]) -> list[bytes]:
    """The rows of all passes, each byte 1."""
    rows = []
    for column, row, across, down in PASSES:
        width, height = -(-(size[0] - column) // across), -(-(size[1] - row) // down)
        rows += [b"\1" * row_bytes(mode, width)] * height if width > 0 else []
    return rows


def noise(size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def is_cut(data: bytes) -> bool:
    """Whether it is told as cut off; anything else but a whole picture is another fault."""
    reason = reason_of(data)
    assert reason in ("", "truncated-image")
    return bool(reason)


def reason_of(data: bytes) -> str:
    try:
        read_rgb(data)
    except BadImage as fault:
        return fault.reason
    return ""


@pytest.mark.parametrize("mode", BITS)
@pytest.mark.parametrize("value", [0, 1, 255])
def test_a_png_of_too_few_rows(mode: str, value: int) -> None:
    row = bytes([min(value, 1) if mode == "P" else value]) * row_bytes(mode)
    assert not is_cut(png(mode, [row] * HEIGHT))
    for rows in (1, 12, HEIGHT - 1):
        assert is_cut(png(mode, [row] * rows)), rows


@pytest.mark.parametrize("mode", BITS)
@pytest.mark.parametrize("size", [(WIDTH, HEIGHT), (3, 1), (5, 5)])
def test_an_interlaced_png_of_too_few_rows(mode: str, size: tuple[int, int]) -> None:
    rows = interlaced_rows(mode, size)
    assert not is_cut(png(mode, rows, size, interlaced=True))
    for count in range(1, len(rows)):
        assert is_cut(png(mode, rows[:count], size, interlaced=True)), count


def short_apng() -> bytes:
    whole = encoded(noise(), "PNG", save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT))])
    at = whole.index(b"IDAT") + 4
    end = at + int.from_bytes(whole[at - 8 : at - 4], "big")
    rows = zlib.decompress(whole[at:end])
    return whole[: at - 8] + chunk(b"IDAT", zlib.compress(rows[: len(rows) // 4])) + whole[end + 4 :]


def short_ico() -> bytes:
    inner = png("RGBA", [bytes(range(96))])
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, WIDTH, HEIGHT, 0, 0, 1, 32, len(inner), 22) + inner


def short_icns() -> bytes:
    inner = png("RGBA", [bytes(range(128))] * 31, (32, 32))
    return b"icns" + struct.pack(">I", 16 + len(inner)) + b"icp5" + struct.pack(">I", 8 + len(inner)) + inner


def tiff_of(change: Callable[[int, list[int]], list[int]], **options: object) -> bytes:
    """A TIFF of 25 strips whose entries `change` has seen: tag and values to values."""
    data = bytearray(encoded(noise((WIDTH, 200)), "TIFF", tiffinfo={278: 8}, strip_size=WIDTH * 3 * 8, **options))
    directory = int.from_bytes(data[4:8], "little")
    for number in range(int.from_bytes(data[directory : directory + 2], "little")):
        at = directory + 2 + 12 * number
        tag, kind, count = struct.unpack_from("<HHI", data, at)
        if tag not in (273, 279):
            continue
        form = {3: "H", 4: "I"}[kind]
        (values_at,) = struct.unpack_from("<I", data, at + 8)
        values = change(tag, list(struct.unpack_from(f"<{count}{form}", data, values_at)))
        struct.pack_into("<I", data, at + 4, len(values))
        struct.pack_into(f"<{len(values)}{form}", data, values_at, *values)
    return bytes(data)


def jpeg_2000_without(tile: slice) -> bytes:
    whole = encoded(noise(), "JPEG2000", no_jp2=True, tile_size=(8, 8))
    starts = [at for at in range(len(whole)) if whole.startswith(b"\xff\x90\x00\x0a", at)] + [len(whole) - 2]
    tiles = [whole[start:end] for start, end in itertools.pairwise(starts)]
    del tiles[tile]
    return whole[: starts[0]] + b"".join(tiles) + whole[-2:]


SHORT = {
    "the default image of an APNG": short_apng(),
    "a PNG in an ICO": short_ico(),
    "a PNG in an ICNS": short_icns(),
    "a TIFF of half its strips": tiff_of(lambda tag, values: values[:12]),
    "a TIFF whose last strip is left out": tiff_of(lambda tag, values: [*values[:-1], 0]),
    "a JPEG 2000 without its last tiles": jpeg_2000_without(slice(4, None)),
    "a JPEG 2000 without one tile": jpeg_2000_without(slice(4, 5)),
    "a BMP in RLE8 that ends behind a row": b"BM"
    + struct.pack("<IHHI", 0, 0, 0, 1078)
    + struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 8, 1, 6, 0, 0, 256, 0)
    + bytes(1024)
    + bytes([WIDTH, 3, 0, 0, 0, 1]),
    "a QOI that ends early": encoded(noise(), "QOI")[:200] + bytes(7) + b"\1",
    "a PPM in figures": b"P3 24 20 255 " + b"1 2 3 " * 100,
    "a DDS": encoded(noise(), "DDS")[:-100],
    "a TGA": encoded(noise(), "TGA", compression="tga_rle")[:-100],
}


@pytest.mark.parametrize("kind", SHORT)
def test_other_formats_whose_data_ends_early(kind: str) -> None:
    assert is_cut(SHORT[kind])


def coloured_pcx(**options: object) -> bytes:
    return encoded(noise().convert("P", palette=Image.Palette.ADAPTIVE), "PCX", **options)


def test_a_pcx_without_all_of_its_palette() -> None:
    whole = coloured_pcx()
    assert not is_cut(whole)
    expected = noise().convert("P", palette=Image.Palette.ADAPTIVE).convert("RGB")
    assert np.array_equal(read_rgb(whole), np.asarray(expected))
    for missing in range(1, len(whole) - 128):
        assert is_cut(whole[:-missing]), missing
    assert is_cut(whole + b"\0"), "the palette is looked for at the end"


def test_pixels_of_a_pcx_that_look_like_a_palette_are_none() -> None:
    """A cut may leave a byte of the picture where the mark of the palette belongs."""
    colours = Image.new("P", (WIDTH, 64), 12)
    colours.putpalette(bytes(range(255, -1, -1)) * 3)
    whole = encoded(colours, "PCX")
    assert not is_cut(whole)
    cuts = [cut for cut in range(1, 128) if whole[:-cut][-769:][:1] == b"\x0c"]
    assert len(cuts) > 20
    assert all(is_cut(whole[:-cut]) for cut in cuts)


def test_a_grey_pcx_needs_no_palette() -> None:
    whole = encoded(noise().convert("L"), "PCX")
    assert not is_cut(whole)
    grey = whole[:68] + b"\2" + whole[69:-769]
    assert np.array_equal(read_rgb(grey), read_rgb(whole))


@pytest.mark.parametrize("rows", [64, 72, 128])
@pytest.mark.parametrize("quality", [50, 95])
def test_a_jpeg_strip_of_a_tiff_that_claims_more_rows(rows: int, quality: int) -> None:
    """The sizes in the directory and in the strip's frame header are raised from 64 rows."""
    options = {"compression": "jpeg", "quality": quality, "tiffinfo": {278: 64}, "strip_size": 48 * 3 * 64}
    data = bytearray(encoded(noise((48, 64)), "TIFF", **options))
    directory = int.from_bytes(data[4:8], "little")
    for number in range(int.from_bytes(data[directory : directory + 2], "little")):
        at = directory + 2 + 12 * number
        if int.from_bytes(data[at : at + 2], "little") in (257, 278):
            struct.pack_into("<H", data, at + 8, rows)
    frame = data.index(b"\xff\xc0\x00\x11\x08")
    assert data[frame + 5 : frame + 7] == b"\0\x40"
    struct.pack_into(">H", data, frame + 5, rows)
    assert read_rows(bytes(data)) == (rows if rows == 64 else "truncated-image")


def read_rows(data: bytes) -> int | str:
    return reason_of(data) or len(read_rgb(data))


def test_what_the_short_ones_were_made_from_is_whole() -> None:
    assert not is_cut(tiff_of(lambda tag, values: values))
    assert not is_cut(jpeg_2000_without(slice(0, 0)))


@pytest.mark.parametrize("fill", [FIRST_FILL, OTHER_FILL])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "1", "CMYK", "F", "I;16"])
def test_a_picture_of_the_fills_own_colour_is_whole(mode: str, fill: tuple[int, ...]) -> None:
    """Where the first fill is the picture's, the other one tells."""
    bands = Image.getmodebands(mode)
    ink = fill[0] if bands == 1 else (fill[0], fill[3]) if bands == 2 else fill[:bands]
    picture = Image.new(mode, (WIDTH, HEIGHT))
    picture.im.paste(ink, (0, 0, WIDTH, HEIGHT))
    assert not is_cut(encoded(picture, "TIFF" if mode in ("CMYK", "F") else "PNG"))
    expected = [255] * 3 if fill[3] == 0 and mode in ("RGBA", "LA") else list(fill[:3])
    if mode in ("RGB", "RGBA"):
        assert np.all(read_rgb(encoded(picture, "PNG")) == expected)


def test_the_first_frame_of_a_gif_may_be_smaller_than_the_picture() -> None:
    small = encoded(noise((8, 8)).convert("P"), "GIF")
    data = small[:6] + struct.pack("<HH", WIDTH, HEIGHT) + small[10:]
    inner = read_rgb(small)
    rgb = read_rgb(data)
    assert rgb.shape == (HEIGHT, WIDTH, 3)
    assert np.array_equal(rgb[:8, :8], inner)


def test_large_pictures_are_compared_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rwkvclip_cli.data.packing.left_out.STRIP_PIXELS", 2 * WIDTH)
    for rows in range(1, HEIGHT + 1):
        assert is_cut(png("RGB", [bytes(72)] * rows)) is (rows < HEIGHT)


def test_pillow_is_left_as_it_was() -> None:
    before = ImageFile.ImageFile.load_prepare
    assert is_cut(png("RGB", [bytes(72)]))
    assert ImageFile.ImageFile.load_prepare is before


def test_pack_rejects_it() -> None:
    whole, short = (png("RGB", [bytes(range(72))] * rows) for rows in (HEIGHT, 1))
    kept, rejected = prepare([whole, short], ImageOptions())
    assert not isinstance(kept, BadImage)
    assert isinstance(rejected, BadImage)
    assert (rejected.reason, rejected.message) == ("truncated-image", "its data ends before the picture does")
