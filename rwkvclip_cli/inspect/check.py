"""Every record of a .rec checked on its own: framing, header, labels, checksum, and the image as pack proves it.

>>> for checked in check_records(file, beside, listing, pool_prover("decode", beside, workers=2), log): ...

One pass in constant memory: the file, its index and its list of sources are read side by side.
"""

import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rwkvclip_cli.config import MAX_PIXELS
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.captions import VOCAB_SIZE
from rwkvclip_cli.data.packing.pool import Outcome, Pool
from rwkvclip_cli.data.packing.prove import KEPT, ImageOptions
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, Sample
from rwkvclip_cli.data.packing.worker import WorkerOptions
from rwkvclip_cli.data.recordio import HEADER_BYTES, Record, unpack_record
from rwkvclip_cli.inspect.faults import Fault, FaultLog
from rwkvclip_cli.inspect.files import Beside, Origin, Sources
from rwkvclip_cli.inspect.index import Listing
from rwkvclip_cli.inspect.scan import Damage, RecFile, Whole

# Takes samples and gives what would become of each in a pack, in order; None judges by the bytes alone.
Prover = Callable[[Iterable[Item]], Iterator[Outcome]]

# A record with these alone is whole: its number, its padding and its index are written anew.
MENDABLE = frozenset({"header", "padding", "index-missing"})

WHY_NOT = {
    "re-encoded:refused-by-dali": "DALI refuses it",
    "re-encoded:other-pixels-in-dali": "DALI shows other pixels than a careful reader",
    "re-encoded:rare-jpeg": "a JPEG of a rare kind, which decoders on CPUs and GPUs read differently",
    "re-encoded:bad-structure": "its markers are out of order",
}


@dataclass
class Checked:
    """A record or damaged stretch. record: None where none could be read. end: where the next one begins."""

    ordinal: int
    offset: int
    end: int
    origin: Origin | None
    record: Record | None
    faults: list[Fault] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        """Whether a pack may hold the record."""
        return self.record is not None and all(fault.kind in MENDABLE for fault in self.faults)

    def add(self, kind: str, message: str) -> None:
        """Note a fault of this record."""
        source = None if self.origin is None else self.origin.source
        self.faults.append(Fault(kind, message, self.ordinal, self.offset, source))


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


def check_records(
    file: RecFile, beside: Beside, listing: Listing | None, prover: Prover | None, log: FaultLog
) -> Iterator[Checked]:
    """Yield every record and damaged stretch in file order; `log` takes their faults and those of the index.

    listing: the index, None where there is none to compare with.
    """
    waiting: deque[Checked] = deque()

    def items() -> Iterator[Item]:
        for checked in _read_all(file, beside, listing, log):
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


def _name(checked: Checked) -> str:
    return f"record {checked.ordinal}"


def _judge(checked: Checked, outcome: Outcome) -> None:
    if isinstance(outcome, Reject):
        message = outcome.message.removeprefix(f"{_name(checked)}: ")
        checked.add("image", f"{outcome.reason}: {message}")
    elif not isinstance(outcome, Ignored) and outcome.kept != KEPT:
        other = f"a picture of another kind than JPEG ({outcome.kept.removeprefix('re-encoded:')})"
        checked.add("image", WHY_NOT.get(outcome.kept, other))


def _read_all(file: RecFile, beside: Beside, listing: Listing | None, log: FaultLog) -> Iterator[Checked]:
    """What there is in the file, or should be, numbered, with all faults but those of the images."""
    known = listing.offsets if listing else ()
    ordinal = position = 0
    with Sources(beside.rec) as sources:
        for found in file.scan(known, beside.width or None):
            checked = Checked(ordinal, found.offset, found.end, sources.at(ordinal), None)
            if listing is not None:
                position = _compare(checked, listing, position, log)
            ordinal += 1
            if isinstance(found, Whole):
                _check_payload(checked, found, beside)
                yield checked
                continue
            checked.add(found.kind, found.message)
            yield checked
            end = position if listing is None else bisect_left(listing.offsets, found.end, lo=position)
            if end == position and beside.is_ours:
                ordinal = _number_behind(file, found, ordinal)
            while listing is not None and position < end:
                lost = Checked(ordinal, listing.offsets[position], found.end, sources.at(ordinal), None)
                lost.add("lost", f"lies in the damage that begins at byte {found.offset:,}")
                yield lost
                position, ordinal = position + 1, ordinal + 1
        yield from _read_behind(file, listing, position, ordinal, sources, log)


def _compare(checked: Checked, listing: Listing, position: int, log: FaultLog) -> int:
    """Compare a record's offset with the index from `position` on; return the position behind it."""
    offsets = listing.offsets
    while position < len(offsets) and offsets[position] < checked.offset:
        message = f"offset {offsets[position]:,} lies within record {checked.ordinal - 1}; no record begins there"
        log.add(Fault("index-foreign", message, line=listing.line(position)))
        position += 1
    if position == len(offsets) or offsets[position] != checked.offset:
        checked.add("index-missing", "the index does not list it")
        return position
    position += 1
    while position < len(offsets) and offsets[position] == checked.offset:
        message = f"lists record {checked.ordinal} at byte {checked.offset:,} again"
        log.add(Fault("index-duplicate", message, line=listing.line(position)))
        position += 1
    return position


def _number_behind(file: RecFile, damage: Damage, ordinal: int) -> int:
    """The number of the record behind damage of which no index tells: its own id, where that is possible."""
    following = file.read(damage.end) if damage.end < file.size_bytes else ""
    if isinstance(following, str):
        return ordinal
    own = int.from_bytes(following.payload[8:16], "little")
    fitting = (damage.end - damage.offset) // HEADER_BYTES
    return own if ordinal <= own <= ordinal + fitting else ordinal


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
    number = bytes(4) + checked.ordinal.to_bytes(8, "little") + bytes(8)
    if beside.is_ours and found.payload[4:HEADER_BYTES] != number:
        checked.add("header", f"id {record.id}, id2 {record.id2}, label {record.label:g}, not {checked.ordinal}, 0, 0")
    labels = np.frombuffer(found.payload, "<f4", len(record.labels), HEADER_BYTES)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        bad = np.flatnonzero(~((labels >= 0) & (labels < VOCAB_SIZE) & (labels == np.floor(labels))))
    if bad.size:
        slot, place = divmod(int(bad[0]), beside.context_length or 1)
        checked.add(
            "token", f"caption {slot}, position {place}: {labels[bad[0]]:g} is no token id (0 to {VOCAB_SIZE - 1:,})"
        )
    if checked.origin is not None and checked.origin.checksum is not None:
        checksum = zlib.crc32(memoryview(found.payload)[HEADER_BYTES:])
        if checksum != checked.origin.checksum:
            checked.add("checksum", f"CRC-32 {checksum:08x}, packed with {checked.origin.checksum:08x}")


def _read_behind(
    file: RecFile, listing: Listing | None, position: int, ordinal: int, sources: Sources, log: FaultLog
) -> Iterator[Checked]:
    """The records that index or list of sources have behind the end of the file, each as one that is cut off."""
    size_bytes = file.size_bytes
    while listing is not None and position < len(listing.offsets):
        offset, line = listing.offsets[position], listing.line(position)
        if offset < size_bytes:
            message = f"offset {offset:,} lies within record {ordinal - 1}; no record begins there"
            log.add(Fault("index-foreign", message, line=line))
        else:
            beyond = Checked(ordinal, offset, offset, sources.at(ordinal), None)
            beyond.add("cut-off", f"line {line} of the index has it here, but the file ends at byte {size_bytes:,}")
            yield beyond
            ordinal += 1
        position += 1
    while listing is None and (origin := sources.at(ordinal)) is not None:
        beyond = Checked(ordinal, size_bytes, size_bytes, origin, None)
        beyond.add("cut-off", "the list of sources has it, but the file ends here")
        yield beyond
        ordinal += 1
    listed = sources.count()
    if sources.fault:
        log.add(Fault("sources", sources.fault))
    elif listed is not None and listed != ordinal:
        log.add(Fault("sources", f"it lists {listed:,} records; the other files have {ordinal:,}"))
    if not size_bytes:
        log.add(Fault("cut-off", "the .rec is empty"))
