"""`rwkvclip inspect DATA.rec`, alone or with --records: what a set holds, without reading all of it.

>>> summarize(read_beside(locate("pairs.rec")))["records"]
59
"""

import re
from collections.abc import Sequence
from typing import Any

from rwkvclip_cli.console import RwkvClipError, UsageError, counted
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.packing.images import read_header
from rwkvclip_cli.data.packing.samples import BadImage
from rwkvclip_cli.data.record_index import spread_over
from rwkvclip_cli.data.recordio import Record, unpack_record
from rwkvclip_cli.inspect.check import look_at
from rwkvclip_cli.inspect.faults import Fault, FaultLog
from rwkvclip_cli.inspect.files import Beside, Part, Sources
from rwkvclip_cli.inspect.index import read_listing
from rwkvclip_cli.inspect.records import Records, list_offsets
from rwkvclip_cli.inspect.scan import RecFile, Whole

# Records that the summary looks at, of all shards together; of each of them at least the fewest.
LOOKED_AT, FEWEST_LOOKED_AT = 48, 3
RANGE = re.compile(r"(-?\d+)?(:(-?\d+)?)?")
MANIFEST_FACTS = ("format_version", "tokenizer", "sources", "shuffled", "rejects", "content_hash", "salvaged")


def summarize(beside: Beside) -> dict[str, Any]:
    """Counts, layout, what the manifest says and what is missing. `faults` holds what is plainly wrong already."""
    faults = list(beside.misplaced)
    records = 0
    shards = []
    for part in beside.parts:
        found, wrong = _summarize_part(part, beside, records)
        shards.append({"rec": part.shard.rec.name, "records": found})
        records += found
        faults += wrong
    manifest = beside.manifest
    if beside.fault:
        faults.append(Fault("manifest", beside.fault))
    for name, here in (("count", records), ("size_bytes", beside.size_bytes)):
        if name in manifest and manifest[name] != here:
            faults.append(Fault("manifest", f"its {name} is {manifest[name]}, not {here}"))
    return {
        "records": records,
        "size_bytes": beside.size_bytes,
        "shards": shards,
        "captions": beside.captions,
        "context_length": beside.context_length,
        "label_width": beside.width,
        "manifest": {name: manifest[name] for name in MANIFEST_FACTS if name in manifest},
        "statistics": manifest.get("statistics", {}),
        "missing": list(beside.missing),
        "faults": [fault.document() for fault in faults],
    }


def _summarize_part(part: Part, beside: Beside, before: int) -> tuple[int, list[Fault]]:
    """How many records a file has, by its index if there is one, and what is plainly wrong with it.

    `before`: how many the shards before it have.
    """
    if part.rec is None:
        return 0, [Fault("missing-shard", f"{part.shard.rec.name} is not there", shard=part.name)]
    log = FaultLog()
    first = beside.files.first_number + before if part.shard.first is None else part.shard.first
    if part.idx is None or not part.idx.is_file():
        offsets = list_offsets(part, beside)
        _look_at_some(part, offsets, beside, first, log)
        return len(offsets), log.first
    listing, size_bytes = read_listing(part.idx), part.rec.stat().st_size
    log.take_in(listing.faults, part.name)
    records = len(listing.offsets)
    if records and listing.offsets[-1] >= size_bytes:
        message = f"the index goes on to byte {listing.offsets[-1]:,}, the file to {size_bytes:,}"
        log.add(Fault("cut-off", message, shard=part.name))
    elif not records and size_bytes:
        log.add(Fault("index-missing", f"{part.idx.name} lists no record", shard=part.name))
    if part.shard.count not in (None, records) and part.name is not None:
        message = f"it says {counted(part.shard.count, 'record')}, {part.idx.name} lists {records:,}"
        log.add(Fault("manifest", message, shard=part.name))
    _look_at_some(part, listing.offsets, beside, first, log)
    return records, log.first


def _look_at_some(part: Part, offsets: Sequence[int], beside: Beside, first: int, log: FaultLog) -> None:
    """Look at the first record of a file, the last and some between: `offsets` say where, `first` numbers them."""
    assert part.rec is not None
    are_numbered = not log.total
    with RecFile(part.rec) as file:
        for place in spread_over(len(offsets), max(LOOKED_AT // len(beside.parts), FEWEST_LOOKED_AT)):
            if offsets[place] < file.size_bytes:
                checked = look_at(beside, part, first + place, offsets[place], file.read(offsets[place]))
                for fault in checked.faults:
                    if are_numbered or fault.kind != "header":
                        log.add(fault)


def read_range(text: str, count: int) -> range:
    """The ordinals that `A:B` (or `A`, `A:`, `:B`; negative ones from the end) means among `count` records.

    >>> read_range("-2:", 10), read_range("3", 10)
    (range(8, 10), range(3, 4))
    """
    match = RANGE.fullmatch(text)
    if match is None or not text or len(text) > 40:
        raise UsageError(f"--records {text}: a range of ordinals is meant", "--records 0:5")
    first, colon, end = match[1], match[2], match[3]
    if colon:
        return range(count)[slice(int(first) if first else None, int(end) if end else None)]
    number = int(first)
    if not -count <= number < count:
        raise UsageError(f"--records {text}: there are {counted(count, 'record')}", f"--records 0:{min(count, 5)}")
    return range(number % count, number % count + 1)


def describe_records(beside: Beside, wanted: str) -> list[dict[str, Any]]:
    """The records of a range: captions decoded, the image's format and size, where it came from, or what is wrong."""
    described = []
    with Records(beside) as records, Sources(beside.files.rec) as sources:
        for ordinal in read_range(wanted, records.count):
            place = records.place(ordinal)
            entry: dict[str, Any] = {"record": ordinal, "offset": place.offset, "shard": place.part.name}
            entry = {name: value for name, value in entry.items() if value is not None}
            origin = sources.at(beside.files.first_number + ordinal)
            if origin is not None:
                entry |= {"source": origin.source, "kept": origin.kept}
            described.append(entry | _describe(records.read(ordinal), beside))
    return described


def _describe(found: Whole | str, beside: Beside) -> dict[str, Any]:
    if isinstance(found, str):
        return {"fault": found}
    try:
        record = unpack_record(found.payload)
    except RwkvClipError as error:
        return {"fault": error.message}
    entry: dict[str, Any] = {"id": record.id, "image_bytes": len(record.image)}
    try:
        entry["captions"] = decode_captions(record, beside.context_length)
        header = read_header(bytes(record.image))
        entry |= {"format": header.format, "width": header.width, "height": header.height}
    except ValueError as error:
        entry["fault"] = str(error)
    except BadImage as fault:
        entry["fault"] = f"{fault.reason}: {fault.message}"
    return entry


def decode_captions(record: Record, context_length: int) -> list[str]:
    """The text of each caption slot of a record; ValueError where a label is no token id."""
    labels = record.labels
    if any(not label.is_integer() for label in labels):
        raise ValueError("a label is no whole number, so no token id")
    step = context_length or len(labels) or 1
    return [Tokenizer().decode(labels[start : start + step]) for start in range(0, len(labels), step)]
