"""What inspection finds wrong, one by one and counted.

>>> log = FaultLog(); log.add(Fault("image", "DALI refuses it", record=3, offset=9120, source="imgs/cat.jpg"))
>>> str(log.first[0])
'record 3 at byte 9,120 (imgs/cat.jpg): image: DALI refuses it'
"""

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

KINDS = {
    "framing": "the parts of a record are out of order: magic, flag or length",
    "cut-off": "the .rec ends within a record, or before a record that the index or the manifest has",
    "missing-shard": "a record is in a shard that is not there",
    "misplaced-shard": "a shard holds the records of another one",
    "lost": "a record that the index has lies in a damaged stretch",
    "padding": "the zeros behind a record's data are something else, or missing",
    "header": "the header's label, id or id2 is not what pack writes",
    "label-width": "another number of labels than captions times context length, or no room for them",
    "token": "a label that is no token id",
    "image": "the image does not pass the proof that pack demands",
    "checksum": "captions or image are not the bytes that were packed",
    "index-missing": "a record that the index does not list, or no index at all",
    "index-foreign": "an offset of the index at which no record begins",
    "index-duplicate": "an offset or a key that the index lists twice",
    "index-order": "an offset or a key of the index that goes back",
    "index-key": "a key of the index that is not the record's number in its file",
    "index-line": "a line of the index that is no key, tab and offset",
    "manifest": "the manifest is damaged or changed, or says another size, count or statistic",
    "sources": "the list of sources is damaged, changed, gone or not of this pack",
    "rejects": "the list of rejects is not the one that was packed, or gone",
    "content-hash": "the bytes of the .rec are not those that the manifest has the hash of",
}
KEPT_FAULTS = 1000


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. record: ordinal in the set; offset: of the record, in bytes; line: of the index, from 1.

    shard: the .rec that it is in, where the set has several.
    """

    kind: str
    message: str
    record: int | None = None
    offset: int | None = None
    source: str | None = None
    line: int | None = None
    shard: str | None = None

    def document(self) -> dict[str, Any]:
        """What is known of it, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        places = [self.shard] if self.shard is not None else []
        places += [f"line {self.line} of the index"] if self.line is not None else []
        places += [f"record {self.record}"] if self.record is not None else []
        place = ", ".join(places)
        if self.offset is not None:
            place += f" at byte {self.offset:,}"
        if self.source is not None:
            place += f" ({self.source})"
        return f"{place.strip()}: {self.kind}: {self.message}" if place else f"{self.kind}: {self.message}"


@dataclass
class FaultLog:
    """Counts all faults and keeps the first ones, so that its size has a bound."""

    first: list[Fault] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, fault: Fault) -> None:
        """Take in a fault."""
        assert fault.kind in KINDS, fault.kind
        self.counts[fault.kind] += 1
        if len(self.first) < KEPT_FAULTS:
            self.first.append(fault)

    def take_in(self, other: "FaultLog", shard: str | None) -> None:
        """Take in the faults that were found in a shard."""
        self.counts += other.counts
        self.first += [replace(fault, shard=shard) for fault in other.first[: KEPT_FAULTS - len(self.first)]]

    @property
    def total(self) -> int:
        """All faults so far."""
        return self.counts.total()
