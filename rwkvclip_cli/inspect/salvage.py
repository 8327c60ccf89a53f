"""`rwkvclip inspect DATA.rec --salvage OUT.rec`: every record that is still sound, of all shards, in one new file.

>>> salvage(beside, prover, "saved.rec").kept
57
"""

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rwkvclip_cli.console import RwkvClipError, UsageError, progress
from rwkvclip_cli.data.packing.growing import FollowingHash
from rwkvclip_cli.data.packing.output import OutputSet
from rwkvclip_cli.data.recordio import Record, RecordWriter, pack_record
from rwkvclip_cli.data.shards import FORMAT_VERSION
from rwkvclip_cli.data.shards import beside as path_beside
from rwkvclip_cli.inspect.check import MENDABLE, Checked, Prover, check_records
from rwkvclip_cli.inspect.faults import FaultLog
from rwkvclip_cli.inspect.files import Beside

NOT_SALVAGED = ("statistics", "shards", "shard_size")


@dataclass(frozen=True)
class Salvaged:
    """kept: records of OUT. before: those of them in front of the first damage. lost: records left out, by fault."""

    out: str
    kept: int
    before: int
    lost: dict[str, int]


def salvage(beside: Beside, prover: Prover | None, out: str) -> Salvaged:
    """Write what is sound to OUT.rec and the files beside it, numbered anew; the damaged set stays as it is.

    Raises RwkvClipError where nothing is sound, UsageError where OUT exists.
    """
    files = beside.files
    if Path(out).absolute() in {path.absolute() for path in (files.rec, *(shard.rec for shard in files.shards))}:
        raise UsageError(f"--salvage {out}: that is the damaged file itself", "--salvage ANOTHER.rec")
    kept = before = 0
    lost: Counter[str] = Counter()
    with OutputSet(out, overwrite=False, instead="another name") as output:
        output.start()
        copied = _copy_rejects(beside, output)
        with (
            RecordWriter(output.partial["rec"], output.partial["idx"]) as writer,
            progress(beside.manifest.get("count"), "salvaging", "records") as bar,
        ):
            for checked in check_records(beside, prover, FaultLog()):
                bar.advance(1, f"{lost.total():,} lost" if lost else "")
                if not checked.is_usable or checked.record is None:
                    _leave_out(checked, lost, output)
                    continue
                record = checked.record
                output.sources.write(_source_line(kept, checked))
                writer.write(pack_record(Record(record.labels, record.image, id=kept)))
                kept += 1
                before += not lost
        if not kept:
            raise RwkvClipError(f"{files.name}: no record is sound, nothing to salvage", f"ls -l {files.shards[0].rec}")
        with contextlib.closing(FollowingHash(output.partial["rec"])) as following:
            written = following.update()
        output.commit(_manifest(beside, kept, copied, lost) | asdict(written))
    return Salvaged(out, kept, before, dict(sorted(lost.items())))


def _leave_out(checked: Checked, lost: Counter[str], output: OutputSet) -> None:
    """Count a record that is lost, and write it down as a reject."""
    worst = next(fault for fault in checked.faults if fault.kind not in MENDABLE)
    lost[worst.kind] += 1
    line = {"source": worst.source or f"record {checked.ordinal}", "reason": worst.kind, "message": str(worst)}
    output.rejects.write(json.dumps(line, ensure_ascii=False) + "\n")


def _copy_rejects(beside: Beside, output: OutputSet) -> int:
    """Carry the rejects of the pack over; return how many. Nobody knows which of them belong to one shard alone."""
    count = 0
    path = path_beside(beside.files.rec, "rejects")
    if beside.files.is_part or not path.is_file():
        return count
    with (
        contextlib.suppress(OSError),
        path.open(encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        for line in file:
            if line.endswith("\n"):
                output.rejects.write(line)
                count += 1
    return count


def _source_line(ordinal: int, checked: Checked) -> str:
    origin = checked.origin
    if origin is None:
        return f"{ordinal}\trecord {checked.ordinal}\tsalvaged\n"
    checksum = "" if origin.checksum is None else f"\t{origin.checksum:08x}"
    return f"{ordinal}\t{origin.source}\t{origin.kept}{checksum}\n"


def _manifest(beside: Beside, kept: int, copied: int, lost: Counter[str]) -> dict[str, Any]:
    """The damaged set's manifest with what has changed; statistics of all its records would no longer be true."""
    manifest = {key: value for key, value in beside.manifest.items() if key not in NOT_SALVAGED}
    return {
        "format_version": FORMAT_VERSION,
        **manifest,
        "count": kept,
        "captions": beside.captions,
        "context_length": beside.context_length,
        "rejects": copied + lost.total(),
        "salvaged": {"from": beside.files.name.name, "kept": kept, "lost": lost.total()},
    }
