"""JPEG as bytes, without decoding: its markers, how its frame is coded, and a way to see whether its scans are whole.

>>> check_structure(walk_jpeg(Path("photo.jpg").read_bytes()))
(640, 480)
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rwkvclip_cli.data.packing.samples import BadImage

# ITU-T T.81, table B.1
DHT, SOI, EOI, SOS, DQT, DRI, APP0, APP14, COM = 0xC4, 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xE0, 0xEE, 0xFE
JFIF_BYTES = 16  # of its APP0 without a thumbnail: ITU-T T.871, 10.1
RST0, RST7 = 0xD0, 0xD7
MOST_SCANS = 100  # a progressive picture of a camera or an editor has about ten
SCAN_DATA = 0  # what `_segments` yields for the entropy-coded data behind an SOS; no marker has this code

# The marker that ends entropy-coded data: not a stuffed zero, not a restart marker, not a fill byte.
_SCAN_END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
FIRST_WINDOW = 1 << 15  # bytes
_RESTART = re.compile(rb"\xff+[\xd0-\xd7]")

# Taken for picture, these bits change it in every coding tried; 8 bytes were at times too few to reach a pixel.
SURPLUS = bytes.fromhex("a53cc35a96699ae4" * 2)
# A pattern may spell what a decoder makes up; it does not spell the same in all of these.
OTHER_SURPLUS = tuple(bytes.fromhex(start) + SURPLUS for start in ("5a", "3c", "c3", "e4", "0f", "96"))

BLOCK = 8  # pixels
MOST_SIDE = 65_500  # JPEG_MAX_DIMENSION of libjpeg
ADOBE_BYTES = 14  # from APP14's length to the colour transform, which is its last byte
RGB_TRANSFORM = 0
YCC_TRANSFORM = 1  # the last byte of Adobe's APP14: Adobe Technical Note 5116, section 18

# How many components a frame has, then identifier and sampling of each; and a coded unit's (W, H) in pixels.
PLAIN_LAYOUTS = {
    b"\x01\x01": (8, 8),  # grey, whose sampling means nothing
    b"\x03\x01\x11\x02\x11\x03\x11": (8, 8),
    b"\x03\x01\x21\x02\x11\x03\x11": (16, 8),
    b"\x03\x01\x12\x02\x11\x03\x11": (8, 16),
    b"\x03\x01\x22\x02\x11\x03\x11": (16, 16),
}


@dataclass(frozen=True)
class Walk:
    """A JPEG's bytes, its segments as `_segments` yields them, and the fault that ended the walk before the EOI."""

    data: bytes
    segments: list[tuple[int, int, int]]
    fault: BadImage | None


def walk_jpeg(data: bytes) -> Walk:
    """Walk the markers of a JPEG from SOI to EOI without decoding; never raises. Source: ITU-T T.81, annex B."""
    found: list[tuple[int, int, int]] = []
    try:
        for segment in _segments(data):
            found.append(segment)
    except BadImage as fault:
        return Walk(data, found, fault)
    return Walk(data, found, None)


def check_structure(walk: Walk) -> tuple[int, int]:
    """The (width, height) of a JPEG; BadImage where a segment is cut off or a marker is out of place."""
    size: tuple[int, int] | None = None
    scans = 0
    for marker, start, end in walk.segments:
        if _is_frame(marker):
            if size is not None or end - start < 8:
                raise BadImage("bad-structure", f"frame header out of place at byte {start - 2}")
            height, width = struct.unpack_from(">HH", walk.data, start + 3)
            size = (width, height)
        elif marker == SOS:
            if size is None:
                raise BadImage("bad-structure", "a scan precedes the frame header")
            scans += 1
    if walk.fault:
        raise walk.fault
    if size is None or scans == 0 or 0 in size:
        raise BadImage("bad-structure", "no picture between the start and end markers")
    return size


def plain_size(walk: Walk) -> tuple[int, int] | None:
    """The (width, height) of a whole JPEG that holds nothing unusual; None for any other, which others may open yet.

    Before its first scan there are tables, comments, JFIF's mark and one frame of 8 bits, grey or of three components.
    """
    size = None
    for marker, start, end in walk.segments if walk.fault is None else ():
        if marker == SOS:
            return size
        if marker in (0xC0, 0xC1, 0xC2):
            precision, height, width, components = struct.unpack_from(">BHHB", walk.data, start + 2)
            if size or precision != 8 or components not in (1, 3) or end - start != 8 + 3 * components:
                return None
            if 0 in (width, height):
                return None
            size = (width, height)
        elif not _is_plain_table(walk.data, marker, start, end):
            return None
    return None


def _is_plain_table(data: bytes, marker: int, start: int, end: int) -> bool:
    if marker == DQT:  # tables of 64 numbers of a byte each
        return (end - start - 2) % 65 == 0 and all(data[at] < 4 for at in range(start + 2, end, 65))
    if marker == APP0:
        return data.startswith(b"JFIF\0", start + 2) and end - start >= JFIF_BYTES
    return marker in (DHT, DRI, COM)


def is_common(walk: Walk) -> bool:
    """Whether the frame is coded in a way that decoders on CPUs and GPUs agree on: Huffman, sequential or progressive.

    Lossless frames come out of the GPU's decoder as another picture, without an error; arithmetic ones are as rare.
    Bytes that are no JPEG at all are left for others to judge.
    """
    return next((marker for marker, _, _ in walk.segments if _is_frame(marker)), 0xC0) <= 0xC2


def stores_rgb(walk: Walk) -> bool:
    """Whether the frame's three components are red, green and blue, or its marks disagree on that.

    A colour transform of Adobe's and the components' names may say so. libjpeg, and so DALI on the CPU, goes by both;
    the GPU's decoder takes all three components for YCbCr, without an error.
    """
    transform, names = YCC_TRANSFORM, b""
    for marker, start, end in walk.segments:
        if marker == SOS:
            break
        if _is_frame(marker):
            names = walk.data[start:end][8::3]
        elif marker == APP14 and walk.data.startswith(b"Adobe", start + 2) and end - start >= ADOBE_BYTES:
            transform = walk.data[start + ADOBE_BYTES - 1]
    return len(names) == 3 and (transform == RGB_TRANSFORM or names == b"RGB")


def check_scans(walk: Walk) -> None:
    """Raise BadImage for a JPEG of more than MOST_SCANS scans: a few kilobytes of them keep a decoder for minutes."""
    # What is out of place is for others to judge; the scans before it count.
    scans = sum(marker == SOS for marker, _, _ in walk.segments)
    if scans > MOST_SCANS:
        raise BadImage("too-many-scans", f"{scans:,} scans; at most {MOST_SCANS} are decoded")


@dataclass(frozen=True)
class Probes:
    """Other sizes that a plain JPEG may claim, its scan being in all of them. They tell much of it.

    width, height: its own, in pixels. layout: a key of PLAIN_LAYOUTS.
    """

    width: int
    height: int
    layout: bytes
    _data: bytes
    _size_at: int
    _scan_at: int

    @property
    def taller(self) -> bytes:
        """Claims a row of units more than the scan holds."""
        return self._claiming(*self.taller_size)

    @property
    def taller_size(self) -> tuple[int, int]:
        """(W, H) of `taller` in pixels."""
        return self.width, self._rows * self._unit[1] + self._unit[1]

    @property
    def below(self) -> int:
        """A row of pixels in the middle of what is not there."""
        return self._rows * self._unit[1] + self._unit[1] // 2

    @property
    def top(self) -> bytes:
        """The first eighth of the rows of units, in the first half of the scan, which as good as always holds them."""
        rows = -(-self._rows // BLOCK)
        half = self._data[: (self._scan_at + len(self._data)) // 2] if rows < self._rows else self._data
        return self._claiming(self.width, min(self.height, rows * self._unit[1]), half) + bytes([0xFF, EOI])

    @property
    def rounded(self) -> bytes:
        """Whole units, so that all that is coded is seen."""
        return self._claiming(-(-self.width // self._unit[0]) * self._unit[0], self._rows * self._unit[1])

    @property
    def _unit(self) -> tuple[int, int]:
        return PLAIN_LAYOUTS[self.layout]

    @property
    def _rows(self) -> int:
        return -(-self.height // self._unit[1])

    def _claiming(self, width: int, height: int, data: bytes | None = None) -> bytes:
        held = memoryview(data or self._data)
        return b"".join([held[: self._size_at], struct.pack(">HH", height, width), held[self._size_at + 4 :]])


def probes(walk: Walk) -> Probes | None:
    """A plain JPEG in other sizes, taller than its data too, so that one decode tells whether any is missing.

    libjpeg makes up coefficients of zero bits for the unit at which the data ends, and leaves all units behind that one
    grey. So the first unit of the row that is not there is grey where some unit of the picture lacks data, and has the
    brightness of the last unit, or about, where the picture is whole: not a bit of a scan can be lost unseen.

    Plain is a baseline or extended Huffman frame of 8 bits, grey or YCbCr beyond doubt, in one scan without restarts.
    None for every other JPEG, and for what is damaged.
    """
    data = walk.data
    frames = [(marker, start, end) for marker, start, end in walk.segments if _is_frame(marker)]
    scans = [start for marker, start, _ in walk.segments if marker == SOS]
    if walk.fault or len(frames) != 1 or len(scans) != 1 or walk.segments[-1][0] != SCAN_DATA:
        return None
    if any(marker == DRI or (marker == APP14 and data[end - 1] != YCC_TRANSFORM) for marker, _, end in walk.segments):
        return None
    ((marker, start, end),) = frames
    layout = _layout(data[start:end])
    if marker > 0xC1 or data[start + 2] != 8 or layout not in PLAIN_LAYOUTS or data[scans[0] + 2] != layout[0]:
        return None
    height, width = struct.unpack_from(">HH", data, start + 3)
    found = Probes(width, height, layout, data, start + 3, walk.segments[-1][1])
    is_possible = 0 not in (width, height) and found.taller_size[1] <= MOST_SIDE and width + 2 * BLOCK <= MOST_SIDE
    return found if is_possible else None


def _layout(frame: bytes) -> bytes:
    """The key that a frame header, from its length on, would have in PLAIN_LAYOUTS."""
    count = frame[7:8]
    components = [frame[at : at + 2] for at in range(8, len(frame), 3)]
    return count + (components[0][:1] if len(components) == 1 else b"".join(components))


def lengthen_scans(walk: Walk, surplus: bytes = SURPLUS) -> bytes:
    """The JPEG with surplus bytes behind each scan and restart interval: the same picture unless some of it is missing.

    A decoder that has its whole picture skips them on its way to the next marker. One whose scan ended early takes them
    for picture, where it would otherwise make up the rest, without an error: libjpeg grey, decoders on GPUs what they
    like. So two decodes tell whether a Huffman-coded JPEG holds all its data (an arithmetic decoder reads ahead).

    Raises BadImage where a segment is cut off or a marker is out of place.
    """
    if walk.fault:
        raise walk.fault
    data, pieces = walk.data, []
    done = 0
    for marker, start, end in walk.segments:
        if marker == SCAN_DATA:
            scan, restarts = data[start:end], 0
            if b"\xff\xd0" in scan:
                scan, restarts = _RESTART.subn(lambda found: surplus + found[0], scan)
            # Where whole intervals are missing, only the restart marker that is due makes a decoder read on.
            due = bytes([0xFF, RST0 + restarts % 8])
            pieces += [data[done:start], scan, surplus, due, surplus]
            done = end
    return b"".join([*pieces, data[done:]])


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
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
    found = _SCAN_END.search(data, _stuffed_until(data, start))
    if found is None:
        raise BadImage("truncated-image", "ends within a scan")
    end = found.start()
    while end > start and data[end - 1] == 0xFF:
        end -= 1
    return end


def _stuffed_until(data: bytes, start: int) -> int:
    """The first 0xFF from `start` on without a stuffed zero behind it, or the last byte: no marker lies before.

    A third of the time of a regular expression, which stops at each of hundreds of stuffed bytes.
    """
    codes = np.frombuffer(data, np.uint8)
    window = FIRST_WINDOW
    while start + 1 < len(data):
        # Windows grow: many short scans cost little each, and a long one costs few steps.
        seen = codes[start : start + window + 1]
        is_unstuffed = (seen[:-1] == 0xFF) & (seen[1:] != 0)
        at = int(is_unstuffed.argmax())
        if is_unstuffed[at]:
            return start + at
        start += len(is_unstuffed)
        window *= 2
    return start
