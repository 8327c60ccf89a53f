"""How far a pack has come, on the disk beside its partial files: what `pack --resume` starts from.

>>> write_journal(folder, Journal(made_of, READING, Position(), [], {"rejects": 0, "sources": 0}, tally.document()))
>>> read_journal(folder).phase
'reading'
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rwkvclip_cli.data.packing.reading import Position
from rwkvclip_cli.data.packing.record_files import Shard
from rwkvclip_cli.data.packing.switch import sync_folder, write_synced

JOURNAL = "journal.json"
READING, SHUFFLING, WRITTEN = "reading", "shuffling", "written"


@dataclass(frozen=True)
class Journal:
    """A point at which all partial files were on the disk.

    made_of: options and sources, as JSON holds them. phase: what was being done. position: the inputs that are done.
    shards, texts: how far the files of that phase are written, in bytes. tally: a `Tally.document`.
    content_hash: of all .rec files, once they are written.
    """

    made_of: dict[str, Any]
    phase: str
    position: Position
    shards: list[Shard]
    texts: dict[str, int]
    tally: dict[str, Any] = field(default_factory=dict)
    content_hash: str = ""


def write_journal(folder: Path, journal: Journal) -> None:
    """Replace the journal of a folder. What it speaks of is to be on the disk before. Raises OSError."""
    aside = folder / f"{JOURNAL}.new"
    write_synced(aside, json.dumps(asdict(journal)))
    os.replace(aside, folder / JOURNAL)
    sync_folder(folder)


def read_journal(folder: Path) -> Journal | None:
    """The journal of a folder; None where there is none that can be read."""
    try:
        document = json.loads((folder / JOURNAL).read_text("utf-8"))
        shards = [Shard(**shard) for shard in document.pop("shards")]
        return Journal(position=Position(**document.pop("position")), shards=shards, **document)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_journal(folder: Path) -> None:
    """Remove the journal: what is in the folder is not to be continued."""
    (folder / JOURNAL).unlink(missing_ok=True)
