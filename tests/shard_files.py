"""A set of shards made from an unsharded one, as `pack --shard-size` defines it.

>>> out = split_set(tmp_path / "pairs.rec", 3, tmp_path / "out.rec")  # out-00000.rec, ..., out.manifest.json
"""

import hashlib
import json
import shutil
from pathlib import Path

from rwkvclip_cli.data.shards import manifest_hash


def split_set(rec: Path, shard_size: int, out: Path) -> Path:
    """Cut a set into shards of `shard_size` records; the name of the new set is returned, which is no file."""
    data = rec.read_bytes()
    starts = [int(line.split("\t")[1]) for line in rec.with_suffix(".idx").read_text().splitlines()] + [len(data)]
    manifest = json.loads(rec.with_suffix(".manifest.json").read_text())
    shards = []
    for number, first in enumerate(range(0, len(starts) - 1, shard_size)):
        end = min(first + shard_size, len(starts) - 1)
        path = shard_path(out, number)
        part = data[starts[first] : starts[end]]
        path.write_bytes(part)
        index = "".join(f"{key}\t{start - starts[first]}\n" for key, start in enumerate(starts[first:end]))
        path.with_suffix(".idx").write_text(index)
        entry = {"rec": path.name, "count": end - first, "size_bytes": len(part)}
        shards.append(entry | {"content_hash": hashlib.sha256(part).hexdigest()})
    totals = {"size_bytes": len(data), "content_hash": hashlib.sha256(data).hexdigest(), "shards": shards}
    manifest |= totals
    if "hashes" in manifest:
        manifest["hashes"]["manifest"] = manifest_hash(manifest)
    out.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    for suffix in (".rejects.jsonl", ".sources.tsv"):
        if rec.with_suffix(suffix).exists():
            shutil.copyfile(rec.with_suffix(suffix), out.with_suffix(suffix))
    return out


def shard_path(out: Path, number: int) -> Path:
    return out.with_name(f"{out.stem}-{number:05}.rec")


def shards_of(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.stem}-*.rec"))
