"""Every record of a set checked on its own: framing, header, labels, checksum, and the image as pack proves it.

>>> for checked in check_records(beside, pool_prover("decode", beside, workers=2), log): ...

One pass in constant memory: the files, their indexes and the list of sources are read side by side.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rwkvclip_cli.console import RwkvClipError, counted
from rwkvclip_cli.data.captions import VOCAB_SIZE
from rwkvclip_cli.data.packing.pool import Outcome, Pool
from rwkvclip_cli.data.packing.prove import KEPT, ImageOptions
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, Sample
from rwkvclip_cli.data.packing.worker import WorkerOptions
from rwkvclip_cli.data.recordio import HEADER_BYTES, Record, record_checksum, unpack_record
from rwkvclip_cli.inspect.faults import Fault, FaultLog
from rwkvclip_cli.inspect.files import Beside, Origin, Part, Sources
from rwkvclip_cli.inspect.index import Listing, read_listing
from rwkvclip_cli.inspect.scan import Damage, RecFile, Whole
from rwkvclip_cli.limits import MAX_PIXELS

# Takes samples and gives what would become of each in a pack, in order; None judges by the bytes alone.
Prover = Callable[[Iterable[Item]], Iterator[Outcome]]

# A record with these alone is whole: its number, its padding and its index are written anew.
MENDABLE = frozenset({"header", "padding", "index-missing"})

WHY_NOT = {
    "re-encoded:refused-by-dali": "DALI refuses it",
    "re-encoded:other-pixels-in-dali": "DALI shows other pixels than a careful reader",
    "re-encoded:rare-jpeg": "a JPEG of a rare kind, which decoders on CPUs and GPUs read differently",
    "re-encoded:rgb-jpeg": "a JPEG that stores red, green and blue, which GPUs decode to other colours",
    "re-encoded:bad-structure": "its markers are out of order",
}


@dataclass
class Checked:
    """A record or damaged stretch. record: None where none could be read. size: (W, H) in pixels of a proved image.

    number: in the pack, as header and list of sources have it. offset: in its file, None where that is missing.
    """

    part: Part
    ordinal: int
    number: int
    offset: int | None
    origin: Origin | None
    record: Record | None
    size: tuple[int, int] | None = None
    faults: list[Fault] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        """Whether a pack may hold the record."""
        return self.record is not None and all(fault.kind in MENDABLE for fault in self.faults)

    def add(self, kind: str, message: str) -> None:
        """Note a fault of this record."""
        source = None if self.origin is None else self.origin.source
        self.faults.append(Fault(kind, message, self.ordinal, self.offset, source, shard=self.part.name))


def pool_prover(proof: str, beside: Beside, workers: int) -> Prover | None:
    """The prover of `pack --proof PROOF`, in processes of their own, which outlive no hostile image; None for none."""
    if proof == "none":
        return None
    options = beside.manifest.get("options")
    limit = options.get("max_pixels") if isinstance(options, dict) else None
    max_pixels = limit if isinstance(limit, int) and limit > MAX_PIXELS else MAX_PIXELS

    def prove(items: Iterable[Item]) -> Iterator[Outcome]:
        with Pool(workers, WorkerOptions(images=ImageOptions(proof, max_pixels=max_pixels))) as pool:
            yield from pool.run(items)

    return prove


def check_records(beside: Beside, prover: Prover | None, log: FaultLog) -> Iterator[Checked]:
    """Yield every record and damaged stretch in order; `log` takes their faults and those of indexes and sources."""
    waiting: deque[Checked] = deque()

    def items() -> Iterator[Item]:
        for checked in _read_all(beside, log):
            waiting.append(checked)
            if checked.record is None:
                yield Ignored("")
            else:
                yield Sample(_name(checked), image=bytes(checked.record.image), captions=("proof",))

    outcomes: Iterator[Outcome | None] = prover(items()) if prover else (None for _ in items())
    for outcome in outcomes:
        checked = waiting.popleft()
        if outcome is not None and not isinstance(outcome, Ignored):
            _judge(checked, outcome)
        for fault in checked.faults:
            log.add(fault)
        yield checked


def look_at(beside: Beside, part: Part, number: int, offset: int, found: Whole | str) -> Checked:
    """A record by itself, from what lies at its offset: framing, header and labels, without index, source or image."""
    checked = Checked(part, number - beside.files.first_number, number, offset, None, None)
    if isinstance(found, Whole):
        _check_payload(checked, found, beside)
    else:
        checked.add("cut-off" if "the file ends" in found else "framing", found)
    return checked


def _name(checked: Checked) -> str:
    return f"record {checked.ordinal}"


def _judge(checked: Checked, outcome: Outcome) -> None:
    if isinstance(outcome, Reject):
        message = outcome.message.removeprefix(f"{_name(checked)}: ")
        checked.add("image", f"{outcome.reason}: {message}")
    elif not isinstance(outcome, Ignored) and outcome.kept == KEPT:
        checked.size = outcome.width, outcome.height
    elif not isinstance(outcome, Ignored):
        other = f"a picture of another kind than JPEG ({outcome.kept.removeprefix('re-encoded:')})"
        checked.add("image", WHY_NOT.get(outcome.kept, other))


def _read_all(beside: Beside, log: FaultLog) -> Iterator[Checked]:
    """What there is in the files, or should be, numbered, with all faults but those of the images."""
    number = beside.files.first_number
    with Sources(beside.files.rec) as sources:
        for part in beside.parts:
            number = number if part.shard.first is None else part.shard.first
            number = yield from _PartReader(beside, part, sources, log).read(number)
        listed = sources.count()
        if sources.fault:
            log.add(Fault("sources", sources.fault))
        # It lists the records of all shards.
        elif listed is not None and (listed < number if beside.files.is_part else listed != number):
            log.add(Fault("sources", f"it lists {counted(listed, 'record')}; the other files have {number:,}"))


class _PartReader:
    """Reads one file beside its index and the list of sources."""

    def __init__(self, beside: Beside, part: Part, sources: Sources, log: FaultLog) -> None:
        self._beside, self._part, self._sources, self._log = beside, part, sources, log
        self._listing: Listing | None = None
        self._first = 0
        if part.idx is None:
            return
        if part.idx.is_file():
            self._listing = read_listing(part.idx)
            log.take_in(self._listing.faults, part.name)
        else:
            log.add(Fault("index-missing", f"there is no {part.idx.name}", shard=part.name))

    def read(self, number: int) -> Generator[Checked, None, int]:
        """Yield what there is, or should be, from record `number` of the pack on; return the number behind it."""
        self._first = number
        if self._part.rec is None:
            end = number + (self._part.shard.count or 0)
            for lost in range(number, end):
                yield self._missing(lost, None, "missing-shard", f"{self._part.shard.rec.name} is not there")
            return end
        with RecFile(self._part.rec) as file:
            return (yield from self._read(file, number))

    def _read(self, file: RecFile, number: int) -> Generator[Checked, None, int]:
        listing, position = self._listing, 0
        known = listing.offsets if listing else ()
        for found in file.scan(known, self._beside.width or None):
            checked = self._checked(number, found.offset)
            if listing is not None:
                position = self._compare(checked, listing, position)
            number += 1
            if isinstance(found, Whole):
                _check_payload(checked, found, self._beside)
                yield checked
                continue
            checked.add(found.kind, found.message)
            yield checked
            end = position if listing is None else bisect_left(listing.offsets, found.end, lo=position)
            if end == position and self._beside.is_ours:
                number = _number_behind(file, found, number)
            while listing is not None and position < end:
                what = f"lies in the damage that begins at byte {found.offset:,}"
                yield self._missing(number, listing.offsets[position], "lost", what)
                position, number = position + 1, number + 1
        if not file.size_bytes:
            self._log.add(Fault("cut-off", "the .rec is empty", shard=self._part.name))
        return (yield from self._read_behind(file.size_bytes, position, number))

    def _checked(self, number: int, offset: int | None) -> Checked:
        ordinal = number - self._beside.files.first_number
        return Checked(self._part, ordinal, number, offset, self._sources.at(number), None)

    def _missing(self, number: int, offset: int | None, kind: str, message: str) -> Checked:
        """A record that cannot be read, with its one fault."""
        checked = self._checked(number, offset)
        checked.add(kind, message)
        return checked

    def _foreign(self, listing: Listing, position: int, record: int) -> None:
        message = f"offset {listing.offsets[position]:,} lies within record {record}; no record begins there"
        self._log.add(Fault("index-foreign", message, line=listing.line(position), shard=self._part.name))

    def _compare(self, checked: Checked, listing: Listing, position: int) -> int:
        """Compare a record's offset with the index from `position` on; return the position behind it."""
        offsets = listing.offsets
        assert checked.offset is not None
        while position < len(offsets) and offsets[position] < checked.offset:
            self._foreign(listing, position, checked.ordinal - 1)
            position += 1
        if position == len(offsets) or offsets[position] != checked.offset:
            checked.add("index-missing", "the index does not list it")
            return position
        self._compare_key(checked, listing, position)
        position += 1
        while position < len(offsets) and offsets[position] == checked.offset:
            message = f"lists record {checked.ordinal} at byte {checked.offset:,} again"
            line = listing.line(position)
            self._log.add(Fault("index-duplicate", message, line=line, shard=self._part.name))
            position += 1
        return position

    def _compare_key(self, checked: Checked, listing: Listing, position: int) -> None:
        """Note a key that is not the record's number in its file, of a set that pack wrote: mxnet looks up by it."""
        if listing.keys is None or not self._beside.is_ours:
            return
        wanted = checked.number - self._first
        if listing.keys[position] != wanted:
            message = f"record {checked.ordinal} has the key {listing.keys[position]}, not {wanted}"
            line = listing.line(position)
            self._log.add(Fault("index-key", message, line=line, shard=self._part.name))

    def _read_behind(self, size_bytes: int, position: int, number: int) -> Generator[Checked, None, int]:
        """The records that index or list of sources have behind the end of the file, each as one that is cut off."""
        listing, shard = self._listing, self._part.shard
        while listing is not None and position < len(listing.offsets):
            offset, line = listing.offsets[position], listing.line(position)
            if offset < size_bytes:
                self._foreign(listing, position, number - self._beside.files.first_number - 1)
            else:
                what = f"line {line} of the index has it here, but the file ends at byte {size_bytes:,}"
                yield self._missing(number, offset, "cut-off", what)
                number += 1
            position += 1
        if shard.first is not None and shard.count is not None:
            end: float = shard.first + shard.count
        else:
            end = math.inf if self._part is self._beside.parts[-1] else number
        while listing is None and number < end and self._sources.at(number) is not None:
            what = "the list of sources has it, but the file ends here"
            yield self._missing(number, size_bytes, "cut-off", what)
            number += 1
        return number


def _number_behind(file: RecFile, damage: Damage, number: int) -> int:
    """The number of the record behind damage of which no index tells: its own id, where that is possible."""
    following = file.read(damage.end) if damage.end < file.size_bytes else ""
    if isinstance(following, str):
        return number
    own = int.from_bytes(following.payload[8:16], "little")
    fitting = (damage.end - damage.offset) // HEADER_BYTES
    return own if number <= own <= number + fitting else number


def _check_payload(checked: Checked, found: Whole, beside: Beside) -> None:
    if found.flaw:
        checked.add("padding", found.flaw)
    try:
        record = unpack_record(found.payload)
    except RwkvClipError as error:
        checked.add("label-width", error.message)
        return
    checked.record = record
    if len(record.labels) != beside.width:
        checked.add(
            "label-width",
            f"{len(record.labels)} labels, not {beside.captions} captions of {beside.context_length} ({beside.width})",
        )
    # Bytes, because a label of -0.0 equals 0.0.
    number = bytes(4) + checked.number.to_bytes(8, "little") + bytes(8)
    if beside.is_ours and found.payload[4:HEADER_BYTES] != number:
        checked.add("header", f"id {record.id}, id2 {record.id2}, label {record.label:g}, not {checked.number}, 0, 0")
    labels = np.frombuffer(found.payload, "<f4", len(record.labels), HEADER_BYTES)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        bad = np.flatnonzero(~((labels >= 0) & (labels < VOCAB_SIZE) & (labels == np.floor(labels))))
    if bad.size:
        slot, place = divmod(int(bad[0]), beside.context_length or 1)
        checked.add(
            "token", f"caption {slot}, position {place}: {labels[bad[0]]:g} is no token id (0 to {VOCAB_SIZE - 1:,})"
        )
    if checked.origin is not None and checked.origin.checksum is not None:
        checksum = record_checksum(record.labels, record.image)
        if checksum != checked.origin.checksum:
            checked.add("checksum", f"CRC-32 {checksum:08x}, packed with {checked.origin.checksum:08x}")
