"""The files of a packed data set as they lie, damaged or missing ones included; nothing here raises for damage.

>>> beside = read_beside(RecFile(Path("pairs.rec")))
>>> beside.width, beside.missing
(231, ('pairs.sources.tsv',))
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from rwkvclip_cli.data.packed import LABEL_WIDTH_PUBLISHED
from rwkvclip_cli.data.packing.output import SUFFIXES
from rwkvclip_cli.inspect.scan import RecFile, Whole, label_count

SAMPLED_RECORDS = 16
MAX_MANIFEST_BYTES = 1 << 26
MAX_LINE_BYTES = 1 << 16
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class Beside:
    """What lies beside a .rec.

    manifest: {} without a readable one; fault: what is wrong with it. captions, context_length, width (their product):
    of the manifest, else as most of the first records say; 0 where there is no record.
    """

    rec: Path
    manifest: dict[str, Any]
    fault: str
    captions: int
    context_length: int
    missing: tuple[str, ...]

    @property
    def idx(self) -> Path:
        """The index."""
        return path_beside(self.rec, "idx")

    @property
    def width(self) -> int:
        """Labels of a record."""
        return self.captions * self.context_length

    @property
    def is_ours(self) -> bool:
        """Whether pack wrote the set: then header, order and hash are known."""
        return "content_hash" in self.manifest


def path_beside(rec: Path, part: str) -> Path:
    """The path of a part (a key of `output.SUFFIXES`) of the set whose records are in `rec`."""
    return rec.with_name(rec.name.removesuffix(".rec") + SUFFIXES[part])


def read_beside(file: RecFile) -> Beside:
    """Read the manifest beside `file` and see what is missing."""
    manifest, fault = _read_manifest(path_beside(file.path, "manifest"))
    if manifest:
        captions, context_length = manifest["captions"], manifest["context_length"]
    else:
        captions, context_length = _layout(_usual_width(file))
    paths = [path_beside(file.path, part) for part in SUFFIXES]
    missing = tuple(path.name for path in paths if not path.is_file())
    return Beside(file.path, manifest, fault, captions, context_length, missing)


def _read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        return {}, ""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_MANIFEST_BYTES).decode("utf-8"))
        counted = {name: document[name] for name in ("captions", "context_length", "count")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return {}, f"{path.name} is damaged: {error!r}"[:300]
    for name, value in counted.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**48:
            return {}, f"{path.name} is damaged: {name} is {value!r}"[:300]
    return document, ""


def _usual_width(file: RecFile) -> int:
    records = (found for found in file.scan() if isinstance(found, Whole))
    counts = Counter(label_count(record.payload) for record in islice(records, SAMPLED_RECORDS))
    return max(counts.most_common(1)[0][0], 0) if counts else 0


def _layout(width: int) -> tuple[int, int]:
    """Captions and context length of a width that no manifest explains."""
    captions, context_length = LABEL_WIDTH_PUBLISHED
    if width % context_length == 0:
        return width // context_length, context_length
    return (captions, width // captions) if width % captions == 0 else (1, width)


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of OUT.sources.tsv. source: as printed there. checksum: CRC-32 of labels and image, None without."""

    source: str
    kept: str
    checksum: int | None


class Sources:
    """OUT.sources.tsv read forwards, as the records are. Without the file, or behind damage in it, nothing is known."""

    def __init__(self, rec: Path) -> None:
        self._path = path_beside(rec, "sources")
        self._file: BinaryIO | None = None
        self._ahead: tuple[int, Origin] | None = None
        self._lines = iter(self._read())
        self.fault = ""
        self._number = 0

    def at(self, ordinal: int) -> Origin | None:
        """Where a record came from; ask in rising order."""
        while self._ahead is None or self._ahead[0] < ordinal:
            entry = next(self._lines, None)
            if entry is None:
                return None
            self._ahead = entry
        return self._ahead[1] if self._ahead[0] == ordinal else None

    def count(self) -> int | None:
        """How many records it lists, once the rest of it is read; None without the file."""
        for _ in self._lines:
            pass
        return None if self._file is None else self._number

    def _read(self) -> Iterator[tuple[int, Origin]]:
        try:
            self._file = self._path.open("rb")
        except OSError:
            return
        while line := self._file.readline(MAX_LINE_BYTES):
            cells = line.decode("utf-8", "backslashreplace").rstrip("\n").split("\t")
            if not line.endswith(b"\n") or not 3 <= len(cells) <= 4 or cells[0] != str(self._number):
                line_number = f"line {self._number + 1} of {self._path.name}"
                self.fault = f"{line_number} is not {self._number}, a source and how it was kept"
                return
            checksum = int(cells[3], 16) if len(cells) == 4 and _CHECKSUM.fullmatch(cells[3]) else None
            self._number += 1
            yield self._number - 1, Origin(cells[1], cells[2], checksum)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
