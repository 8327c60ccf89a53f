"""`rwkvclip pack`: image-text sources to one RecordIO data set, every record proved to train.

>>> pack(PackConfig(sources=("./imgs",), out="out.rec")).count
59
"""

import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rwkvclip_cli.config import PackConfig, retype
from rwkvclip_cli.console import EXIT_SIGNAL, RwkvClipError, UnableError, UsageError, counted, progress, say, warn
from rwkvclip_cli.cores import usable_cores
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.packing.estimate import estimate_inputs
from rwkvclip_cli.data.packing.journal import READING, SHUFFLING, WRITTEN, Journal
from rwkvclip_cli.data.packing.output import OutputSet
from rwkvclip_cli.data.packing.pool import Outcome, Pool
from rwkvclip_cli.data.packing.prove import ImageOptions
from rwkvclip_cli.data.packing.reading import Reading, parts_of
from rwkvclip_cli.data.packing.record_files import PairExtent, RecordFiles
from rwkvclip_cli.data.packing.resume import changed_since, made_of, refuse_differences, refuse_other_settings
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, SourceOptions, printable
from rwkvclip_cli.data.packing.seen import Seen
from rwkvclip_cli.data.packing.shuffle import Unshuffled, shuffle
from rwkvclip_cli.data.packing.sources import columns_taken, count_samples, find_sources, kind_of
from rwkvclip_cli.data.packing.summary import PackSummary
from rwkvclip_cli.data.packing.tally import Tally
from rwkvclip_cli.data.packing.tokens import check_rows, join_tokens, open_tokens
from rwkvclip_cli.data.packing.worker import WorkerOptions
from rwkvclip_cli.data.shards import FORMAT_VERSION
from rwkvclip_cli.documents import parse_json

CHECKPOINT_EVERY_S = 5.0
CHECKPOINT_SHARE = 20  # of the time at most a twentieth goes into checkpoints, whatever the disk takes for one

# The options that decide the bytes of a data set; the manifest records them.
BYTES_OPTIONS = ("format", "image_key", "caption_key", "tokens", "proof", "quality", "max_side", "max_pixels", "dedupe")


def pack(config: PackConfig) -> PackSummary:
    """Pack the sources into `config.out` and the files beside it, atomically, and return what was written.

    The same input and options give the same bytes for any number of workers, and for a pack that was interrupted and
    continued with `resume`. Raises UsageError for sources or targets that cannot be, RwkvClipError where nothing could
    be packed or the disk refuses, UnableError without mxnet.
    """
    if not config.sources:
        if Path(config.out).suffix == ".rec" or not config.out:
            raise UsageError("nothing to pack: no source given", f"rwkvclip pack FOLDER {config.out or 'OUT.rec'}")
        completed = retype("pack", config, sources=(config.out,), out="OUT.rec")
        raise UsageError(f"no OUT.rec is given, to which {printable(config.out)} would be packed", completed)
    if config.resume and config.writer == "mxnet":
        raise UsageError("--resume: mxnet cannot continue a file", "--writer native, which writes the same bytes")
    with (
        _ends_on_sigterm(),
        OutputSet(config.out, config.overwrite, config.shard_size) as output,
        _told_how_to_continue(config, output),
    ):
        if config.resume:
            output.refuse_unreadable()
        if config.resume and output.journal is None and (done := _finished(config, output)):
            say(f"{printable(config.out)} is complete already")
            if change := _change_since(config, output, done):
                warn(change)
            return done
        if not config.resume:
            command = retype("pack", config, resume=True)
            output.refuse_unfinished(f"{command} continues it, --overwrite throws it away")
        output.refuse_existing()
        if config.seed and not config.shuffle:
            warn("--seed draws the order of --shuffle, which is not given: the records stay in their sources' order")
        return _Pack(config, output).run()


class _Pack:
    """One pack, from its first input or from its latest checkpoint to its files."""

    def __init__(self, config: PackConfig, output: OutputSet) -> None:
        """Find the sources and what there is to continue; nothing is written before all of it is known to fit."""
        self._config = config
        self._output = output
        self._options = _source_options(config, output)
        self._found = [(source, kind_of(source, self._options)) for source in config.sources]
        self._columns = columns_taken(self._found, self._options)
        self._tokens = open_tokens(config.tokens, config.context_length) if config.tokens else None
        if config.proof == "decode":
            _need_dali()
        parts = parts_of(self._found)
        self._made_of = made_of(config, parts)
        journal = output.journal if config.resume else None
        if journal:
            refuse_differences(journal.made_of, self._made_of)
        self._journal = journal
        self._tally = Tally.restored(journal.tally) if journal else Tally(config.dedupe)
        self._reading = Reading(parts, self._options, journal.position if journal else None)
        self._last_checkpoint_s = time.monotonic()
        self._checkpoint_took_s = 0.0

    def run(self) -> PackSummary:
        """Do what is left to do."""
        output, journal = self._output, self._journal
        self._say_where_it_starts()
        phase = journal.phase if journal else READING
        output.start(journal, in_scratch=self._config.shuffle and phase == READING)
        shards, content_hash = (journal.shards, journal.content_hash) if journal else ([], "")
        if phase == READING:
            shards, content_hash = self._read(shards)
            if self._config.shuffle:
                phase, shards = SHUFFLING, []
                output.leave_scratch()
                self._keep(phase, shards)
        if phase == SHUFFLING:
            shards, content_hash = self._shuffle(shards)
        if journal and journal.phase == WRITTEN:
            with self._record_files(None, shards):  # compares the files with the journal
                pass
        size_bytes = sum(shard.rec.size_bytes for shard in shards)
        manifest = _manifest(self._config, self._tally, content_hash, size_bytes)
        if self._config.shard_size:
            recs = [path.name for path, _ in map(output.record_paths, range(len(shards)))]
            manifest["shards"] = [_shard(rec, shard) for rec, shard in zip(recs, shards, strict=True)]
        output.commit(manifest, len(shards))
        return self._summary(content_hash, size_bytes, len(shards) if self._config.shard_size else 0)

    def _say_where_it_starts(self) -> None:
        out, tally = printable(self._config.out), self._tally
        if self._journal:
            say(f"continuing {out} after {counted(tally.count, 'record')} and {counted(tally.rejects, 'reject')}")
        elif self._config.resume:
            say(f"--resume: there is no unfinished pack of {out}; starting from the beginning")
        elif self._output.journal:
            count = self._output.journal.tally["count"]
            say(f"--overwrite: an unfinished pack of {out} ({counted(count, 'record')}) is thrown away")

    def _read(self, done: list[PairExtent]) -> tuple[list[PairExtent], str]:
        """Pack the inputs that are left; what the .rec files hold, and the hash of all of them."""
        config, tally = self._config, self._tally
        folder = self._output.scratch if config.shuffle else None
        workers = Pool(config.workers or usable_cores(), _worker_options(config))
        with (
            workers as pool,
            self._record_files(folder, done) as files,
            self._seen(folder) as seen,
            progress(
                estimate_inputs(self._found, self._options), "packing", "images", tally.count + tally.rejects
            ) as bar,
        ):
            for outcome in seen.sift(pool.run(self._items())):
                _take(outcome, tally, files, self._output)
                self._reading.advance(outcome.source)
                if not isinstance(outcome, Ignored):
                    bar.advance(1, f"{tally.rejects:,} rejected" if tally.rejects else "")
                if _can_continue_behind(outcome):
                    self._keep_now_and_then(READING, files, seen)
            shards, content_hash = files.close(), files.content_hash
            tally.repeated = seen.repeated_captions()
        if tally.count == 0:
            self._output.forget()
            raise _nothing_packed(config, tally)
        if not config.shuffle:
            self._keep(WRITTEN, shards, content_hash)
        return shards, content_hash

    def _shuffle(self, done: list[PairExtent]) -> tuple[list[PairExtent], str]:
        """Copy the records to their places; returns as `_read`."""
        output = self._output
        rec, idx = (output.scratch / output.final[part].name for part in ("rec", "idx"))
        sources = output.scratch / output.final["sources"].name
        with self._record_files(None, done) as files:
            shuffle(
                Unshuffled(rec, idx, sources),
                files,
                output.sources,
                self._config.seed,
                lambda: self._keep_now_and_then(SHUFFLING, files),
            )
            shards, content_hash = files.close(), files.content_hash
        self._keep(WRITTEN, shards, content_hash)
        return shards, content_hash

    def _record_files(self, folder: Path | None, done: list[PairExtent]) -> RecordFiles:
        """The partial .rec and .idx, or one pair of them in `folder`."""
        if folder is None:
            return RecordFiles(self._config.writer, self._output.record_paths, self._config.shard_size, done)
        rec, idx = (folder / self._output.final[part].name for part in ("rec", "idx"))
        return RecordFiles(self._config.writer, lambda number: (rec, idx), None, done)

    def _seen(self, folder: Path | None) -> Seen:
        """What the records so far have shown, in `folder` or beside the partial files."""
        aside = self._output.record_paths(0)[0].parent
        done = {aside / name: extent for name, extent in self._journal.files.items()} if self._journal else {}
        return Seen(folder or aside, dedupe=self._config.dedupe, done=done)

    def _items(self) -> Iterator[Item]:
        """The items that are left, each sample with its row of `--tokens`; UsageError for too few or too many rows."""
        items = self._reading.items()
        if self._tokens is None:
            return items
        count = count_samples(self._found, self._options)
        if count is not None:
            check_rows(self._tokens, count)
        return join_tokens(items, self._tokens, self._tally.samples)

    def _keep_now_and_then(self, phase: str, files: RecordFiles, seen: Seen | None = None) -> None:
        """Write a checkpoint, seldom enough to cost next to nothing."""
        wait_s = max(CHECKPOINT_EVERY_S, CHECKPOINT_SHARE * self._checkpoint_took_s)
        began_s = time.monotonic()
        if began_s - self._last_checkpoint_s >= wait_s:
            shards = files.flush()
            if shards is not None:
                self._keep(phase, shards, seen=seen)
            self._last_checkpoint_s = time.monotonic()
            self._checkpoint_took_s = self._last_checkpoint_s - began_s

    def _keep(self, phase: str, shards: list[PairExtent], content_hash: str = "", seen: Seen | None = None) -> None:
        """Write a checkpoint: the .rec and .idx files are on the disk, up to what `shards` says."""
        if self._config.writer == "mxnet":
            return
        files = self._output.flush()
        if seen:
            files |= {self._output.name_of(path): extent for path, extent in seen.flush().items()}
        position = self._reading.position
        tally = self._tally.document()
        self._output.keep(Journal(self._made_of, phase, position, shards, files, tally, content_hash))

    def _summary(self, content_hash: str, size_bytes: int, shards: int) -> PackSummary:
        tally, statistics = self._tally, self._tally.statistics()
        return PackSummary(
            self._config.out,
            tally.count,
            tally.rejects,
            tally.ignored,
            statistics["kept"],
            statistics["rejected"],
            size_bytes,
            content_hash,
            statistics,
            self._columns,
            shards,
        )


def _finished(config: PackConfig, output: OutputSet) -> PackSummary | None:
    """The summary of the set that is there, if it is what this pack would write; UsageError if it is of another."""
    try:
        manifest = parse_json(output.final["manifest"].read_text("utf-8"))
        if not output.is_whole(manifest):
            return None
        refuse_other_settings(config.out, manifest, _settings(config))
        statistics = manifest["statistics"]
        return PackSummary(
            config.out,
            manifest["count"],
            manifest["rejects"],
            statistics["ignored_files"],
            statistics["kept"],
            statistics["rejected"],
            manifest["size_bytes"],
            manifest["content_hash"],
            statistics,
            shards=len(manifest.get("shards", [])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _change_since(config: PackConfig, output: OutputSet, done: PackSummary) -> str:
    """What shows that the sources are no longer those of a finished set; "" where nothing does."""
    options = _source_options(config, output)
    when_ns = output.final["manifest"].stat().st_mtime_ns
    try:
        found = find_sources(config.sources, options)
        change = changed_since(found, options, config.tokens, when_ns, done.count + done.rejects)
    except UsageError as error:
        return error.message
    return f"{change}; --overwrite in place of --resume packs it anew" if change else ""


@contextmanager
def _told_how_to_continue(config: PackConfig, output: OutputSet) -> Iterator[None]:
    """Add to whatever ends the pack early what is kept, and the command that continues it."""
    try:
        yield
    except BaseException as error:
        if output.is_kept and output.journal and not isinstance(error, UsageError):
            count = output.journal.tally["count"]
            kept = f"{counted(count, 'record')} {'is' if count == 1 else 'are'} kept"
            command = retype("pack", config, resume=True)
            if isinstance(error, RwkvClipError):
                error.message += f"; {kept}"
                error.hint = f"{error.hint}; then {command}" if error.hint else command
            else:
                say(f"{kept}; to continue: {command}")
        raise


def _source_options(config: PackConfig, output: OutputSet) -> SourceOptions:
    """What the sources' readers need; neither the files being written nor the tokens are an input of a folder."""
    old = [output.final["rec"].with_name(name) for name in output.old_names()]
    paths = [str(path) for path in (*output.final.values(), *old)] + [config.tokens or ""]
    skip = frozenset(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths)
    return SourceOptions(
        config.format, config.image_key, config.caption_key, skip, config.context_length, bool(config.tokens)
    )


def _take(outcome: Outcome, tally: Tally, files: RecordFiles, output: OutputSet) -> None:
    """Write down what became of one item."""
    if isinstance(outcome, Ignored):
        tally.ignored += 1
    elif isinstance(outcome, Reject):
        tally.refuse(outcome)
        output.rejects.write(_reject_line(outcome))
    else:
        files.write(outcome.labels, outcome.jpeg)
        output.sources.write(f"{tally.count}\t{_tsv(outcome.source)}\t{outcome.kept}\t{outcome.checksum:08x}\n")
        tally.add(outcome)


def _can_continue_behind(outcome: Outcome) -> bool:
    """Whether a reader can start behind it: see `read_tar`, which ends where the damage is."""
    return not isinstance(outcome, Ignored) and not (isinstance(outcome, Reject) and outcome.reason == "damaged-tar")


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


def _settings(config: PackConfig) -> dict[str, Any]:
    """What the manifest says about the options that a set was packed with."""
    tokenizer = Tokenizer()
    return {
        "captions": config.captions,
        "context_length": config.context_length,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.hash},
        "sources": [printable(source) for source in config.sources],
        "options": {
            **{name: getattr(config, name) for name in BYTES_OPTIONS},
            "caption_key": list(config.caption_key),
            **({"shard_size": config.shard_size} if config.shard_size else {}),
        },
        "shuffled": config.shuffle,
        **({"seed": config.seed} if config.shuffle else {}),
    }


def _manifest(config: PackConfig, tally: Tally, content_hash: str, size_bytes: int) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "count": tally.count,
        **_settings(config),
        "rejects": tally.rejects,
        "statistics": tally.statistics(),
        "size_bytes": size_bytes,
        "content_hash": content_hash,
    }


def _shard(rec: str, shard: PairExtent) -> dict[str, Any]:
    return {
        "rec": rec,
        "count": shard.count,
        **asdict(shard.rec),
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


def _nothing_packed(config: PackConfig, tally: Tally) -> RwkvClipError:
    shown = ", ".join(printable(source) for source in config.sources)
    if not tally.rejects:
        return RwkvClipError(f"nothing to pack: no image in {shown}", "rwkvclip pack --help")
    counts = ", ".join(f"{reason} {count:,}" for reason, count in tally.reasons.most_common())
    return RwkvClipError(
        f"nothing could be packed: {counted(tally.rejects, 'input')} of {shown}, every one rejected ({counts}):",
        "rwkvclip pack --help",
        details=[f"  {printable(message)}" for message in tally.messages],
    )


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
