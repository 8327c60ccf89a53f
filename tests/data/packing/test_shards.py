"""--shard-size: the same records in numbered files, and sets of several files that replace each other."""

import functools
import hashlib
import json
from pathlib import Path

import pytest
from pack_files import folder_of

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packing.output import SUFFIXES, OutputSet
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.recordio import RecordReader
from rwkvclip_cli.data.shards import manifest_hash

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
BESIDE = ["manifest.json", "rejects.jsonl", "sources.tsv"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folder_of(tmp_path_factory.mktemp("shards") / "imgs", 10)
    (folder / "alone.jpg").write_bytes(b"no caption")
    return folder


def packed(source: Path, out: Path, **options: object) -> dict[str, object]:
    """Pack and return the manifest."""
    pack(PackConfig(sources=(str(source),), out=str(out), proof="none", workers=1, **options))  # type: ignore[arg-type]
    return dict(json.loads(out.with_suffix(".manifest.json").read_text()))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 2}], ids=["plain", "shuffle"])
@pytest.mark.parametrize(("size", "counts"), [(4, [4, 4, 2]), (5, [5, 5]), SLOW(1, [1] * 10), SLOW(99, [10])])
def test_shards_hold_the_bytes_of_the_one_file(tmp_path, source, options, size, counts):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    whole = packed(source, tmp_path / "one" / "o.rec", **options)
    manifest = packed(source, tmp_path / "many" / "o.rec", shard_size=size, **options)
    recs = [f"o-{number:05}.rec" for number in range(len(counts))]
    assert names(tmp_path / "many") == sorted(
        [*recs, *(name.replace(".rec", ".idx") for name in recs), *(f"o.{name}" for name in BESIDE)]
    )
    contents = [(tmp_path / "many" / rec).read_bytes() for rec in recs]
    assert b"".join(contents) == (tmp_path / "one" / "o.rec").read_bytes()
    for name in ("rejects.jsonl", "sources.tsv"):
        assert (tmp_path / "many" / f"o.{name}").read_bytes() == (tmp_path / "one" / f"o.{name}").read_bytes()
    for each in (manifest, whole):
        assert each["hashes"].pop("manifest") == manifest_hash(each)
    assert manifest.pop("shards") == [
        {"rec": rec, "count": count, "size_bytes": len(data), "content_hash": hashlib.sha256(data).hexdigest()}
        for rec, count, data in zip(recs, counts, contents, strict=True)
    ]
    assert "shards" not in whole
    beside = {part: (tmp_path / "many" / f"o{SUFFIXES[part]}").read_bytes() for part in ("rejects", "sources")}
    assert whole["hashes"] == {part: hashlib.sha256(text).hexdigest() for part, text in beside.items()}
    assert manifest["options"].pop("shard_size") == size
    assert manifest == whole
    ordinal = 0
    for rec, count in zip(recs, counts, strict=True):
        with RecordReader(tmp_path / "many" / rec) as reader:
            assert [reader.record(at).id for at in range(len(reader))] == list(range(ordinal, ordinal + count))
        keys = [line.split()[0] for line in (tmp_path / "many" / rec).with_suffix(".idx").read_text().splitlines()]
        assert keys == list(map(str, range(count)))
        ordinal += count


def test_a_set_of_any_number_of_files_replaces_another_only_when_told_to(tmp_path, source):
    out = tmp_path / "o.rec"
    for size in (3, None, 2, 6, None):
        if any(tmp_path.iterdir()):
            before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
            with pytest.raises(UsageError, match=r"o\S*\.\S+ exists already") as fault:
                packed(source, out, shard_size=size)
            assert fault.value.hint == "--overwrite replaces it"
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        packed(source, out, shard_size=size, overwrite=True)
        recs = [f"o-{number:05}.rec" for number in range(-(-10 // size))] if size else ["o.rec"]
        assert names(tmp_path) == sorted(
            [*recs, *(name.replace(".rec", ".idx") for name in recs), *(f"o.{name}" for name in BESIDE)]
        )


def test_shards_that_no_manifest_lists_are_in_the_way_too(tmp_path, source):
    (tmp_path / "o-00007.rec").write_bytes(b"of a set that lost its manifest")
    with pytest.raises(UsageError, match=r"o-00007\.rec exists already"):
        packed(source, tmp_path / "o.rec", shard_size=5)
    packed(source, tmp_path / "o.rec", shard_size=5, overwrite=True)
    assert "o-00007.rec" not in names(tmp_path)


def test_files_of_a_set_of_another_name_stay(tmp_path, source):
    packed(source, tmp_path / "o-00000.rec")
    own = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=r"o-00000\.\S+ is a set of its own: there is a o-00000\.manifest\.json"):
        packed(source, tmp_path / "o.rec", shard_size=5, overwrite=True)
    packed(source, tmp_path / "o.rec")
    packed(source, tmp_path / "o.rec", overwrite=True)
    assert {name: (tmp_path / name).read_bytes() for name in own} == own


def test_a_shard_is_not_packed_over(tmp_path, source):
    packed(source, tmp_path / "o.rec", shard_size=5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=r"o-00001\.rec is a part of o\.rec"):
        packed(source, tmp_path / "o-00001.rec", overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["../o-00000.rec", "elsewhere.rec", "o-1.rec", "x/o-00000.rec", "o-00000.rec\n"])
def test_a_manifest_removes_nothing_but_its_own_shards(tmp_path, source, name):
    out = tmp_path / "here" / "o.rec"
    (tmp_path / "here" / "x").mkdir(parents=True)
    (out.parent / name).write_text("precious")
    out.with_suffix(".manifest.json").write_text(json.dumps({"shards": [{"rec": name}]}))
    packed(source, out, overwrite=True)
    assert (out.parent / name).read_text() == "precious"


def test_shards_in_their_own_source_are_no_inputs(tmp_path):
    folder = folder_of(tmp_path / "imgs", 4)
    first = packed(folder, folder / "o.rec", shard_size=2)
    assert first["rejects"] == 0
    assert packed(folder, folder / "o.rec", shard_size=3, overwrite=True)["rejects"] == 0
    assert packed(folder, folder / "o.rec", overwrite=True)["rejects"] == 0
    assert not [name for name in names(folder) if name.startswith("o-")]


def test_a_set_with_shards_and_one_without_share_their_lock(tmp_path, source):
    with (
        OutputSet(str(tmp_path / "o.rec"), overwrite=False, shard_size=5),
        pytest.raises(RwkvClipError, match="another pack is writing it"),
    ):
        packed(source, tmp_path / "o.rec")
    with (
        OutputSet(str(tmp_path / "o.rec"), overwrite=False),
        pytest.raises(RwkvClipError, match="another pack is writing it"),
    ):
        packed(source, tmp_path / "o.rec", shard_size=5)
