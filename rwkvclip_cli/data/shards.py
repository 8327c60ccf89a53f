"""The .rec files that a packed set consists of: one OUT.rec, or the numbered shards that OUT.manifest.json lists.

>>> [shard.rec.name for shard in locate("out.rec").shards]
['out-00000.rec', 'out-00001.rec']

A set is named as `out.rec` (which a set of shards has not), `out.manifest.json` or a pattern such as `out-*.rec`. The
name of one shard means that shard alone. Nothing here opens a .rec, and nothing raises for a damaged manifest.
"""

import glob
import hashlib
import json
import os
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rwkvclip_cli.config import MAX_NAME_BYTES
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.documents import parse_json

FORMAT_VERSION = 1
# The files of a set by part, the .rec last.
SUFFIXES = {
    "idx": ".idx",
    "manifest": ".manifest.json",
    "rejects": ".rejects.jsonl",
    "sources": ".sources.tsv",
    "rec": ".rec",
}
MANIFEST_SUFFIX = SUFFIXES["manifest"]
MAX_MANIFEST_BYTES = 1 << 26
# Numbered files: OUT-00000.rec and on, with more digits where there are more.
SHARD_DIGITS = 5
_SHARD = re.compile(rf"(?s:(.+))-([0-9]{{{SHARD_DIGITS},}})\.(?:rec|idx)")
OWN_HASH = "manifest"  # of a manifest's hashes, the one of itself
# What the manifest says of all shards together, which is not true of one.
OF_ALL_SHARDS = ("shards", "sources", "statistics", "rejects", "hashes")


@dataclass(frozen=True)
class Shard:
    """One .rec of a set and what the manifest says of it, None where it says nothing.

    first: number, in the whole pack, of its first record: the id in that record's header. content_hash: SHA-256.
    """

    rec: Path
    first: int | None = None
    count: int | None = None
    size_bytes: Any = None
    content_hash: Any = None

    @property
    def idx(self) -> Path:
        """Its index."""
        return self.rec.with_suffix(".idx")


@dataclass(frozen=True)
class SetFiles:
    """Where a set lies. name: by which `locate` finds it again. rec: OUT.rec, beside which manifest and reports lie.

    manifest: {} without a readable one, and `fault` then says what is wrong with it. is_part: whether this is one shard
    of several, so that the manifest, but for what it says of that one, and the reports are of more than this.
    """

    name: Path
    rec: Path
    shards: tuple[Shard, ...]
    manifest: dict[str, Any]
    fault: str = ""
    is_part: bool = False

    @property
    def first_number(self) -> int:
        """The number, in the whole pack, of the first record: what `ordinals` of this set count from."""
        return self.shards[0].first or 0

    @property
    def manifest_path(self) -> Path:
        """OUT.manifest.json."""
        return beside(self.rec, "manifest")

    def check_there(self) -> None:
        """Raise UsageError where there is no such set, RwkvClipError where a .rec of it is missing or no file."""
        for shard in self.shards:
            if shard.rec.is_file():
                continue
            if shard.rec.exists():
                raise RwkvClipError(f"{shard.rec} is no regular file; records are read by their place in it")
            if self.shown(shard.rec) is None:
                raise UsageError(f"{shard.rec}: no such file", hint=f"rwkvclip pack SOURCE... {shard.rec}")
            raise RwkvClipError(
                f"{shard.rec}: no such file, but {self.manifest_path.name} lists it",
                hint=f"copy it again, or save the rest: rwkvclip inspect {self.name} --salvage OUT.rec",
            )

    def shown(self, rec: Path) -> str | None:
        """The name of one of the .rec files where the user has not named that very one."""
        return None if rec == self.name else rec.name


def beside(rec: Path, part: str) -> Path:
    """The path of a part (a key of SUFFIXES) of the set OUT.rec."""
    return rec.with_name(rec.name.removesuffix(".rec") + SUFFIXES[part])


def shard_names(rec: Path, number: int) -> tuple[str, str]:
    """The names of the .rec and .idx of that number of the set OUT.rec.

    >>> shard_names(Path("out.rec"), 7)
    ('out-00007.rec', 'out-00007.idx')
    """
    stem = f"{rec.name.removesuffix('.rec')}-{number:0{SHARD_DIGITS}d}"
    return f"{stem}.rec", f"{stem}.idx"


def set_of_shard(name: str) -> str:
    """OUT, where a file is called as a shard of OUT.rec, or its index, is; else ""."""
    match = _SHARD.fullmatch(name)
    return match[1] if match else ""


def locate(name: str | Path) -> SetFiles:
    """The files of the set that a user names; shards that the manifest lists are among them, there or not.

    Raises UsageError where there is nothing of that name, or where it could mean one thing or another.
    """
    path = Path(name)
    if not os.path.lexists(path) and glob.has_magic(str(path)):
        return _matching(path)
    if path.name.endswith(MANIFEST_SUFFIX):
        if not path.is_file():
            raise UsageError(f"{path}: no such file", hint=f"ls {path.parent}")
        return _named(path.with_name(path.name.removesuffix(MANIFEST_SUFFIX) + ".rec"))
    if path.suffix != ".rec":
        likely = (f"{os.path.splitext(path)[0]}.rec", f"{path}.rec")
        near = next((rec for rec in likely if os.path.lexists(rec)), None)
        raise UsageError(f"{path}: not a packed .rec file", hint=near or f"rwkvclip pack {path} data.rec")
    return _named(path)


def _named(rec: Path) -> SetFiles:
    """The set whose records are in `rec`, or in the shards of that name."""
    manifest, fault = read_manifest(beside(rec, "manifest"))
    listed = _listed(rec, manifest)
    if os.path.lexists(rec):
        if listed:
            raise UsageError(
                f"{rec} is there, but {rec.stem}{MANIFEST_SUFFIX} lists {len(listed):,} shards: two packs of one name",
                hint=f"remove the one that is old; or name one shard, such as {listed[0].rec}",
            )
        if not (manifest or fault) and (whole := _set_of(rec)) is not None:
            return _part(rec, whole)
        # An empty manifest promises nothing.
        promised = (manifest.get("count"), manifest.get("size_bytes"), manifest.get("content_hash"))
        return SetFiles(rec, rec, (Shard(rec, 0, *promised),), manifest, fault)
    if not listed and not manifest:
        listed = tuple(map(Shard, _numbered(rec)))
    if not listed:
        raise UsageError(f"{rec}: no such file", hint=f"rwkvclip pack SOURCE... {rec}")
    return SetFiles(rec, rec, listed, manifest, fault)


def _matching(pattern: Path) -> SetFiles:
    """The set whose shards are what matches a pattern."""
    found = sorted((Path(path) for path in glob.glob(str(pattern)) if path.endswith(".rec")), key=_number)
    if not found:
        raise UsageError(f"{pattern}: no .rec file matches", hint=f"ls {pattern.parent}")
    first = locate(found[0])
    if len(found) == 1:
        return first
    if first.is_part:
        whole = locate(first.rec)
        listed = {shard.rec for shard in whole.shards}
        if listed > set(found):
            raise UsageError(
                f"{pattern} matches {len(found):,} of the {len(listed):,} shards of {whole.rec}; an epoch would lack "
                "the others",
                hint=f"{whole.rec} for all of them, or the name of a single one",
            )
        if listed == set(found):
            return whole
    origins = {path.with_name(_stem(path) + ".rec") for path in found} | set(found)
    if any(beside(rec, "manifest").is_file() for rec in origins):
        raise UsageError(
            f"{pattern} matches files of several packs, such as {found[0]} and {found[-1]}",
            hint="the name of one of them",
        )
    return SetFiles(pattern, found[0].with_name(_stem(found[0]) + ".rec"), tuple(map(Shard, found)), {})


def _stem(rec: Path) -> str:
    """The name of OUT where a file is called as its shards are."""
    return set_of_shard(rec.name) or rec.stem


def _number(rec: Path) -> tuple[int, str]:
    """What shards are in the order of: 100000 comes behind 99999."""
    match = _SHARD.fullmatch(rec.name)
    return (int(match[2]) if match else 0, rec.name)


def _set_of(shard: Path) -> SetFiles | None:
    """The set with a manifest that lists this shard, if there is one; one whose manifest is damaged may."""
    rec = shard.with_name(_stem(shard) + ".rec")
    if rec == shard or not beside(rec, "manifest").is_file():
        return None
    manifest, fault = read_manifest(beside(rec, "manifest"))
    listed = _listed(rec, manifest)
    if fault or any(each.rec == shard for each in listed):
        return SetFiles(rec, rec, listed or (Shard(shard),), manifest, fault)
    return None


def _part(rec: Path, whole: SetFiles) -> SetFiles:
    """One shard of a set, as a set."""
    shard = next(shard for shard in whole.shards if shard.rec == rec)
    manifest = {key: value for key, value in whole.manifest.items() if key not in OF_ALL_SHARDS}
    if manifest:
        manifest |= {"count": shard.count, "size_bytes": shard.size_bytes, "content_hash": shard.content_hash}
    return SetFiles(rec, whole.rec, (shard,), manifest, whole.fault, is_part=True)


def _listed(rec: Path, manifest: dict[str, Any]) -> tuple[Shard, ...]:
    """The shards that a manifest lists, numbered."""
    entries = manifest.get("shards", [])
    firsts = accumulate((entry["count"] for entry in entries), initial=0)
    return tuple(
        Shard(rec.with_name(entry["rec"]), first, entry["count"], entry["size_bytes"], entry["content_hash"])
        for first, entry in zip(firsts, entries, strict=False)
    )


def _numbered(rec: Path) -> list[Path]:
    """The shards of a set without a manifest: what is named as they are and is no set of its own."""
    found = [Path(path) for path in glob.glob(f"{glob.escape(str(rec.with_suffix('')))}-*.rec")]
    return sorted(
        (path for path in found if _stem(path) == rec.stem and not beside(path, "manifest").exists()), key=_number
    )


def read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """A manifest and what is wrong with it; ({}, "") where there is none, ({}, fault) where it is damaged."""
    if not os.path.lexists(path):
        return {}, ""
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            document = parse_json(file.read(MAX_MANIFEST_BYTES).decode("utf-8"))
        for name in ("captions", "context_length", "count"):
            _check_count(name, document[name])
        if "shards" in document:
            _check_shards(document)
        if not isinstance(hashes := document.get("hashes", {}), dict):
            raise ValueError(f"hashes is {hashes!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = str(error) if type(error) is ValueError else repr(error)
        return {}, fault[:300]
    return document, ""


def manifest_hash(manifest: dict[str, Any]) -> str:
    """The SHA-256 of what a manifest says, but for its own hash: order and spaces of the file do not matter."""
    hashes = {part: value for part, value in manifest.get("hashes", {}).items() if part != OWN_HASH}
    text = json.dumps({**manifest, "hashes": hashes}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**48:
        raise ValueError(f"{name} is {value!r}")


def _check_shards(document: dict[str, Any]) -> None:
    """Raise ValueError, or what Python raises, for a list of shards that cannot be."""
    names = set[str]()
    for number, entry in enumerate(document["shards"]):
        name = entry["rec"]
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".rec") or name in names:
            raise ValueError(f"shard {number} is called {name!r}")
        if len(os.fsencode(name)) > MAX_NAME_BYTES:
            raise ValueError(f"shard {number} has a name of {len(name):,} letters")
        names.add(name)
        _check_count(f"the count of {name}", entry["count"])
        _check_count(f"the size_bytes of {name}", entry["size_bytes"])
        if not isinstance(entry["content_hash"], str):
            raise ValueError(f"the content_hash of {name} is {entry['content_hash']!r}")
    total = sum(entry["count"] for entry in document["shards"])
    if total != document["count"]:
        raise ValueError(f"count is {document['count']:,}, but its {len(names):,} shards hold {total:,}")
