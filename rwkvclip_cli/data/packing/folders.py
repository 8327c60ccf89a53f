"""Folders as sources: images with caption files of the same stem, or with a table of them, as Hugging Face lays it out.

>>> for item in read_folder("./imgs", SourceOptions()):
...     print(item.source)
"""

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.packing.parquet import SUFFIX, parquet_columns, read_parquet
from rwkvclip_cli.data.packing.samples import Item, Reject, Sample, Sidecar, SourceOptions, sidecar_kind, usual_names
from rwkvclip_cli.data.packing.tables import Columns, read_table, table_columns

# What the table of an image folder is called, and its column of image names: huggingface.co/docs/datasets, "Create an
# image dataset".
METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
METADATA_KEY = "file_name"

# A name in a folder: its path, its stem, whether it is an image, and whether it is a file that counts at all.
_Named = tuple[str, str, bool, bool]


def read_folder(root: str, options: SourceOptions) -> Iterator[Item]:
    """Yield every image below `root` with the caption files of the same stem, sorted by name, folders in their place.

    Every regular file that is neither hidden nor a caption file is an image; links are followed, unless they lead
    back to a folder above. A caption file without an image is a reject.

    Unless the format is "folder", a metadata.jsonl, .csv or .parquet with a column file_name gives the captions of the
    images below its folder, which come in the order of its rows; then come those that it does not list.
    """
    # One iterator for each open level: Python's own recursion would end at a thousand folders.
    levels: list[tuple[tuple[int, int], Iterator[Item | str], tuple[_Listed, ...]]] = []
    pending: str | None = root
    while pending is not None or levels:
        if pending is not None:
            try:
                identity = _identity(pending)
                if all(identity != above for above, _, _ in levels):
                    levels.append((identity, *_list_folder(pending, options, levels[-1][2] if levels else ())))
            except OSError as error:
                yield Reject(pending, "unreadable-folder", f"{pending}: {error.strerror}", is_sample=False)
            pending = None
            continue
        item = next(levels[-1][1], None)
        if item is None:
            levels.pop()
        elif isinstance(item, str):
            pending = item
        else:
            yield item


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _list_folder(
    folder: str, options: SourceOptions, above: tuple["_Listed", ...]
) -> tuple[Iterator[Item | str], tuple["_Listed", ...]]:
    """The items of one folder, and the paths (str) of the folders in it, in the order of their names' bytes.

    Also the tables that list the images below: those `above`, and its own.
    """
    with os.scandir(folder) as scan:
        entries = [entry for entry in scan if not entry.name.startswith(".")]
    entries.sort(key=lambda entry: os.fsencode(entry.name))
    # A real path costs a call for each folder on the way, so the name alone is looked at first.
    names = {os.path.basename(path) for path in options.skip}
    files = [
        entry
        for entry in entries
        if _is_input(entry) and not (entry.name in names and _is_skipped(folder, entry.name, options.skip))
    ]
    table = _metadata_among(folder, [entry.name for entry in files], options)
    if table is None:
        return _unlisted(_pair_files(entries, files, options), above), above
    listed = (*above, _Listed(table))
    rest = _pair_files(entries, [entry for entry in files if entry.path != table], options)
    return _rows_then_rest(listed, rest, options), listed


def _rows_then_rest(
    listed: tuple["_Listed", ...], rest: Iterator[Item | str], options: SourceOptions
) -> Iterator[Item | str]:
    own = listed[-1]
    try:
        _columns(own.table, _with_key(own.table, options))
        for item in read_metadata(own.table, options):
            if isinstance(item, Sample) and isinstance(item.image, str):
                own.add(item.image)
            yield item
    except UsageError as error:
        yield Reject(own.table, "bad-row", error.message, is_sample=False)
    yield from _unlisted(rest, listed)


def _unlisted(items: Iterator[Item | str], tables: tuple["_Listed", ...]) -> Iterator[Item | str]:
    """The items but for the images that a table has listed; where there is one, it should have listed the others."""
    for item in items:
        if tables and isinstance(item, Sample):
            path = str(item.image)
            if any(table.holds(path) for table in tables):
                continue
            if not item.sidecars and not item.captions:
                yield Reject(item.source, "missing-caption", f"{item.source}: {tables[-1].table} does not list it")
                continue
        yield item


class _Listed:
    """The paths that a table lists, 8 bytes each however many they are."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._hashes = array("q")
        self._sorted: Any = None

    def add(self, path: str) -> None:
        self._hashes.append(hash(os.path.normpath(path)))

    def holds(self, path: str) -> bool:
        if self._sorted is None:
            import numpy as np

            self._sorted = np.unique(np.frombuffer(self._hashes, np.int64)) if self._hashes else np.zeros(0, np.int64)
            self._hashes = array("q")
        wanted = hash(os.path.normpath(path))
        at = int(self._sorted.searchsorted(wanted))
        return at < len(self._sorted) and int(self._sorted[at]) == wanted


def read_metadata(table: str, options: SourceOptions) -> Iterator[Item]:
    """Yield the rows of an image folder's table."""
    keyed = _with_key(table, options)
    if table.lower().endswith(SUFFIX):
        return read_parquet(table, keyed)
    return read_table(table, keyed.image_key, keyed.caption_keys)


def metadata_columns(root: str, options: SourceOptions) -> Columns | None:
    """The columns of the folder's metadata table, or of the first of the folders in it; None where there is none.

    Raises UsageError where such a table has no captions.
    """
    for folder in _folders_to_ask(root) if options.format != "folder" else ():
        try:
            names = [name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
        except OSError:
            continue
        table = _metadata_among(folder, names, options)
        if table is not None:
            return _columns(table, _with_key(table, options))
    return None


def check_metadata(root: str, options: SourceOptions) -> Columns:
    """The columns as `metadata_columns`; UsageError where no folder has such a table."""
    columns = metadata_columns(root, options)
    if columns is None:
        names = ", ".join(METADATA_NAMES)
        raise UsageError(
            f"--format imagefolder: no {names} with a column {METADATA_KEY} in {root} or the folders in it",
            "--format folder, where each image has its own caption file",
        )
    return columns


def _folders_to_ask(root: str) -> Iterator[str]:
    yield root
    try:
        with os.scandir(root) as scan:
            folders = [entry.path for entry in scan if not entry.name.startswith(".") and _is_folder(entry)]
    except OSError:  # reading it tells
        return
    yield from sorted(folders, key=os.fsencode)


def _metadata_among(folder: str, names: Iterable[str], options: SourceOptions) -> str | None:
    """The metadata table among a folder's files, if one there has the column of image names."""
    if options.format == "folder":
        return None
    named = {lowered: name for name in names if (lowered := name.lower()) in METADATA_NAMES}
    tables = [os.path.join(folder, named[name]) for name in METADATA_NAMES if name in named]
    return next((table for table in tables if _lists_images(table, options)), None)


def _lists_images(table: str, options: SourceOptions) -> bool:
    try:
        _columns(table, SourceOptions(image_key=_with_key(table, options).image_key, has_tokens=True))
    except UsageError:
        return False
    return True


def _with_key(table: str, options: SourceOptions) -> SourceOptions:
    """The options with the column of image names: the one asked for, or file_name in the case that the table has it."""
    if options.image_key:
        return options
    spelled = METADATA_KEY
    with contextlib.suppress(UsageError):
        names = _columns(table, replace(options, caption_keys=(), has_tokens=True)).image
        spelled = next(iter(usual_names(names, (METADATA_KEY,))), METADATA_KEY)
    return replace(options, image_key=spelled)


def _columns(table: str, options: SourceOptions) -> Columns:
    if table.lower().endswith(SUFFIX):
        return parquet_columns(table, options)
    return table_columns(table, options.image_key, options.caption_keys, not options.has_tokens)


def _pair_files(
    entries: list["os.DirEntry[str]"],
    files: list["os.DirEntry[str]"],
    options: SourceOptions,
) -> Iterator[Item | str]:
    inputs = {entry.name for entry in files}
    named: list[_Named] = []
    sidecars: dict[str, list[Sidecar]] = {}
    images: set[str] = set()
    for entry in entries:
        if entry.name not in inputs:
            named.append((entry.path, "", False, False))
            continue
        stem, suffix = _split(entry.name)
        kind = sidecar_kind(suffix)
        if kind:
            sidecars.setdefault(stem, []).append(Sidecar(kind, entry.path))
        else:
            images.add(stem)
        named.append((entry.path, stem, kind is None, True))
    # The lines of a .txt come before what a .json adds.
    for found in sidecars.values():
        if len(found) > 1:
            found.sort(key=lambda sidecar: sidecar.kind, reverse=True)
    return _pair(named, sidecars, images, options)


def _is_input(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a regular file, or a link that leads to one or nowhere: that is a lost image, not nothing."""
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:  # a link to itself
        return True


def _is_skipped(folder: str, name: str, skip: frozenset[str]) -> bool:
    return os.path.join(os.path.realpath(folder), name) in skip


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _pair(
    named: list[_Named], sidecars: dict[str, list[Sidecar]], images: set[str], options: SourceOptions
) -> Iterator[Item | str]:
    orphans_seen: set[str] = set()
    for path, stem, is_image, is_input in named:
        if not is_input:
            if os.path.isdir(path):
                yield path
        elif is_image:
            yield Sample(path, path, sidecars=tuple(sidecars.get(stem, ())), caption_keys=options.caption_keys)
        elif stem not in images and stem not in orphans_seen:
            orphans_seen.add(stem)
            yield Reject(path, "missing-image", f"{path}: no image of the same stem beside it", is_sample=False)


def _split(name: str) -> tuple[str, str]:
    """Stem and suffix at the last dot; the suffix is empty where there is none."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, suffix) if dot else (name, "")
