"""The .idx beside a .rec: a line of key, tab and offset in bytes for each record.

>>> list(read_index("pairs.idx"))[:3]
[0, 2116, 4020]
"""

import operator
import os
import re
from array import array
from pathlib import Path
from typing import BinaryIO, NoReturn

from rwkvclip_cli.console import RwkvClipError

PathLike = str | os.PathLike[str]

_BUFFER_BYTES = 1 << 20
# 18 digits always fit in 64 bits.
LINE = re.compile(rb"([0-9]{1,18})\t([0-9]{1,18})\r?")
LINES = re.compile(rb"(?:[0-9]{1,18}\t[0-9]{1,18}\r?\n)*+(?:[0-9]{1,18}\t[0-9]{1,18})?+")  # faster than one by one
_BOM = b"\xef\xbb\xbf"


def default_index_path(path: PathLike) -> Path:
    """Where the index of a .rec lies unless said otherwise: the same name with the suffix .idx."""
    return Path(path).with_suffix(".idx")


def spread_over(count: int, most: int) -> list[int]:
    """At most `most`, 2 or more, of the ordinals below `count`: the first, the last, and others at equal distances.

    >>> spread_over(1000, 4)
    [0, 333, 666, 999]
    """
    return [step * (count - 1) // (most - 1) for step in range(most)] if count > most else list(range(count))


def read_index(index_path: PathLike) -> "array[int]":
    """The offsets that an index lists, in bytes: lines of key, tab, offset, with ascending offsets and distinct keys.

    Raises RwkvClipError with the line for anything else: DALI would read on with fewer records and not say so.
    """
    path = Path(index_path)
    offsets, keys = array("Q"), array("Q")
    with open_to_read(path, _BUFFER_BYTES) as file:
        while lines := file.readlines(_BUFFER_BYTES):
            block = b"".join(lines)
            if not LINES.fullmatch(block):
                _refuse_line(path, len(offsets), lines)
            fields = block.split()
            keys.extend(map(int, fields[0::2]))
            offsets.extend(map(int, fields[1::2]))
    _check_ascending(path, offsets)
    _check_distinct(path, keys)
    return offsets


def _refuse_line(path: Path, before: int, lines: list[bytes]) -> NoReturn:
    for number, line in enumerate(lines, before + 1):
        if number == 1 and line.startswith(_BOM):
            raise index_error(path, "starts with a byte order mark, at which DALI reads no record at all")
        if not LINES.fullmatch(line):
            raise index_error(path, f"line {number} is {line[:80]!r}, not a key, a tab and an offset")
    raise AssertionError("a block is refused only for one of its lines")


def _check_ascending(path: Path, offsets: "array[int]") -> None:
    following = memoryview(offsets)[1:]
    if all(map(operator.lt, offsets, following)):
        return
    line = next(i for i, (one, two) in enumerate(zip(offsets, following, strict=False), 2) if one >= two)
    fault = "repeats the offset" if offsets[line - 1] == offsets[line - 2] else "goes back in the file after offset"
    raise index_error(path, f"line {line}: offset {offsets[line - 1]} {fault} {offsets[line - 2]}")


def _check_distinct(path: Path, keys: "array[int]") -> None:
    # The usual index has ascending keys; only others cost a set.
    if all(map(operator.lt, keys, memoryview(keys)[1:])) or len(set(keys)) == len(keys):
        return
    seen: dict[int, int] = {}
    for line, key in enumerate(keys, 1):
        if key in seen:
            raise index_error(
                path, f"line {line} repeats the key {key} of line {seen[key]}; one of the two could not be found"
            )
        seen[key] = line


def index_error(path: Path, what: str) -> RwkvClipError:
    """The error for an index that is not what it should be: its path, then `what`."""
    return RwkvClipError(f"{path} {what}", f"rwkvclip inspect {path.with_suffix('.rec')} --rebuild-index")


def open_to_read(path: Path, buffering: int = 0) -> BinaryIO:
    """`path` opened for reading, or RwkvClipError where it cannot be."""
    try:
        return open(path, "rb", buffering)
    except OSError as error:
        raise RwkvClipError(f"cannot read {path}: {error.strerror}", f"ls -l {path}") from error
