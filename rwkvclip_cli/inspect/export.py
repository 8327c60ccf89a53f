"""`rwkvclip inspect DATA.rec --export FOLDER`: images as they lie and their captions, as `pack` reads them back.

>>> export(beside, "folder", None).count
59

Record 12 becomes 00000/00000012.jpg beside 00000/00000012.json: {"captions": [...], "record": 12, "source": ...}.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rwkvclip_cli.console import RwkvClipError, UsageError, cannot_write, progress
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.recordio import Record, record_checksum, unpack_record
from rwkvclip_cli.inspect.files import Beside, Origin, Sources
from rwkvclip_cli.inspect.records import Records
from rwkvclip_cli.inspect.summary import decode_captions, read_range

FOLDER_RECORDS = 10_000
SUFFIXES = ((b"\xff\xd8\xff", ".jpg"), (b"\x89PNG", ".png"), (b"GIF8", ".gif"), (b"BM", ".bmp"))


@dataclass(frozen=True)
class Exported:
    """count: records written. changed: those of them whose captions, as text, give other token ids than they had."""

    folder: str
    count: int
    changed: int


def export(beside: Beside, folder: str, wanted: str | None) -> Exported:
    """Write the records of a range (None: all) into a new or empty folder, which appears whole or not at all.

    Raises UsageError where there is something in the folder, RwkvClipError at a damaged record or a full disk.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--export {folder}: exists and is no empty folder", "--export ANOTHER_FOLDER")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"--export {folder}: no folder {target.parent}", f"mkdir -p {target.parent}")
    aside = target.absolute().with_name(f".{target.absolute().name}.partial-{os.getpid()}")
    changed = 0
    try:
        with Records(beside) as records, Sources(beside.files.rec) as sources:
            ordinals = range(records.count) if wanted is None else read_range(wanted, records.count)
            with progress(len(ordinals), "exporting", "records") as bar:
                aside.mkdir()
                for ordinal in ordinals:
                    origin = sources.at(beside.files.first_number + ordinal)
                    source = None if origin is None else origin.source
                    record = _read(records, beside, ordinal, origin)
                    changed += _write(aside, ordinal, record, source, beside)
                    bar.advance()
        os.rename(aside, target)
    except OSError as error:
        raise cannot_write(folder, error, target.parent) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(folder, len(ordinals), changed)


def _read(records: Records, beside: Beside, ordinal: int, origin: Origin | None) -> Record:
    found, place = records.read(ordinal), records.place(ordinal)
    where = f"{place.part.rec or place.part.shard.rec}: record {ordinal}"
    where += "" if place.offset is None else f" at byte {place.offset:,}"
    verify = f"rwkvclip inspect {beside.files.name} --verify"
    if isinstance(found, str):
        raise RwkvClipError(f"{where} is damaged: {found}", verify)
    try:
        record = unpack_record(found.payload, where)
    except RwkvClipError as error:
        raise RwkvClipError(error.message, verify) from None
    if origin is not None and origin.checksum not in (None, record_checksum(record.labels, record.image)):
        raise RwkvClipError(f"{where} is damaged: its captions or image are not the bytes that were packed", verify)
    if len(record.labels) != beside.width:
        raise RwkvClipError(f"{where} has {len(record.labels)} labels, not {beside.width}", verify)
    return record


def _write(folder: Path, ordinal: int, record: Record, source: str | None, beside: Beside) -> bool:
    """Write one record's two files; whether its captions do not give its token ids again."""
    place = folder / f"{ordinal // FOLDER_RECORDS:05d}" / f"{ordinal:08d}"
    place.parent.mkdir(exist_ok=True)
    image = bytes(record.image)
    suffix = next((suffix for start, suffix in SUFFIXES if image.startswith(start)), ".image")
    place.with_suffix(suffix).write_bytes(image)
    try:
        captions = decode_captions(record, beside.context_length)
    except ValueError as error:
        raise RwkvClipError(
            f"record {ordinal} of {beside.files.name}: {error}", f"rwkvclip inspect {beside.files.name} --verify"
        ) from None
    document: dict[str, object] = {"captions": captions, "record": ordinal}
    if source is not None:
        document["source"] = source
    place.with_suffix(".json").write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    again = [Tokenizer().tokenize(caption, beside.context_length) for caption in captions]
    return [token for ids in again for token in ids] != list(record.labels)
