"""JPEG as bytes, without decoding: its markers, how its frame is coded, and a way to see whether its scans are whole.

>>> walk_jpeg(Path("photo.jpg").read_bytes())
(640, 480)
"""

import re
import struct
from collections.abc import Iterator

from rwkvclip_cli.data.packing.samples import BadImage

SOI, EOI, SOS = 0xD8, 0xD9, 0xDA  # ITU-T T.81, table B.1
RST0, RST7 = 0xD0, 0xD7
MOST_SCANS = 100  # a progressive picture of a camera or an editor has about ten
SCAN_DATA = 0  # what `segments` yields for the entropy-coded data behind an SOS; no marker has this code

# The marker that ends entropy-coded data: not a stuffed zero, not a restart marker, not a fill byte.
_SCAN_END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_RESTART = re.compile(rb"\xff+[\xd0-\xd7]")

# Taken for picture, these bits change it in every coding tried; 8 bytes were at times too few to reach a pixel.
_SURPLUS = bytes.fromhex("a53cc35a96699ae4" * 2)


def walk_jpeg(data: bytes) -> tuple[int, int]:
    """Walk the markers of a JPEG from SOI to EOI without decoding; return (width, height).

    Source: ITU-T T.81, annex B. Raises BadImage where a segment is cut off or a marker is out of place.
    """
    size: tuple[int, int] | None = None
    scans = 0
    for marker, start, end in segments(data):
        if _is_frame(marker):
            if size is not None or end - start < 8:
                raise BadImage("bad-structure", f"frame header out of place at byte {start - 2}")
            height, width = struct.unpack_from(">HH", data, start + 3)
            size = (width, height)
        elif marker == SOS:
            if size is None:
                raise BadImage("bad-structure", "a scan precedes the frame header")
            scans += 1
    if size is None or scans == 0 or 0 in size:
        raise BadImage("bad-structure", "no picture between the start and end markers")
    return size


def is_common_jpeg(data: bytes) -> bool:
    """Whether the frame is coded in a way that decoders on CPUs and GPUs agree on: Huffman, sequential or progressive.

    Lossless frames come out of the GPU's decoder as another picture, without an error; arithmetic ones are as rare.
    Bytes that are no JPEG at all are left for others to judge.
    """
    try:
        frame = next((marker for marker, _, _ in segments(data) if _is_frame(marker)), 0xC0)
    except BadImage:
        return True
    return frame <= 0xC2


def check_scans(data: bytes) -> None:
    """Raise BadImage for a JPEG of more than MOST_SCANS scans: a few kilobytes of them keep a decoder for minutes."""
    # Counted in one sweep, it can only be too many: thumbnails have scans of their own.
    if data.count(bytes([0xFF, SOS])) <= MOST_SCANS:
        return
    scans = 0
    try:
        for marker, _, _ in segments(data):
            scans += marker == SOS
    except BadImage:
        pass  # what is out of place is for others to judge; the scans before it count
    if scans > MOST_SCANS:
        raise BadImage("too-many-scans", f"{scans:,} scans; at most {MOST_SCANS} are decoded")


def lengthen_scans(data: bytes) -> bytes:
    """The JPEG with surplus bytes behind each scan and restart interval: the same picture unless some of it is missing.

    A decoder that has its whole picture skips them on its way to the next marker. One whose scan ended early takes them
    for picture, where it would otherwise make up the rest, without an error: libjpeg grey, decoders on GPUs what they
    like. So two decodes tell whether a Huffman-coded JPEG holds all its data (an arithmetic decoder reads ahead).

    Raises BadImage where a segment is cut off or a marker is out of place.
    """
    pieces = []
    done = 0
    for marker, start, end in segments(data):
        if marker == SCAN_DATA:
            scan, restarts = data[start:end], 0
            if b"\xff\xd0" in scan:
                scan, restarts = _RESTART.subn(lambda found: _SURPLUS + found[0], scan)
            # Where whole intervals are missing, only the restart marker that is due makes a decoder read on.
            due = bytes([0xFF, RST0 + restarts % 8])
            pieces += [data[done:start], scan, _SURPLUS, due, _SURPLUS]
            done = end
    return b"".join([*pieces, data[done:]])


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) from SOI to EOI: the bytes behind each marker, and SCAN_DATA behind each SOS.

    Bytes behind EOI are left out of account, as decoders do. Raises BadImage at what is cut off or out of place.
    """
    if data[:2] != bytes([0xFF, SOI]):
        raise BadImage("bad-structure", "no start-of-image marker")
    position = 2
    while True:
        marker, start = _next_marker(data, position)
        if marker == EOI:
            return
        if marker == 0x01 or RST0 <= marker <= SOI:
            raise BadImage("bad-structure", f"marker {marker:#04x} out of place at byte {start - 2}")
        length = int.from_bytes(data[start : start + 2], "big")
        if length < 2 or start + length > len(data):
            raise BadImage("truncated-image", f"segment {marker:#04x} at byte {start - 2} is cut off")
        position = start + length
        yield marker, start, position
        if marker == SOS:
            start, position = position, _scan_end(data, position)
            yield SCAN_DATA, start, position


def _is_frame(marker: int) -> bool:
    return 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)


def _next_marker(data: bytes, position: int) -> tuple[int, int]:
    if position >= len(data):
        raise BadImage("truncated-image", "ends without an end-of-image marker")
    if data[position] != 0xFF:
        raise BadImage("bad-structure", f"no marker at byte {position}")
    while position < len(data) and data[position] == 0xFF:  # any number of fill bytes may precede a marker
        position += 1
    if position >= len(data):
        raise BadImage("truncated-image", "ends without an end-of-image marker")
    return data[position], position + 1


def _scan_end(data: bytes, start: int) -> int:
    """Where the marker that ends the entropy-coded data from `start` on begins, its fill bytes included."""
    found = _SCAN_END.search(data, start)
    if found is None:
        raise BadImage("truncated-image", "ends within a scan")
    end = found.start()
    while end > start and data[end - 1] == 0xFF:
        end -= 1
    return end
