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
from rwkvclip_cli.data.packing.samples import Item, Reject, Sample, Sidecar, sidecar_kind


@dataclass(frozen=True)
class SourceOptions:
    """What the generators need to know.

    format: a key of KINDS, or auto. image_key, caption_keys: columns of a table, keys of a JSON sidecar; none means
    the usual ones. skip: absolute real paths that are no inputs, such as the files being written.
    """

    format: str = "auto"
    image_key: str | None = None
    caption_keys: tuple[str, ...] = ()
    skip: frozenset[str] = frozenset()


def _no_check(path: str, options: SourceOptions) -> None:
    """Nothing about the source can be wrong before it is read."""


@dataclass(frozen=True)
class Kind:
    """A kind of source. `read` yields its items in constant memory; `check` raises UsageError before any work."""

    read: Callable[[str, SourceOptions], Iterator[Item]]
    check: Callable[[str, SourceOptions], None] = _no_check


def find_sources(paths: Iterable[str], options: SourceOptions) -> list[tuple[str, str]]:
    """Each source with its kind, a key of KINDS.

    Raises UsageError for a source that is missing, of an unknown kind, or a table without the columns.
    """
    found = [(path, kind_of(path, options)) for path in paths]
    for path, kind in found:
        KINDS[kind].check(path, options)
    return found


def read_sources(found: Iterable[tuple[str, str]], options: SourceOptions) -> Iterator[Item]:
    """Yield the items of all sources, as `find_sources` gives them, in order."""
    return (item for path, kind in found for item in KINDS[kind].read(path, options))


def kind_of(path: str, options: SourceOptions) -> str:
    """The key of KINDS that a source is: the format asked for, or what its suffix says. UsageError where neither."""
    if not os.path.exists(path):
        near = difflib.get_close_matches(os.path.basename(path), _neighbours(path), 1)
        hint = os.path.join(os.path.dirname(path), near[0]) if near else f"ls {os.path.dirname(path) or '.'}"
        raise UsageError(f"{path}: no such folder or file", hint)
    is_folder = os.path.isdir(path)
    if options.format != "auto":
        if options.format == "folder" and not is_folder:
            raise UsageError(f"--format folder: {path} is a file", "--format table, or webdataset")
        if options.format == "table" and is_folder:
            raise UsageError(f"--format table: {path} is a folder", "--format folder")
        return options.format
    if is_folder:
        return "folder"
    for suffix, name in SUFFIXES.items():
        if path.lower().endswith(suffix):
            return name
    known = ", ".join(SUFFIXES)
    raise UsageError(f"{path}: a source is a folder or ends in {known}", f"--format table, or webdataset, for {path}")


def _neighbours(path: str) -> list[str]:
    try:
        return os.listdir(os.path.dirname(path) or ".")
    except OSError:
        return []


def read_folder(root: str, options: SourceOptions) -> Iterator[Item]:
    """Yield every image below `root` with the caption files of the same stem, sorted by name, folders in their place.

    Every regular file that is neither hidden nor a caption file is an image; links are followed, unless they lead
    back to a folder above. A caption file without an image is a reject.
    """
    # One iterator for each open level: Python's own recursion would end at a thousand folders.
    levels: list[tuple[tuple[int, int], Iterator[Item | str]]] = []
    pending: str | None = root
    while pending is not None or levels:
        if pending is not None:
            try:
                identity = _identity(pending)
                if all(identity != above for above, _ in levels):
                    levels.append((identity, _list_folder(pending, options)))
            except OSError as error:
                yield Reject(pending, "unreadable-folder", f"{pending}: {error.strerror}")
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


def _list_folder(folder: str, options: SourceOptions) -> Iterator[Item | str]:
    """The items of one folder, and the paths (str) of the folders in it, in the order of their names' bytes."""
    with os.scandir(folder) as scan:
        entries = [entry for entry in scan if not entry.name.startswith(".")]
    entries.sort(key=lambda entry: os.fsencode(entry.name))
    files = [entry for entry in entries if _is_input(entry) and not _is_skipped(folder, entry.name, options.skip)]
    sidecars: dict[str, list[Sidecar]] = {}
    images: set[str] = set()
    for entry in files:
        stem, suffix = _split(entry.name)
        kind = sidecar_kind(suffix)
        if kind:
            sidecars.setdefault(stem, []).append(Sidecar(kind, entry.path))
        else:
            images.add(stem)
    # The lines of a .txt come before what a .json adds.
    for found in sidecars.values():
        found.sort(key=lambda sidecar: sidecar.kind, reverse=True)
    return _pair(entries, {entry.name for entry in files}, sidecars, images, options)


def _is_input(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a regular file, or a link that leads to one or nowhere: that is a lost image, not nothing."""
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:  # a link to itself
        return True


def _is_skipped(folder: str, name: str, skip: frozenset[str]) -> bool:
    # A real path costs a call for each folder on the way, so the name alone is looked at first.
    if all(os.path.basename(path) != name for path in skip):
        return False
    return os.path.join(os.path.realpath(folder), name) in skip


def _pair(
    entries: list["os.DirEntry[str]"],
    files: set[str],
    sidecars: dict[str, list[Sidecar]],
    images: set[str],
    options: SourceOptions,
) -> Iterator[Item | str]:
    orphans_seen: set[str] = set()
    for entry in entries:
        if entry.name not in files:
            if os.path.isdir(entry.path):
                yield entry.path
            continue
        stem, suffix = _split(entry.name)
        if not sidecar_kind(suffix):
            beside = tuple(sidecars.get(stem, ()))
            yield Sample(entry.path, entry.path, sidecars=beside, caption_keys=options.caption_keys)
        elif stem not in images and stem not in orphans_seen:
            orphans_seen.add(stem)
            yield Reject(entry.path, "missing-image", f"{entry.path}: no image of the same stem beside it")


def _split(name: str) -> tuple[str, str]:
    """Stem and suffix at the last dot; the suffix is empty where there is none."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, suffix) if dot else (name, "")


def _read_table(path: str, options: SourceOptions) -> Iterator[Item]:
    from rwkvclip_cli.data.packing.tables import read_table

    return read_table(path, options.image_key, options.caption_keys)


def _check_table(path: str, options: SourceOptions) -> None:
    from rwkvclip_cli.data.packing.tables import check_table

    check_table(path, options.image_key, options.caption_keys)


def _read_tars(path: str, options: SourceOptions) -> Iterator[Item]:
    from rwkvclip_cli.data.packing.tars import read_tar

    for tar in tars_of(path):
        yield from read_tar(tar, options.image_key, options.caption_keys)


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


TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
KINDS = {
    "folder": Kind(read_folder),
    "table": Kind(_read_table, _check_table),
    "webdataset": Kind(_read_tars, _check_tars),
}
SUFFIXES = {".csv": "table", ".tsv": "table", ".jsonl": "table"} | dict.fromkeys(TAR_SUFFIXES, "webdataset")
