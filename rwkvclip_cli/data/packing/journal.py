"""How far a pack has come, on the disk beside its partial files: what `pack --resume` starts from.

>>> write_journal(folder, Journal(made_of, READING, Position(), [], {}, tally.document()))
>>> read_journal(folder).phase
'reading'
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rwkvclip_cli.data.packing.growing import Extent
from rwkvclip_cli.data.packing.reading import Position
from rwkvclip_cli.data.packing.record_files import PairExtent
from rwkvclip_cli.data.packing.switch import sync_folder, write_synced
from rwkvclip_cli.documents import parse_json

JOURNAL = "journal.json"
READING, SHUFFLING, WRITTEN = "reading", "shuffling", "written"


@dataclass(frozen=True)
class Journal:
    """A point at which all partial files were on the disk.

    made_of: options and sources, as JSON holds them. phase: what was being done. position: the inputs that are done.
    shards: how far the .rec and .idx files of that phase are written; files: the others, by their names in the folder,
    and those that the phase reads. tally: a `Tally.document`.
    content_hash: of all .rec files, once they are written.
    """

    made_of: dict[str, Any]
    phase: str
    position: Position
    shards: list[PairExtent]
    files: dict[str, Extent]
    tally: dict[str, Any] = field(default_factory=dict)
    content_hash: str = ""


def write_journal(folder: Path, journal: Journal) -> None:
    """Replace the journal of a folder. What it speaks of is to be on the disk before. Raises OSError."""
    aside = folder / f"{JOURNAL}.new"
    text = json.dumps(asdict(journal))
    write_synced(aside, f"{_checksum(text)} {text}")
    os.replace(aside, folder / JOURNAL)
    sync_folder(folder)


def read_journal(folder: Path) -> Journal | None:
    """The journal of a folder; None where there is none, or not every bit of it is as it was written."""
    try:
        checksum, _, text = (folder / JOURNAL).read_text("utf-8").partition(" ")
        if checksum != _checksum(text):
            return None
        document = parse_json(text)
        shards = [
            PairExtent(pair["count"], Extent(**pair["rec"]), Extent(**pair["idx"])) for pair in document.pop("shards")
        ]
        files = {name: Extent(**extent) for name, extent in document.pop("files").items()}
        return Journal(position=Position(**document.pop("position")), shards=shards, files=files, **document)
    except (OSError, ValueError, KeyError, TypeError):  # the last two: of another version of rwkvclip
        return None


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def forget_journal(folder: Path) -> None:
    """Remove the journal: what is in the folder is not to be continued."""
    (folder / JOURNAL).unlink(missing_ok=True)
