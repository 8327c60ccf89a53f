"""The careful reader against pictures whose pixels are known, and against what is no picture."""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms

from rwkvclip_cli.data.packing.images import (
    MAX_JPEG_SIDE,
    encode_jpeg,
    is_same,
    read_eighth,
    read_file,
    read_header,
    read_rgb,
    shrink,
)
from rwkvclip_cli.data.packing.jpeg import check_structure, walk_jpeg
from rwkvclip_cli.data.packing.samples import BadImage

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def grey(values: list[int]) -> list[list[list[int]]]:
    return [[[value] * 3 for value in values]]


def photo(size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Something smooth with all channels different, which JPEG takes well."""
    x, y = np.meshgrid(np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1]))
    return Image.fromarray(np.rint(np.stack([255 * x, 255 * y, 255 * (1 - x)], -1)).astype(np.uint8))


def test_plain_pixels_are_themselves():
    rgb = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8)
    assert np.array_equal(read_rgb(encoded(Image.fromarray(rgb), "PNG")), rgb)


# A 3 x 2 picture with a red corner at the top left, stored as each orientation demands; upright it is the same.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_is_applied(orientation, format):
    upright = np.array([[RED, GREEN, BLUE], [WHITE, BLACK, WHITE]], np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    options = {"lossless": True} if format == "WEBP" else {}
    assert np.array_equal(read_rgb(encoded(stored, format, exif=exif, **options)), upright)


def test_a_broken_exif_block_does_not_matter():
    plain = encoded(photo(), "JPEG")
    broken = b"Exif\0\0no TIFF header"
    data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(broken) + 2) + broken + plain[2:]
    assert np.array_equal(read_rgb(data), read_rgb(plain))


def test_what_a_failing_exif_reader_does_to_the_picture_does_not_matter(monkeypatch):
    def damage(image):
        image.paste(0, (0, 0, *image.size))
        raise ValueError("broken EXIF")

    data = encoded(photo(), "PNG")
    monkeypatch.setattr(Image.Image, "getexif", damage)
    assert np.array_equal(read_rgb(data), np.asarray(photo()))


def test_transparency_lies_on_white():
    rgba = Image.new("RGBA", (3, 1))
    rgba.putdata([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 51)])
    assert read_rgb(encoded(rgba, "PNG")).tolist() == [[list(RED), list(WHITE), [204, 204, 204]]]


def test_grey_with_alpha_lies_on_white():
    image = Image.new("LA", (2, 1))
    image.putdata([(0, 255), (0, 0)])
    assert read_rgb(encoded(image, "PNG")).tolist() == grey([0, 255])


@pytest.mark.parametrize("transparency", [1, b"\xff\x00\xff"])
def test_a_transparent_palette_entry_is_white(transparency):
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    image.putdata([0, 1, 2])
    data = encoded(image, "PNG", transparency=transparency)
    assert read_rgb(data).tolist() == [[list(RED), list(WHITE), list(BLUE)]]


@pytest.mark.parametrize(("mode", "key", "pixels"), [("RGB", RED, [RED, BLUE]), ("L", 7, [7, 200])])
def test_a_transparent_colour_is_white(mode, key, pixels):
    image = Image.new(mode, (2, 1))
    image.putdata(pixels)
    data = encoded(image, "PNG", transparency=key)
    other = list(BLUE) if mode == "RGB" else [200] * 3
    assert read_rgb(data).tolist() == [[list(WHITE), other]]


def sixteen_bit_png(colour_type: int, samples: list[int], key: bytes = b"") -> bytes:
    """A PNG of one row with 16 bits a sample, written by hand: Pillow writes grey alone."""
    import zlib

    channels = {0: 1, 2: 3}[colour_type]
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", len(samples) // channels, 1, 16, colour_type, 0, 0, 0))]
    chunks += [(b"tRNS", key)] if key else []
    chunks += [(b"IDAT", zlib.compress(b"\0" + struct.pack(f">{len(samples)}H", *samples))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def test_16_bit_grey_is_scaled():
    assert read_rgb(sixteen_bit_png(0, [0, 257, 32768, 65535])).tolist() == grey([0, 1, 128, 255])


def test_a_transparent_16_bit_grey_is_white():
    assert read_rgb(sixteen_bit_png(0, [4369, 8738], struct.pack(">H", 4369))).tolist() == grey([255, 34])


def test_a_transparent_16_bit_colour_is_white():
    data = sixteen_bit_png(2, [65535, 0, 0, 0, 0, 65535], struct.pack(">3H", 65535, 0, 0))
    assert read_rgb(data).tolist() == [[list(WHITE), list(BLUE)]]


def test_a_wide_pgm_is_scaled_by_its_own_maximum():
    assert read_rgb(b"P5 3 1 1023\n" + struct.pack(">3H", 0, 512, 1023)).tolist() == grey([0, 128, 255])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([float("nan"), 0.5, float("inf")], [0, 128, 0]),
    ],
)
def test_float_values_are_scaled_by_the_range_that_holds_them(values, expected):
    data = encoded(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert read_rgb(data).tolist() == grey(expected)


def test_32_bit_integers_are_scaled_by_the_range_that_holds_them():
    data = encoded(Image.fromarray(np.array([[-100, 0, 100]], np.int32)), "TIFF")
    assert read_rgb(data).tolist() == grey([0, 128, 255])


def test_12_bit_grey_uses_its_whole_range():
    data = bytearray(encoded(Image.fromarray(np.array([[0, 0]], np.uint16)), "TIFF"))
    # BitsPerSample (tag 258, SHORT, 1 value) becomes 12; the two samples 0 and 4095 take three bytes.
    at = data.index(struct.pack("<HHI", 258, 3, 1)) + 8
    data[at : at + 2] = struct.pack("<H", 12)
    strip = struct.unpack_from("<I", data, data.index(struct.pack("<HHI", 273, 4, 1)) + 8)[0]
    data[strip : strip + 3] = b"\x00\x0f\xff"
    assert read_rgb(bytes(data)).tolist() == grey([0, 255])


def test_16_bit_grey_with_white_as_zero_is_inverted():
    data = bytearray(encoded(Image.fromarray(np.array([[0, 65535]], np.uint16)), "TIFF"))
    at = data.index(struct.pack("<HHI", 262, 3, 1)) + 8
    data[at : at + 2] = struct.pack("<H", 0)
    assert read_rgb(bytes(data)).tolist() == grey([255, 0])


@pytest.mark.parametrize("has_adobe_marker", [True, False])
def test_cmyk_jpeg_shows_its_colours(has_adobe_marker):
    data = encoded(Image.new("RGB", (16, 16), (200, 40, 40)).convert("CMYK"), "JPEG", quality=100)
    if not has_adobe_marker:
        at = data.index(b"\xff\xee")
        data = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    assert np.abs(read_rgb(data).astype(int) - (200, 40, 40)).max() <= 3


def test_lab_shows_its_colours():
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    image = ImageCms.profileToProfile(Image.new("RGB", (4, 4), (200, 40, 40)), srgb, lab, outputMode="LAB")
    assert image is not None
    assert np.abs(read_rgb(encoded(image, "TIFF")).astype(int) - (200, 40, 40)).max() <= 3


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_counts(format):
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert read_rgb(data)[0, 0].tolist() == list(RED)


def test_one_bit_pictures_are_black_and_white():
    image = Image.new("1", (2, 1))
    image.putdata([0, 255])
    assert read_rgb(encoded(image, "PNG")).tolist() == grey([0, 255])


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (b"", "empty-file", "no bytes"),
        (b"hello", "unreadable-image", "no picture format"),
        (b"<!doctype html><title>404</title>", "unreadable-image", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\n", "unreadable-image", "git lfs pull"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0", "unreadable-image", "gzip"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "unreadable-image", "HEIC"),
        (encoded(photo(), "JPEG")[:-40], "truncated-image", "truncated"),
        (encoded(photo(), "PNG")[:-60], "truncated-image", ""),
    ],
    ids=["empty", "text", "html", "lfs", "gzip", "heic", "cut", "cut png"],
)
def test_what_is_no_whole_picture_is_refused_with_a_reason(data, reason, words):
    with pytest.raises(BadImage) as fault:
        read_rgb(data)
    assert fault.value.reason == reason
    assert words in fault.value.message


def test_a_postscript_file_is_refused_and_starts_no_interpreter(tmp_path, monkeypatch):
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(BadImage, match="no picture format"):
        read_rgb(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    assert not (tmp_path / "started").exists()


def test_too_many_pixels_are_refused_from_the_header_alone():
    data = encoded(photo((40, 30)), "PNG")[:50]  # header and the start of the pixels
    with pytest.raises(BadImage, match=r"1,200 pixels; --max-pixels is 1,199") as fault:
        read_rgb(data, max_pixels=1199)
    assert fault.value.reason == "too-many-pixels"
    with pytest.raises(BadImage) as fault:
        read_rgb(data, max_pixels=1200)
    assert fault.value.reason == "truncated-image"


def test_pillows_own_bound_is_left_as_it_was():
    before = Image.MAX_IMAGE_PIXELS
    read_header(encoded(photo(), "PNG"), max_pixels=2000)
    assert before == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(
    ("size", "max_side", "expected"),
    [((40, 30), 20, (20, 15)), ((30, 40), 20, (15, 20)), ((40, 30), 40, (40, 30)), ((400, 1), 20, (20, 1))],
)
def test_shrink_bounds_the_longer_side(size, max_side, expected):
    rgb = np.zeros((size[1], size[0], 3), np.uint8)
    height, width = shrink(rgb, max_side).shape[:2]
    assert (width, height) == expected


def test_encoding_is_close_and_carries_no_metadata():
    rgb = np.asarray(photo())
    data = encode_jpeg(rgb, 95)
    assert np.abs(read_rgb(data).astype(int) - rgb).mean() < 1
    assert b"Exif" not in data
    assert check_structure(walk_jpeg(data)) == (40, 30)


def test_a_side_beyond_jpegs_bound_is_refused():
    with pytest.raises(BadImage) as fault:
        encode_jpeg(np.zeros((1, MAX_JPEG_SIDE + 1, 3), np.uint8), 95)
    assert fault.value.reason == "too-large"
    assert encode_jpeg(np.zeros((1, MAX_JPEG_SIDE, 3), np.uint8), 95)


def test_files_are_read_and_what_is_none_is_refused(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"abc")
    assert read_file(str(tmp_path / "a.jpg")) == b"abc"
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, reason in (
        ("none.jpg", "missing-image"),
        ("a.jpg/b.jpg", "missing-image"),
        ("nul\0.jpg", "missing-image"),
        ("pipe.jpg", "unreadable-image"),
        (".", "unreadable-image"),
    ):
        with pytest.raises(BadImage) as fault:
            read_file(str(tmp_path / name))
        assert fault.value.reason == reason


def test_a_file_too_large_to_read_is_refused_unread(tmp_path: Path):
    with open(tmp_path / "huge.jpg", "wb") as file:
        file.truncate(2**31 + 1)  # sparse
    with pytest.raises(BadImage, match=r"2,147,483,649 bytes") as fault:
        read_file(str(tmp_path / "huge.jpg"))
    assert fault.value.reason == "too-large"


@pytest.mark.parametrize("quality", [1, 95, 98, 100])
def test_noise_is_encoded_at_every_quality(quality):
    """Noise outgrows the buffer that Pillow gives an optimized picture."""
    noise = np.random.default_rng(0).integers(0, 256, (400, 300, 3), dtype=np.uint8)
    back = np.asarray(Image.open(io.BytesIO(encode_jpeg(noise, quality))))
    assert back.shape == noise.shape
    if quality == 100:
        assert np.abs(back.astype(int) - noise).mean() < 2


def test_an_eighth_holds_the_means_of_blocks():
    rgb = np.zeros((24, 17, 3), np.uint8)
    rgb[:8, :8], rgb[8:16, 8:16], rgb[16:, 16:] = RED, GREEN, WHITE
    means = read_eighth(encode_jpeg(rgb, 100))
    assert means is not None
    assert means.shape == (3, 3, 3)
    for at, colour in (((0, 0), RED), ((1, 1), GREEN), ((0, 1), BLACK)):
        assert np.abs(means[at].astype(int) - colour).max() <= 2


def test_an_eighth_is_of_whole_jpegs_alone():
    assert read_eighth(encoded(photo(), "JPEG")[:-40]) is None
    assert read_eighth(b"no picture") is None


def test_a_header_tells_whether_exif_turns_the_picture():
    exif = Image.Exif()
    for orientation, is_upright in ((1, True), (6, False), (3, False), (9, True)):
        exif[ExifTags.Base.Orientation] = orientation
        assert read_header(encoded(photo(), "JPEG", exif=exif)).is_upright is is_upright
    assert read_header(encoded(photo(), "JPEG")).is_upright


def test_large_pictures_are_read_and_compared_in_strips(monkeypatch):
    data = encoded(photo((7, 23)), "PNG")
    whole = read_rgb(data)
    monkeypatch.setattr("rwkvclip_cli.data.packing.images.STRIP_PIXELS", 30)
    assert np.array_equal(read_rgb(data), whole)
    assert is_same(whole, whole.copy())
    for row in range(23):
        other = whole.copy()
        other[row, 3, 1] ^= 1
        assert not is_same(whole, other)
    assert not is_same(whole, whole[:-1])
