"""`rwkvclip inspect DATA.rec`, alone or with --records: what a set holds, without reading all of it.

>>> summarize(file, read_beside(file))["records"]
59
"""

import re
from array import array
from typing import Any

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.packing.images import read_header
from rwkvclip_cli.data.packing.samples import BadImage
from rwkvclip_cli.data.recordio import Record, unpack_record
from rwkvclip_cli.inspect.faults import Fault
from rwkvclip_cli.inspect.files import Beside, Sources
from rwkvclip_cli.inspect.index import read_listing
from rwkvclip_cli.inspect.scan import Damage, RecFile

RANGE = re.compile(r"(-?\d+)?(:(-?\d+)?)?")
MANIFEST_FACTS = ("format_version", "tokenizer", "sources", "shuffled", "rejects", "content_hash", "salvaged")


def summarize(file: RecFile, beside: Beside) -> dict[str, Any]:
    """Counts, layout, what the manifest says and what is missing. `faults` holds what is plainly wrong already."""
    faults = []
    if beside.idx.is_file():
        listing = read_listing(beside.idx)
        records, faults = len(listing.offsets), list(listing.faults.first)
        if records and listing.offsets[-1] >= file.size_bytes:
            message = f"the index goes on to byte {listing.offsets[-1]:,}, the file to {file.size_bytes:,}"
            faults.append(Fault("cut-off", message))
        elif not records and file.size_bytes:
            faults.append(Fault("index-missing", f"{beside.idx.name} lists no record"))
    else:
        found = list_offsets(file, beside)
        records = len(found)
    manifest = beside.manifest
    if beside.fault:
        faults.append(Fault("manifest", beside.fault))
    for name, here in (("count", records), ("size_bytes", file.size_bytes)):
        if name in manifest and manifest[name] != here:
            faults.append(Fault("manifest", f"its {name} is {manifest[name]}, not {here}"))
    return {
        "records": records,
        "size_bytes": file.size_bytes,
        "captions": beside.captions,
        "context_length": beside.context_length,
        "label_width": beside.width,
        "manifest": {name: manifest[name] for name in MANIFEST_FACTS if name in manifest},
        "statistics": manifest.get("statistics", {}),
        "missing": list(beside.missing),
        "faults": [fault.document() for fault in faults],
    }


def list_offsets(file: RecFile, beside: Beside) -> "array[int]":
    """The offsets of all records: of a sound index, else from walking the file.

    Raises RwkvClipError where that meets damage.
    """
    if beside.idx.is_file():
        listing = read_listing(beside.idx)
        if listing.offsets and not listing.faults.total:
            return listing.offsets
    offsets = array("Q")
    for found in file.walk():
        if isinstance(found, Damage):
            raise RwkvClipError(
                f"{file.path}: record {len(offsets)} at byte {found.offset:,} is damaged: {found.message}",
                f"rwkvclip inspect {file.path} --verify",
            )
        offsets.append(found)
    return offsets


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
        raise UsageError(f"--records {text}: there are {count:,} records", f"--records 0:{min(count, 5)}")
    return range(number % count, number % count + 1)


def describe_records(file: RecFile, beside: Beside, wanted: str) -> list[dict[str, Any]]:
    """The records of a range: captions decoded, the image's format and size, where it came from, or what is wrong."""
    offsets = list_offsets(file, beside)
    described = []
    with Sources(beside.rec) as sources:
        for ordinal in read_range(wanted, len(offsets)):
            entry: dict[str, Any] = {"record": ordinal, "offset": offsets[ordinal]}
            origin = sources.at(ordinal)
            if origin is not None:
                entry |= {"source": origin.source, "kept": origin.kept}
            described.append(entry | _describe(file, offsets[ordinal], beside))
    return described


def _describe(file: RecFile, offset: int, beside: Beside) -> dict[str, Any]:
    found = file.read(offset)
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
