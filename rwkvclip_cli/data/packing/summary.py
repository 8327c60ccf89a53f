"""What a pack has written, as a document and as text.

>>> pack(config).document()["count"]
59
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rwkvclip_cli.console import counted, page
from rwkvclip_cli.data.packing.samples import printable
from rwkvclip_cli.data.packing.tables import Columns
from rwkvclip_cli.data.shards import shard_names


@dataclass(frozen=True)
class PackSummary:
    """What a pack has written.

    count + rejects is the number of inputs. ignored: files that are no input. kept: how many records hold the original
    bytes, were resized or re-encoded, and why. reasons: how many rejects for each reason. size_bytes, content_hash: of
    the .rec, the hash being SHA-256. columns: of each source that is a table, the columns that were read. shards: how
    many numbered .rec files there are in place of one.
    """

    out: str
    count: int
    rejects: int
    ignored: int
    kept: dict[str, int]
    reasons: dict[str, int]
    size_bytes: int
    content_hash: str
    statistics: dict[str, Any]
    columns: dict[str, Columns] = field(default_factory=dict)
    shards: int = 0

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        columns = {printable(source): asdict(columns) for source, columns in self.columns.items()}
        return asdict(self) | {"out": printable(self.out), "columns": columns}

    def text(self) -> str:
        """All of it, for people."""
        out = printable(self.out)
        lines = [f"{out}: {counted(self.count, 'record')}, {self.size_bytes:,} bytes"]
        if self.shards:
            first, last = (shard_names(Path(self.out), number)[0] for number in (0, self.shards - 1))
            lines.append(f"  files: {self.shards:,}, {printable(first)} to {printable(last)}")
        lines += [f"  {how}: {count:,}" for how, count in self.kept.items()]
        lines += _columns_lines(self.columns)
        if self.rejects:
            lines.append(f"rejected: {self.rejects:,}, each with its reason in {_beside(out, '.rejects.jsonl')}")
            lines += [f"  {reason}: {count:,}" for reason, count in self.reasons.items()]
        if self.ignored:
            lines.append(f"ignored files: {self.ignored:,}")
        if self.statistics["captions_truncated"]:
            lines.append(f"captions cut to the context length: {self.statistics['captions_truncated']:,}")
        if self.statistics["captions_dropped"]:
            lines.append(f"captions beyond the slots, left out: {self.statistics['captions_dropped']:,}")
        if self.statistics["captions_repeated"]:
            lines.append(f"captions that an earlier one equals: {self.statistics['captions_repeated']:,}")
        if self.statistics["token_slots_unmarked"]:
            unmarked = self.statistics["token_slots_unmarked"]
            lines.append(f"token slots without CLIP's start or end token: {unmarked:,}; ids of another tokenizer?")
        return page(lines)


def _columns_lines(taken: dict[str, Columns]) -> list[str]:
    """Which columns the tables gave, once for all tables with the same ones."""
    sources: dict[Columns, list[str]] = {}
    for source, columns in taken.items():
        sources.setdefault(columns, []).append(source)
    lines = []
    for columns, paths in sources.items():
        of = "" if len(sources) == 1 else f" of {printable(paths[0])}"
        more = f" and {len(paths) - 1:,} more" if of and len(paths) > 1 else ""
        captions = (", " if columns.are_named else ", else ").join(columns.captions) or "no column"
        lines.append(f"columns{of}{more}: image from {', else '.join(columns.image)}; captions from {captions}")
    return [printable(line) for line in lines]


def _beside(out: str, suffix: str) -> str:
    return out.removesuffix(".rec") + suffix
