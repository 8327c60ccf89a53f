"""`rwkvclip pack`: image-text sources to one RecordIO data set, every record proved to train.

>>> pack(PackConfig(sources=("./imgs",), out="out.rec")).count
59
"""

import importlib.util
import json
import os
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import EXIT_SIGNAL, RwkvClipError, UnableError, UsageError, progress
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.packing.estimate import estimate_inputs
from rwkvclip_cli.data.packing.output import OutputSet
from rwkvclip_cli.data.packing.pool import Outcome, Pool
from rwkvclip_cli.data.packing.prove import ImageOptions
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, SourceOptions, printable
from rwkvclip_cli.data.packing.seen import Seen
from rwkvclip_cli.data.packing.shuffle import shuffle
from rwkvclip_cli.data.packing.sources import columns_taken, count_samples, find_sources, read_sources
from rwkvclip_cli.data.packing.tables import Columns
from rwkvclip_cli.data.packing.tokens import TokenFile, check_rows, join_tokens, open_tokens
from rwkvclip_cli.data.packing.worker import Packed, WorkerOptions
from rwkvclip_cli.data.packing.writers import Writer, open_writer

FORMAT_VERSION = 1
HASH_EVERY_RECORDS = 256
SHOWN_REJECTS = 3

# The options that decide the bytes of a data set; the manifest records them.
BYTES_OPTIONS = ("format", "image_key", "caption_key", "tokens", "proof", "quality", "max_side", "max_pixels", "dedupe")


@dataclass(frozen=True)
class PackSummary:
    """What a pack has written.

    count + rejects is the number of inputs. ignored: files that are no input. kept: how many records hold the original
    bytes, were resized or re-encoded, and why. reasons: how many rejects for each reason. size_bytes, content_hash: of
    the .rec, the hash being SHA-256. columns: of each source that is a table, the columns that were read.
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

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        columns = {printable(source): asdict(columns) for source, columns in self.columns.items()}
        return asdict(self) | {"out": printable(self.out), "columns": columns}

    def text(self) -> str:
        """All of it, for people."""
        out = printable(self.out)
        lines = [f"{out}: {self.count:,} records, {self.size_bytes:,} bytes"]
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
        return "\n".join(lines)


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


@dataclass
class _Spread:
    """Least, mean and greatest of numbers seen one at a time."""

    count: int = 0
    total: int = 0
    least: int = 0
    greatest: int = 0

    def add(self, value: int) -> None:
        self.least = min(self.least, value) if self.count else value
        self.greatest = max(self.greatest, value)
        self.count += 1
        self.total += value

    def document(self) -> dict[str, float]:
        mean = round(self.total / self.count, 3) if self.count else 0.0
        return {"min": self.least, "mean": mean, "max": self.greatest}


@dataclass
class _Tally:
    """What the records and rejects so far add up to."""

    count: int = 0
    ignored: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    first_rejects: list[Reject] = field(default_factory=list)
    tokens: _Spread = field(default_factory=_Spread)
    captions: _Spread = field(default_factory=_Spread)
    widths: _Spread = field(default_factory=_Spread)
    heights: _Spread = field(default_factory=_Spread)
    image_bytes: _Spread = field(default_factory=_Spread)
    truncated: int = 0
    dropped: int = 0
    unmarked: int = 0
    blank: int = 0
    repeated: int = 0

    def add(self, record: Packed) -> None:
        self.count += 1
        self.kept[record.kept] += 1
        self.formats[record.format] += 1
        for tokens in record.token_counts:
            self.tokens.add(tokens)
        self.captions.add(len(record.token_counts) + record.dropped)
        self.widths.add(record.width)
        self.heights.add(record.height)
        self.image_bytes.add(len(record.jpeg))
        self.truncated += record.truncated
        self.dropped += record.dropped
        self.unmarked += record.unmarked
        self.blank += record.blank

    def refuse(self, reject: Reject) -> None:
        self.reasons[reject.reason] += 1
        if len(self.first_rejects) < SHOWN_REJECTS:
            self.first_rejects.append(reject)

    @property
    def rejects(self) -> int:
        return self.reasons.total()

    def statistics(self) -> dict[str, Any]:
        return {
            "kept": dict(sorted(self.kept.items())),
            "rejected": dict(sorted(self.reasons.items())),
            "ignored_files": self.ignored,
            "captions_a_record": self.captions.document(),
            "caption_tokens": self.tokens.document(),
            "captions_truncated": self.truncated,
            "captions_dropped": self.dropped,
            "captions_blank": self.blank,
            "captions_repeated": self.repeated,
            "token_slots_unmarked": self.unmarked,
            "image_format": dict(sorted(self.formats.items())),
            "images_repeated": self.reasons["duplicate"],
            "image_width": self.widths.document(),
            "image_height": self.heights.document(),
            "image_bytes": self.image_bytes.document(),
        }


def pack(config: PackConfig) -> PackSummary:
    """Pack the sources into `config.out` and the files beside it, atomically, and return what was written.

    The same input and options give the same bytes for any number of workers. Raises UsageError for sources or targets
    that cannot be, RwkvClipError where nothing could be packed or the disk refuses, UnableError without mxnet.
    """
    if not config.sources:
        raise UsageError("nothing to pack: no source given", f"rwkvclip pack FOLDER {config.out or 'OUT.rec'}")
    tally = _Tally()
    workers = Pool(config.workers or _cores(), _worker_options(config))
    with _ends_on_sigterm(), OutputSet(config.out, config.overwrite) as output:
        options = _source_options(config, output)
        found = find_sources(config.sources, options)
        columns = columns_taken(found, options)
        tokens = open_tokens(config.tokens, config.context_length) if config.tokens else None
        if config.proof == "decode":
            _need_dali()
        with (
            open_writer(config.writer, output.partial["rec"], output.partial["idx"]) as writer,
            workers as pool,
            Seen(output.partial["rec"].parent, context_length=config.context_length, dedupe=config.dedupe) as seen,
            progress(estimate_inputs(found, options), "packing", "images") as bar,
        ):
            for outcome in seen.sift(pool.run(_items(found, options, tokens))):
                _take(outcome, tally, writer, output)
                if not isinstance(outcome, Ignored):
                    bar.advance(1, f"{tally.rejects:,} rejected" if tally.rejects else "")
            tally.repeated = seen.repeated_captions()
        if tally.count == 0:
            raise _nothing_packed(config, tally)
        if config.shuffle:
            shuffle(output, config.writer, config.seed)
        content_hash = output.hash_written()
        size_bytes = output.partial["rec"].stat().st_size
        output.commit(_manifest(config, tally, content_hash, size_bytes))
    statistics = tally.statistics()
    return PackSummary(
        config.out,
        tally.count,
        tally.rejects,
        tally.ignored,
        statistics["kept"],
        statistics["rejected"],
        size_bytes,
        content_hash,
        statistics,
        columns,
    )


def _source_options(config: PackConfig, output: OutputSet) -> SourceOptions:
    """What the sources' readers need; neither the files being written nor the tokens are an input of a folder."""
    paths = [str(path) for path in output.final.values()] + [config.tokens or ""]
    skip = frozenset(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths)
    return SourceOptions(
        config.format, config.image_key, config.caption_key, skip, config.context_length, bool(config.tokens)
    )


def _items(found: list[tuple[str, str]], options: SourceOptions, tokens: TokenFile | None) -> Iterator[Item]:
    """The items of all sources, each sample with its row of `--tokens`; UsageError where these are too few or many."""
    items = read_sources(found, options)
    if tokens is None:
        return items
    count = count_samples(found, options)
    if count is not None:
        check_rows(tokens, count)
    return join_tokens(items, tokens)


def _take(outcome: Outcome, tally: _Tally, writer: Writer, output: OutputSet) -> None:
    """Write down what became of one item."""
    if isinstance(outcome, Ignored):
        tally.ignored += 1
    elif isinstance(outcome, Reject):
        tally.refuse(outcome)
        output.rejects.write(_reject_line(outcome))
    else:
        writer.write(outcome.labels, outcome.jpeg)
        checksum = zlib.crc32(outcome.jpeg, zlib.crc32(outcome.labels))
        output.sources.write(f"{tally.count}\t{_tsv(outcome.source)}\t{outcome.kept}\t{checksum:08x}\n")
        tally.add(outcome)
        if tally.count % HASH_EVERY_RECORDS == 0:
            output.hash_written()


def _need_dali() -> None:
    try:
        there = importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise UnableError("--proof decode needs nvidia-dali, which is not installed", "--proof structure")


def _worker_options(config: PackConfig) -> WorkerOptions:
    images = ImageOptions(config.proof, config.quality, config.max_side, config.max_pixels)
    return WorkerOptions(config.captions, config.context_length, images, config.dedupe)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _manifest(config: PackConfig, tally: _Tally, content_hash: str, size_bytes: int) -> dict[str, Any]:
    tokenizer = Tokenizer()
    return {
        "format_version": FORMAT_VERSION,
        "count": tally.count,
        "captions": config.captions,
        "context_length": config.context_length,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.hash},
        "sources": [printable(source) for source in config.sources],
        "options": {name: getattr(config, name) for name in BYTES_OPTIONS},
        "shuffled": config.shuffle,
        **({"seed": config.seed} if config.shuffle else {}),
        "rejects": tally.rejects,
        "statistics": tally.statistics(),
        "size_bytes": size_bytes,
        "content_hash": content_hash,
    }


def _reject_line(reject: Reject) -> str:
    line = {
        "source": printable(reject.source),
        "reason": reject.reason,
        "message": printable(reject.message),
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def _tsv(source: str) -> str:
    """A source as one cell: the backslash and what would end the cell or the line are escaped."""
    for letter, escaped in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        source = source.replace(letter, escaped)
    return printable(source)


def _nothing_packed(config: PackConfig, tally: _Tally) -> RwkvClipError:
    shown = ", ".join(printable(source) for source in config.sources)
    if not tally.rejects:
        return RwkvClipError(f"nothing to pack: no image in {shown}", "rwkvclip pack --help")
    counts = ", ".join(f"{reason} {count:,}" for reason, count in tally.reasons.most_common())
    examples = "".join(f"\n  {printable(reject.message)}" for reject in tally.first_rejects)
    return RwkvClipError(
        f"nothing could be packed: all {tally.rejects:,} inputs of {shown} are rejected ({counts}):{examples}",
        "rwkvclip pack --help",
    )


def _beside(out: str, suffix: str) -> str:
    return out.removesuffix(".rec") + suffix


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the pack as Ctrl-C does, so that nothing half-written stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(EXIT_SIGNAL + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
