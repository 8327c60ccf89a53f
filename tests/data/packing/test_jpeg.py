"""JPEG as bytes: walked by its markers, and shown to hold all of its picture."""

import io
from pathlib import Path

import numpy as np
import pytest
from pack_files import smooth
from PIL import Image

from rwkvclip_cli.data.packing.decoder import Decoder
from rwkvclip_cli.data.packing.images import MAX_JPEG_SIDE, Header, read_header, read_rgb
from rwkvclip_cli.data.packing.jpeg import (
    FIRST_WINDOW,
    SCAN_DATA,
    check_structure,
    is_common,
    lengthen_scans,
    plain_size,
    probes,
    stores_rgb,
    walk_jpeg,
)
from rwkvclip_cli.data.packing.samples import BadImage

# The smallest whole JPEG skeleton: frame header of 1 x 2 pixels, then a scan with a stuffed zero and a restart.
SOI, EOI = b"\xff\xd8", b"\xff\xd9"
FRAME = b"\xff\xc0\x00\x0b\x08\x00\x02\x00\x01\x01\x01\x11\x00"
SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"\x12\xff\x00\x34\xff\xd0\x56"


@pytest.mark.parametrize(
    "data",
    [
        SOI + FRAME + SCAN + EOI,
        SOI + b"\xff\xff" + FRAME + SCAN + b"\xff" + EOI,
        SOI + FRAME + SCAN + SCAN + EOI + b"trailing bytes",
    ],
    ids=["plain", "fill bytes", "two scans"],
)
def test_the_markers_of_a_whole_jpeg_can_be_walked(data):
    assert check_structure(walk_jpeg(data)) == (1, 2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00" + SOI + FRAME + SCAN + EOI, "bad-structure"),
        (SOI + FRAME + SCAN, "truncated-image"),
        (SOI + FRAME + SCAN + b"\xff", "truncated-image"),
        (SOI + FRAME[:6], "truncated-image"),
        (SOI + FRAME + EOI, "bad-structure"),
        (SOI + SCAN + EOI, "bad-structure"),
        (SOI + FRAME + FRAME + SCAN + EOI, "bad-structure"),
        (SOI + b"junk" + FRAME + SCAN + EOI, "bad-structure"),
        (SOI + FRAME.replace(b"\x00\x02\x00\x01", b"\x00\x00\x00\x01") + SCAN + EOI, "bad-structure"),
        (SOI + SOI + FRAME + SCAN + EOI, "bad-structure"),
    ],
    ids=[
        "stray-byte",
        "no-eoi",
        "half-marker",
        "cut-segment",
        "no-scan",
        "no-frame",
        "two-frames",
        "junk",
        "no-height",
        "two-starts",
    ],
)
def test_a_broken_structure_is_named(data, reason):
    with pytest.raises(BadImage) as fault:
        check_structure(walk_jpeg(data))
    assert fault.value.reason == reason


@pytest.mark.parametrize("length", [0, 1, FIRST_WINDOW - 1, FIRST_WINDOW, FIRST_WINDOW + 1, 3 * FIRST_WINDOW + 5])
@pytest.mark.parametrize("last", [b"", b"\xff\x00", b"\xff\xd7\xff\x00", b"\xff\xff\xd1\x05", b"\xff\xff"])
def test_a_scan_ends_at_its_first_marker_however_long_it_is(length, last):
    coded_data = (b"\x01\xff\x00\xfe" * length)[: length - length % 4] + b"\x02" * (length % 4) + last
    head = SOI + FRAME + SCAN[:10]
    assert walk_jpeg(head + coded_data).fault.reason == "truncated-image"
    found = walk_jpeg(head + coded_data + EOI + b"\xff\xc0")
    end = len(head) + len(coded_data.rstrip(b"\xff"))
    assert (found.segments[-1], found.fault) == ((SCAN_DATA, len(head), end), None)


def small_jpeg(mode: str = "RGB", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(smooth()).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        small_jpeg(),
        small_jpeg("L"),
        small_jpeg(progressive=True),
        small_jpeg(comment=b"a remark"),
        small_jpeg(restart_marker_blocks=1),
    ],
    ids=["colour", "grey", "progressive", "comment", "restarts"],
)
def test_a_plain_jpeg_says_its_size_as_the_careful_reader_does(data):
    assert plain_size(walk_jpeg(data)) == (48, 32)
    assert read_header(data) == Header("JPEG", 48, 32)


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "weird_images").iterdir()), ids=lambda path: path.name)
def test_what_is_plain_is_opened_by_the_careful_reader_too(path):
    size = plain_size(walk_jpeg(path.read_bytes()))
    assert size is None or read_header(path.read_bytes(), MAX_JPEG_SIDE**2) == Header("JPEG", *size)


TABLE = b"\xff\xdb\x00\x43\x00"
UNUSUAL = {
    "EXIF": small_jpeg(exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"),
    "CMYK": small_jpeg("CMYK"),
    "12 bits": small_jpeg().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "no width": small_jpeg().replace(b"\x00\x20\x00\x30", b"\x00\x20\x00\x00"),
    "two components": SOI + b"\xff\xc0\x00\x0e\x08\x00\x02\x00\x01\x02\x01\x11\x00\x02\x11\x00" + SCAN + EOI,
    "no frame": SOI + SCAN + EOI,
    "no end": small_jpeg()[:-2],
    "a table cut short": small_jpeg().replace(TABLE, b"\xff\xdb\x00\x42\x00", 1),
    "a table of 16 bits": small_jpeg().replace(TABLE, TABLE[:-1] + b"\x10", 1),
    "a short JFIF": SOI + b"\xff\xe0\x00\x07JFIF\0" + FRAME + SCAN + EOI,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_jpeg_is_for_other_readers_to_open(name):
    assert plain_size(walk_jpeg(UNUSUAL[name])) is None


@pytest.mark.parametrize(
    ("frame", "common"), [(b"\xc0", True), (b"\xc1", True), (b"\xc2", True), (b"\xc3", False), (b"\xc9", False)]
)
def test_lossless_and_arithmetic_frames_are_rare(frame, common):
    tables = b"\xff\xc4\x00\x02\xff\xcc\x00\x02"  # DHT and DAC are no frames
    assert is_common(walk_jpeg(SOI + tables + FRAME.replace(b"\xc0", frame) + SCAN + EOI)) is common


ADOBE = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"
NAMED_RGB = (b"\x01\x22\x00\x02\x11\x01\x03\x11\x01", b"R\x22\x00G\x11\x01B\x11\x01")


def test_red_green_and_blue_are_told_from_what_nearly_all_store():
    data = small_jpeg()
    named = data.replace(*NAMED_RGB)
    assert named != data
    for plain in (data, data[:2] + ADOBE + b"\x01" + data[2:], small_jpeg("L"), small_jpeg("CMYK"), b"", SOI + EOI):
        assert not stores_rgb(walk_jpeg(plain))
    assert not stores_rgb(walk_jpeg(small_jpeg("L")[:2] + ADOBE + b"\x00" + small_jpeg("L")[2:]))
    assert not stores_rgb(walk_jpeg(data[:2] + ADOBE.replace(b"Adobe", b"Adobo") + b"\x00" + data[2:]))
    assert not stores_rgb(walk_jpeg(data[:2] + ADOBE.replace(b"\x0e", b"\x0d") + data[2:]))
    for other in (named, data[:2] + ADOBE + b"\x00" + data[2:], named[:2] + ADOBE + b"\x01" + named[2:]):
        assert stores_rgb(walk_jpeg(other))


@pytest.mark.parametrize("data", [b"", b"GIF89a", SOI + b"junk", SOI + EOI])
def test_what_cannot_be_walked_is_left_for_others_to_judge(data):
    assert is_common(walk_jpeg(data))


def test_surplus_stands_behind_each_restart_interval_and_scan():
    surplus = b"\xa5\x3c\xc3\x5a\x96\x69\x9a\xe4" * 2
    last = SCAN.replace(b"\xff\xd0", b"\x78")
    lengthened = SOI + FRAME + SCAN.replace(b"\xff\xd0", surplus + b"\xff\xd0") + surplus + b"\xff\xd1" + surplus
    lengthened += b"\xff\xc4\x00\x03\xff" + last + surplus + b"\xff\xd0" + surplus + b"\xff" + EOI + b"trailing" + SCAN
    data = SOI + FRAME + SCAN + b"\xff\xc4\x00\x03\xff" + last + b"\xff" + EOI + b"trailing" + SCAN
    assert lengthen_scans(walk_jpeg(data)) == lengthened


CODINGS = {
    "baseline": {},
    "full chroma": {"subsampling": 0, "optimize": True},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "grey": {"mode": "L"},
    "grey progressive": {"mode": "L", "progressive": True},
    "cmyk": {"mode": "CMYK"},
}
PICTURES = {
    "smooth": smooth(0, (72, 50)),
    "noise": np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8),
    "white": np.full((50, 72, 3), 255, np.uint8),
    "red": np.full((50, 72, 3), (200, 30, 60), np.uint8),
}


def coded(picture: str, coding: str) -> bytes:
    options = dict(CODINGS[coding])
    buffer = io.BytesIO()
    Image.fromarray(PICTURES[picture]).convert(options.pop("mode", "RGB")).save(buffer, "JPEG", quality=85, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("picture", PICTURES)
def test_lengthened_scans_show_the_same_picture_where_it_is_whole(picture, coding):
    data = coded(picture, coding)
    lengthened = lengthen_scans(walk_jpeg(data))
    assert len(lengthened) > len(data)
    assert np.array_equal(read_rgb(lengthened), read_rgb(data))
    assert check_structure(walk_jpeg(lengthened)) == check_structure(walk_jpeg(data))


def check_cuts(picture: str, coding: str, every: int) -> None:
    """Cut each scan short at every `every`-th byte, the markers behind it kept: what it loses has to show."""
    data = coded(picture, coding)
    whole = read_rgb(data)
    damaged = 0
    for start, end in [(start, end) for marker, start, end in walk_jpeg(data).segments if marker == SCAN_DATA]:
        for cut in range(start, end, every):
            short = data[:cut].rstrip(b"\xff") + data[end:]
            seen = read_rgb(short)
            if np.array_equal(seen, whole):  # nothing but padding is gone
                continue
            damaged += 1
            assert not np.array_equal(read_rgb(lengthen_scans(walk_jpeg(short))), seen), (
                f"{cut - start} of {end - start} bytes"
            )
    assert damaged > 0


@pytest.mark.parametrize("coding", CODINGS)
def test_a_scan_that_ends_early_shows_in_other_pixels(coding):
    check_cuts("smooth", coding, 23)
    check_cuts("red", coding, 1)


@pytest.mark.slow
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("picture", PICTURES)
def test_a_scan_that_ends_anywhere_early_shows_in_other_pixels(picture, coding):
    check_cuts(picture, coding, 1)


PLAIN = {
    "baseline": {},
    "full chroma": {"subsampling": 0, "optimize": True},
    "half chroma": {"subsampling": 1, "quality": 100},
    "grey": {"mode": "L", "quality": 30},
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def is_grey_below(jpeg: bytes, decoder: Decoder) -> bool:
    """Whether DALI finds no data for the first unit below the picture, nor has given it the end of the scan's."""
    probe = probes(walk_jpeg(jpeg))
    assert probe is not None
    (seen,) = decoder.decode_plain([probe.taller], [probe.taller_size])
    assert seen is not None
    return bool(np.all(seen[probe.below, :8] == 128))


def plain(picture: str, options: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    mode = str(options.get("mode", "RGB"))
    kept = {"quality": 85} | {key: value for key, value in options.items() if key != "mode"}
    Image.fromarray(PICTURES[picture]).convert(mode).save(buffer, "JPEG", **kept)
    return buffer.getvalue()


@pytest.mark.parametrize("coding", PLAIN)
@pytest.mark.parametrize("picture", ["smooth", "white", "red"])
def test_a_bit_that_is_missing_anywhere_shows_below_the_picture(picture, coding, decoder):
    data = plain(picture, PLAIN[coding])
    whole = read_rgb(data)
    assert not is_grey_below(data, decoder)
    ((start, end),) = [(start, end) for marker, start, end in walk_jpeg(data).segments if marker == SCAN_DATA]
    damaged = 0
    for cut in range(start, end, 1 if picture == "red" else 3):
        short = data[:cut].rstrip(b"\xff") + data[end:]
        is_missed = not np.array_equal(read_rgb(short), whole)
        assert is_grey_below(short, decoder) or not is_missed, f"{cut - start} of {end - start} bytes"
        damaged += is_missed
    assert damaged > 10


@pytest.mark.parametrize("coding", ["progressive", "restarts", "grey progressive", "cmyk"])
def test_only_plain_jpegs_are_probed(coding):
    assert probes(walk_jpeg(coded("smooth", coding))) is None


def test_colours_in_doubt_and_damage_are_not_probed():
    data = coded("smooth", "baseline")
    assert probes(walk_jpeg(data)) is not None
    assert probes(walk_jpeg(data[:2] + ADOBE + b"\x01" + data[2:])) is not None
    for other in (
        data[:2] + ADOBE + b"\x00" + data[2:],  # RGB, says Adobe
        data.replace(*NAMED_RGB),
        data[:2] + b"\xff\xdd\x00\x04\x00\x02" + data[2:],  # restarts
        data[:-2],  # no end
        b"no JPEG",
        SOI + FRAME + EOI,
    ):
        assert other != data
        assert probes(walk_jpeg(other)) is None


@pytest.mark.parametrize(
    ("height", "claimed", "top"), [(50, 80, 16), (64, 80, 16), (8, 32, 8), (200, 224, 32), (129, 160, 32)]
)
def test_probes_are_a_row_of_units_taller_and_an_eighth_of_them_tall(height, claimed, top):
    buffer = io.BytesIO()
    Image.new("RGB", (72, height)).save(buffer, "JPEG")  # in units of 16 pixels
    data = buffer.getvalue()
    probe = probes(walk_jpeg(data))
    assert probe is not None
    assert probe.taller_size == (72, claimed)
    assert probe.below == claimed - 8
    assert check_structure(walk_jpeg(probe.taller)) == (72, claimed)
    assert check_structure(walk_jpeg(probe.top)) == (72, top)
    assert len(probe.taller) == len(data)
    assert len(probe.top) <= len(data) + 2


def test_what_is_nearly_too_tall_for_jpeg_is_not_probed():
    data = plain("smooth", PLAIN["full chroma"])
    frame = data.index(b"\xff\xc0") + 5
    for height, is_probed in ((65_488, True), (65_496, False), (65_500, False)):
        claim = data[:frame] + height.to_bytes(2, "big") + data[frame + 2 :]
        assert (probes(walk_jpeg(claim)) is not None) is is_probed
