"""Where samples come from: each kind of source is a generator of samples and its entry in KINDS and SUFFIXES.

>>> options = SourceOptions()
>>> for item in read_sources(find_sources(["./imgs", "pairs.csv", "shard-00000.tar"], options), options):
...     print(item.source)
"""

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.packing.folders import check_metadata, metadata_columns, read_folder
from rwkvclip_cli.data.packing.parquet import SUFFIX as PARQUET
from rwkvclip_cli.data.packing.parquet import (
    count_rows,
    is_all_parquet,
    is_parquet,
    parquet_columns,
    parquet_files,
    read_parquet,
)
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, SourceOptions
from rwkvclip_cli.data.packing.tables import Columns, read_table, table_columns


@dataclass(frozen=True)
class Kind:
    """A kind of source. `read` yields its items in constant memory.

    `columns` gives the columns that it reads, if it has any, and raises UsageError before any work where it cannot be
    packed. `count` gives the number of its samples, rejects included, without reading images; None where only reading
    all of it would tell. `parts` gives the files that it consists of, each of them readable by itself. Where the items
    hold images, `read_on` yields those of a file behind the first so many, without reading the images of these.
    `count_inputs`, where names or footers alone tell it, gives the number of its inputs, rejects of all kinds included;
    None where the function that it is given says on the way that this has taken long enough.
    """

    read: Callable[[str, SourceOptions], Iterator[Item]]
    columns: Callable[[str, SourceOptions], Columns | None]
    count: Callable[[str, SourceOptions], int | None]
    parts: Callable[[str], list[str]] = lambda path: [path]
    read_on: Callable[[str, SourceOptions, int], Iterator[Item]] | None = None
    count_inputs: Callable[[str, SourceOptions, Callable[[], bool]], int | None] | None = None


def find_sources(paths: Iterable[str], options: SourceOptions) -> list[tuple[str, str]]:
    """Each source with its kind, a key of KINDS.

    Raises UsageError for a source that is missing, of an unknown kind, or a table without the columns.
    """
    found = [(path, kind_of(path, options)) for path in paths]
    columns_taken(found, options)
    return found


def columns_taken(found: Iterable[tuple[str, str]], options: SourceOptions) -> dict[str, Columns]:
    """The columns that are read of each source that has columns; UsageError as `find_sources`."""
    taken = {path: KINDS[kind].columns(path, options) for path, kind in found}
    return {path: columns for path, columns in taken.items() if columns is not None}


def read_sources(found: Iterable[tuple[str, str]], options: SourceOptions) -> Iterator[Item]:
    """Yield the items of all sources, as `find_sources` gives them, in order."""
    return (item for path, kind in found for item in KINDS[kind].read(path, options))


def count_samples(found: Iterable[tuple[str, str]], options: SourceOptions) -> int | None:
    """The samples of all sources, rejected ones included; None where a source would have to be read for that."""
    total = 0
    for path, kind in found:
        count = KINDS[kind].count(path, options)
        if count is None:
            return None
        total += count
    return total


def count_inputs(
    found: Iterable[tuple[str, str]], options: SourceOptions, enough: Callable[[], bool] = lambda: False
) -> int | None:
    """The inputs of all sources; None where one would have to be read for that, or once `enough()` is true."""
    total = 0
    for path, kind in found:
        counter = KINDS[kind].count_inputs
        count = counter(path, options, enough) if counter else None
        if count is None:
            return None
        total += count
    return total


def kind_of(path: str, options: SourceOptions) -> str:
    """The key of KINDS that a source is: the format asked for, or what its suffix says. UsageError where neither."""
    if not os.path.exists(path):
        near = difflib.get_close_matches(os.path.basename(path), set(_neighbours(path)) - {os.path.basename(path)}, 1)
        hint = os.path.join(os.path.dirname(path), near[0]) if near else f"ls {_folder_above(path)}"
        raise UsageError(f"{path}: no such folder or file", hint)
    is_folder = os.path.isdir(path)
    if not is_folder and not os.path.isfile(path):
        # It is looked at first and then read, and a resumed pack reads it again: a pipe gives its bytes once.
        raise UsageError(f"{path}: not a regular file but a pipe, socket or device", "cat it into a file")
    if options.format != "auto":
        if options.format in ("folder", "imagefolder") and not is_folder:
            raise UsageError(f"--format {options.format}: {path} is a file", "--format table, or webdataset")
        if options.format == "table" and is_folder:
            raise UsageError(f"--format table: {path} is a folder", "--format folder")
        return "parquet" if options.format == "table" and is_parquet(path) else options.format
    if is_folder:
        return "parquet" if is_all_parquet(path) else "folder"
    for suffix, name in SUFFIXES.items():
        if path.lower().endswith(suffix):
            return name
    known = ", ".join(SUFFIXES)
    said = f"{path}: a source is a folder or ends in {known}"
    if path.lower().endswith(".rec"):
        raise UsageError(said, f"rwkvclip inspect {path} --export FOLDER, which can be packed again")
    if path.lower().endswith(PICTURES):
        raise UsageError(said, f"its folder, {_folder_above(path)}")
    raise UsageError(said, f"--format table, or webdataset, for {path}")


def _folder_above(path: str) -> str:
    """The nearest folder above a path that is there."""
    above = os.path.dirname(path)
    while above and not os.path.isdir(above):
        above = os.path.dirname(above)
    return above or "."


def _neighbours(path: str) -> list[str]:
    try:
        return os.listdir(os.path.dirname(path) or ".")
    except OSError:
        return []


def _read_table(path: str, options: SourceOptions) -> Iterator[Item]:
    return read_table(path, options.image_key, options.caption_keys)


def _table_columns(path: str, options: SourceOptions) -> Columns:
    return table_columns(path, options.image_key, options.caption_keys, not options.has_tokens)


def _read_parquets(path: str, options: SourceOptions) -> Iterator[Item]:
    return (item for file in parquet_files(path) for item in read_parquet(file, options))


def _parquet_columns(path: str, options: SourceOptions) -> Columns:
    files = parquet_files(path)
    if not files:
        raise UsageError(f"--format parquet: no {PARQUET} file in {path}", f"ls {path}")
    taken = [parquet_columns(file, options) for file in files]
    return taken[0]


def _count_parquets(path: str, options: SourceOptions, enough: Callable[[], bool] = lambda: False) -> int | None:
    count = 0
    for file in parquet_files(path):
        count += count_rows(file)
        if enough():
            return None
    return count


def _read_tars(path: str, options: SourceOptions) -> Iterator[Item]:
    return (item for tar in tars_of(path) for item in _read_tar(tar, options))


def _read_tar(path: str, options: SourceOptions, behind: int = 0) -> Iterator[Item]:
    from rwkvclip_cli.data.packing.tars import read_tar

    return read_tar(path, options.image_key, options.caption_keys, not options.has_tokens, behind)


def _check_tars(path: str, options: SourceOptions) -> None:
    if not tars_of(path):
        raise UsageError(f"--format webdataset: no .tar file in {path}", f"ls {path}")


def tars_of(path: str) -> list[str]:
    """A tar itself, or the tars of a folder that `--format webdataset` names."""
    if not os.path.isdir(path):
        return [path]
    names = sorted((name for name in os.listdir(path) if not name.startswith(".")), key=os.fsencode)
    tars = [name for name in names if any(name.lower().endswith(suffix) for suffix in TAR_SUFFIXES)]
    return [os.path.join(path, name) for name in tars]


def _count_by(read: Callable[[str, SourceOptions], Iterator[Item]]) -> Callable[[str, SourceOptions], int]:
    """Count by walking the items, where these hold no images."""

    def count(path: str, options: SourceOptions) -> int:
        items = (item for item in read(path, options) if not isinstance(item, Ignored))
        return sum(not isinstance(item, Reject) or item.is_sample for item in items)

    return count


def _count_files(path: str, options: SourceOptions, enough: Callable[[], bool]) -> int | None:
    count = 0
    for item in read_folder(path, options):
        count += not isinstance(item, Ignored)
        if count % 1024 == 0 and enough():
            return None
    return count


PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
KINDS = {
    "folder": Kind(read_folder, metadata_columns, _count_by(read_folder), count_inputs=_count_files),
    "imagefolder": Kind(read_folder, check_metadata, _count_by(read_folder), count_inputs=_count_files),
    "table": Kind(_read_table, _table_columns, _count_by(_read_table)),
    "parquet": Kind(
        _read_parquets, _parquet_columns, _count_parquets, parquet_files, read_parquet, count_inputs=_count_parquets
    ),
    "webdataset": Kind(_read_tars, _check_tars, lambda path, options: None, tars_of, _read_tar),
}
SUFFIXES = {".csv": "table", ".tsv": "table", ".jsonl": "table", PARQUET: "parquet"}
SUFFIXES |= dict.fromkeys(TAR_SUFFIXES, "webdataset")
