"""The files of a packed data set, written aside and shown together, or not at all.

>>> with OutputSet("out.rec", overwrite=False) as output:
...     output.start()
...     output.rejects.write('{"source": "cat.jpg"}\\n')
...     output.commit(manifest={"count": 1})
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from rwkvclip_cli.config import check_path
from rwkvclip_cli.console import RwkvClipError, UsageError, cannot_write, counted
from rwkvclip_cli.data.packing.growing import Extent, GrowingFile, cannot_continue, check_extent
from rwkvclip_cli.data.packing.journal import JOURNAL, SHUFFLING, Journal, forget_journal, read_journal, write_journal
from rwkvclip_cli.data.packing.switch import Switch, sync_folder, write_synced
from rwkvclip_cli.data.shards import OWN_HASH, SUFFIXES, beside, manifest_hash, set_of_shard, shard_names
from rwkvclip_cli.documents import parse_json

TEXTS = ("rejects", "sources")


class OutputSet:
    """The files of one pack in a hidden folder beside their targets.

    Holds a lock on the target; a second pack into it is refused. A switch that a killed run left half done is brought
    to its end. Leaving it without `commit` removes what was written, unless there is a `journal` to continue from.
    `shard_size`: the records are in numbered files, not in one. `instead`: what to do where files of the set are there
    and are not to be replaced. Raises UsageError for a target that cannot be.
    """

    def __init__(
        self, out: str, overwrite: bool, shard_size: int | None = None, instead: str = "--overwrite replaces it"
    ) -> None:
        self.final = final_paths(out)
        self._out = out
        self._overwrite = overwrite
        self._instead = instead
        self._is_sharded = shard_size is not None
        self._folder = self.final["rec"].parent
        hidden = f".{self.final['rec'].name}"
        self._lock = _Lock(self._folder / f"{hidden}.lock", out)
        self._aside = self._folder / f"{hidden}.partial"
        self._switch = Switch(self._aside, self._folder, self._folder / f"{hidden}.replaced")
        self.partial = {part: self._aside / path.name for part, path in self.final.items()}
        # Where records are before --shuffle copies them to their places.
        self.scratch = self._aside / "unshuffled"
        self._texts: dict[str, GrowingFile] = {}
        self._scratch_sources: Extent | None = None
        self._is_started = False
        try:
            self._switch.settle()
            self.journal = read_journal(self._aside)
            self._is_unreadable = self.journal is None and (self._aside / JOURNAL).exists()
        except OSError as error:
            self._lock.release()
            _refuse(self.final["rec"], error)
        except BaseException:
            self._lock.release()
            raise

    def refuse_unreadable(self) -> None:
        """Raise UsageError where there is something to continue whose journal cannot be read."""
        if self._is_unreadable:
            raise cannot_continue(self._aside / JOURNAL, "it is damaged, or of another release of rwkvclip")

    def refuse_unfinished(self, instead: str) -> None:
        """Raise UsageError, with the hint `instead`, where an unfinished pack lies there and is not to be replaced."""
        if self._overwrite or (self.journal is None and not self._is_unreadable):
            return
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime((self._aside / JOURNAL).stat().st_mtime))
        what = "with a damaged journal, or one of another release"
        if self.journal is not None:
            tally = self.journal.tally
            records, rejects = tally.get("count", 0), sum(tally.get("reasons", {}).values())
            what = f"of {counted(records, 'record')} and {counted(rejects, 'reject')}"
        raise UsageError(f"{self._out}: there is an unfinished pack {what}, last written at {when}", instead)

    def refuse_existing(self) -> None:
        """Raise UsageError where files of a set are there and are not to be replaced, or cannot be."""
        for path in (*self.final.values(), *(self._folder / name for name in self.old_names())):
            if path.is_dir():
                raise UsageError(f"{path}: is a folder; a pack writes a file of that name", "another name")
        _refuse_foreign(self.final["rec"], self._is_sharded)
        for name in self.old_names():
            if not self._overwrite:
                raise UsageError(f"{self._folder / name} exists already", self._instead)

    def old_names(self) -> list[str]:
        """The names of the files of the set that is there: those of one file each, and the numbered ones."""
        names = [path.name for path in self.final.values() if os.path.lexists(path)]
        shards = _listed_shards(self.final["manifest"])
        if self._is_sharded:
            shards |= _numbered_files(self.final["rec"])
        return names + sorted(name for name in shards if os.path.lexists(self._folder / name))

    def is_whole(self, manifest: dict[str, Any]) -> bool:
        """Whether all files of the set that this manifest is of are there, the records with all their bytes."""
        recs = [(self._folder / shard["rec"], shard["size_bytes"]) for shard in manifest.get("shards", [])]
        recs = recs or [(self.final["rec"], manifest["size_bytes"])]
        others = [self.final[part] for part in TEXTS] + [rec.with_suffix(".idx") for rec, _ in recs]
        return all(path.is_file() for path in others) and all(rec.stat().st_size == size for rec, size in recs)

    def start(self, journal: Journal | None = None, *, in_scratch: bool = False) -> None:
        """Make the partial files, or cut those that there are to what `journal` says.

        UsageError where OUT exists, or an unfinished pack of it that `journal` does not continue.

        `in_scratch`: records and sources go to `scratch` first.
        """
        if journal is None:
            self.refuse_unfinished(self._instead)
        self.refuse_existing()
        self._is_started = True
        self.journal = journal
        try:
            if journal is None:
                shutil.rmtree(self._aside, ignore_errors=True)
                self._aside.mkdir()
            if in_scratch:
                self.scratch.mkdir(exist_ok=True)
            for part in TEXTS:
                folder = self.scratch if in_scratch and part == "sources" else self._aside
                self._open_text(part, folder, journal)
            if journal and journal.phase == SHUFFLING:
                path = self.scratch / self.final["sources"].name
                self._scratch_sources = journal.files[self.name_of(path)]
                check_extent(path, self._scratch_sources)
        except OSError as error:
            _refuse(self.final["rec"], error)

    def leave_scratch(self) -> None:
        """Write sources to their place from now on; those in `scratch` are done."""
        self._scratch_sources = self.sources.close()
        self._open_text("sources", self._aside, None)

    def _open_text(self, part: str, folder: Path, journal: Journal | None) -> None:
        path = folder / self.final[part].name
        self._texts[part] = GrowingFile(path, journal.files[self.name_of(path)] if journal else None)

    def name_of(self, path: Path) -> str:
        """What a journal calls one of the partial files."""
        return path.relative_to(self._aside).as_posix()

    def flush(self) -> dict[str, Extent]:
        """Wait until the texts are on the disk; how far each is written."""
        extents = {self.name_of(text.path): text.flush() for text in self._texts.values()}
        if self._scratch_sources:
            extents[self.name_of(self.scratch / self.final["sources"].name)] = self._scratch_sources
        return extents

    @property
    def rejects(self) -> GrowingFile:
        """OUT.rejects.jsonl, to write lines to."""
        return self._texts["rejects"]

    @property
    def sources(self) -> GrowingFile:
        """OUT.sources.tsv, to write lines to."""
        return self._texts["sources"]

    def record_paths(self, number: int) -> tuple[Path, Path]:
        """The partial .rec and .idx of that number; without shards there is only 0."""
        if not self._is_sharded:
            return self.partial["rec"], self.partial["idx"]
        rec, idx = shard_names(self.final["rec"], number)
        return self._aside / rec, self._aside / idx

    def keep(self, journal: Journal) -> None:
        """Have the partial files stay, up to what `journal` says, if this process ends without `commit`."""
        try:
            if self.scratch.is_dir():
                sync_folder(self.scratch)
            write_journal(self._aside, journal)
        except OSError as error:
            _refuse(self._aside, error)
        self.journal = journal

    def forget(self) -> None:
        """Have nothing stay."""
        forget_journal(self._aside)
        self.journal = None

    @property
    def is_kept(self) -> bool:
        """Whether what this process has written can be continued by another."""
        return self._is_started and self.journal is not None

    def commit(self, manifest: dict[str, Any], shards: int = 1) -> None:
        """Write the manifest, put every file on the disk and then in its place; where that fails, the old ones stay.

        The manifest gets `hashes`, the SHA-256 of rejects, sources and itself. `shards`: how many pairs of .rec and
        .idx there are. Raises RwkvClipError too for files that others have made there since `start`.
        """
        try:
            self.refuse_existing()
        except UsageError as error:
            raise RwkvClipError(f"{error.message}; it was made while this pack ran", "move it away") from None
        new = [self.final[part].name for part in ("manifest", *TEXTS)]
        new += [path.name for number in range(shards) for path in self.record_paths(number)]
        try:
            extents = {part: text.close() for part, text in self._texts.items()}
            hashes = {part: extent.content_hash for part, extent in extents.items() if extent}
            manifest = {**manifest, "hashes": hashes}
            hashes[OWN_HASH] = manifest_hash(manifest)
            write_synced(self.partial["manifest"], json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
            self._switch.run(new, self.old_names())
        except OSError as error:
            kept = f"; what it was to replace waits in {self._switch.replaced} for the next pack, which puts it back"
            _refuse(self.final["rec"], error, kept if self._switch.replaced.is_dir() else "")
        self.journal = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for text in self._texts.values():
            text.abandon()
        is_spent = self._is_started or not self._is_unreadable
        if self.journal is None and is_spent and not self._switch.replaced.is_dir():
            shutil.rmtree(self._aside, ignore_errors=True)
        self._lock.release()


def final_paths(out: str) -> dict[str, Path]:
    """The files of a pack into `out`, by part, the .rec last; UsageError where there can be none."""
    rec = Path(out)
    if rec.suffix != ".rec" or not rec.stem:
        raise UsageError(f"{out}: the output's name has to end in .rec", f"{out.rstrip('/')}.rec")
    if not rec.parent.is_dir():
        raise UsageError(f"{out}: no folder {rec.parent}", f"mkdir -p {rec.parent}")
    final = {part: beside(rec, part) for part in SUFFIXES}
    # The files of a pack have longer names than OUT.rec while it runs, and so have shards.
    replaced = rec.with_name(f".{rec.name}.replaced") / final["manifest"].name
    for path in (*final.values(), replaced, rec.with_name(shard_names(rec, 0)[0])):
        check_path(f"{rec.name[:40]}... is too long a name, for a pack also writes", path)
    return final


def _listed_shards(manifest: Path) -> set[str]:
    """The names of the numbered files that a manifest lists, if it lists any; no other names, whatever it holds."""
    try:
        names = {str(shard["rec"]) for shard in parse_json(manifest.read_text("utf-8"))["shards"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    stem = manifest.name.removesuffix(SUFFIXES["manifest"])
    recs = {name for name in names if name.endswith(".rec") and set_of_shard(name) == stem and "/" not in name}
    return recs | {f"{name.removesuffix('.rec')}.idx" for name in recs}


def _numbered_files(rec: Path) -> set[str]:
    """The names of all files in the folder that are numbered as those of the set OUT.rec are."""
    stem = rec.name.removesuffix(".rec")
    return {name for name in os.listdir(rec.parent) if set_of_shard(name) == stem}


def _refuse_foreign(rec: Path, is_sharded: bool) -> None:
    """Refuse to write files that belong to a set of another name, whose other files would stay."""
    stem = set_of_shard(rec.name)
    if stem and rec.name in _listed_shards(rec.with_name(f"{stem}{SUFFIXES['manifest']}")):
        raise UsageError(f"{rec} is a part of {stem}.rec, which was packed with --shard-size", "another name")
    for name in sorted(_numbered_files(rec)) if is_sharded else ():
        if os.path.lexists(manifest := beside(rec.with_name(name).with_suffix(".rec"), "manifest")):
            raise UsageError(f"{rec.with_name(name)} is a set of its own: there is a {manifest.name}", "another name")


class _Lock:
    """Holds OUT for this process, for as long as it lives."""

    def __init__(self, path: Path, out: str) -> None:
        self._path = path
        while True:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                _refuse(path, error)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                raise RwkvClipError(f"{out}: another pack is writing it", "wait for it, or give another name") from None
            except OSError:
                return  # a file system without locks: nothing to hold on to
            # The holder before us may have removed the file between our open and our lock.
            with contextlib.suppress(OSError):
                if os.fstat(self._descriptor).st_ino == os.stat(path).st_ino:
                    return
            os.close(self._descriptor)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)


def _refuse(path: Path, error: OSError, besides: str = "") -> NoReturn:
    raise cannot_write(path, error, path.parent, besides) from error
