"""Opening a packed set: what fits together opens, what does not says what is wrong."""

import json
from pathlib import Path

import pytest
from helpers import write_packed
from shard_files import shard_path, shards_of, split_set

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.data.record_index import read_index
from rwkvclip_cli.data.shards import set_of_shard, shard_names


def test_what_a_packed_set_knows(tmp_path: Path) -> None:
    packed = open_packed(write_packed(tmp_path / "a.rec", 3))
    assert (packed.count, packed.captions, packed.context_length) == (3, 3, 16)
    places = [b"%s at index %d" % (bytes(packed.rec), packed.offsets[record]) for record in (2, 0)]
    assert packed.ordinals(places).tolist() == [2, 0]


def test_a_file_without_manifest_is_taken_as_the_published_layout(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3, context_length=77)
    rec.with_suffix(".manifest.json").unlink()
    assert (open_packed(rec).captions, open_packed(rec).context_length) == (3, 77)


def test_an_epochs_index_holds_the_window_alone_each_range_in_a_file_of_its_own(tmp_path: Path) -> None:
    packed = open_packed(write_packed(tmp_path / "a.rec", 5))
    assert packed.write_index(tmp_path / "part.idx", [(4, 5), (0, 2)]) == [packed.rec, packed.rec]
    found = [int(line.split("\t")[1]) for line in (tmp_path / "part.idx").read_text().splitlines()]
    # The file once more behind itself.
    assert found == [packed.offsets[4], packed.size_bytes + packed.offsets[0], packed.size_bytes + packed.offsets[1]]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.idx", None, "a.idx: no such file"),
        ("a.rec", None, "a.rec: no such file"),
        ("a.idx", "", "the index is empty"),
        ("a.idx", "0\t0\nx\t5\n", "line 2"),
        ("a.idx", "0\t0\n1\t99999999\n", "offset 99,999,999 lies outside"),
        ("a.idx", "0\t0\n", "lists 1 record, a.manifest.json says 3"),
        ("a.manifest.json", "{", "damaged manifest"),
        ("a.manifest.json", "{}", "damaged manifest"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(RwkvClipError, match=message):
        open_packed(rec)


def test_another_suffix_is_not_a_packed_set(tmp_path: Path) -> None:
    with pytest.raises(RwkvClipError, match=r"not a packed \.rec file") as error:
        open_packed(tmp_path)
    assert error.value.hint == f"rwkvclip pack {tmp_path} data.rec"


@pytest.mark.parametrize("name", [".", "/", "..", "a."])
def test_names_without_a_suffix_are_not_a_packed_set(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"not a packed \.rec file"):
        open_packed(name)


def test_labels_of_another_width_are_refused(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3, captions=2, context_length=77)
    rec.with_suffix(".manifest.json").unlink()
    with pytest.raises(
        RwkvClipError, match=r"its first record has 154 label values, not 3 captions of 77 tokens \(231\)"
    ):
        open_packed(rec)


def test_a_manifest_whose_shard_has_a_name_that_no_file_can_have_is_damaged(tmp_path: Path) -> None:
    shard = {"rec": "n" * 300 + ".rec", "count": 3, "size_bytes": 9, "content_hash": ""}
    manifest = {"count": 3, "captions": 3, "context_length": 77, "shards": [shard]}
    (tmp_path / "a.manifest.json").write_text(json.dumps(manifest))
    write_packed(tmp_path / "a-00000.rec", 3, context_length=77)
    with pytest.raises(UsageError, match="no such file"):
        open_packed(tmp_path / "a.rec")


@pytest.mark.parametrize("record", [1, 19])
def test_a_file_in_which_no_records_are_is_refused(tmp_path: Path, record: int) -> None:
    rec = write_packed(tmp_path / "a.rec", 20)
    data = rec.read_bytes()
    at = read_index(rec.with_suffix(".idx"))[record]
    rec.write_bytes(data[:at] + bytes(len(data) - at))
    with pytest.raises(RwkvClipError, match=f"no record at byte {at:,}, where its index has record {record}") as caught:
        open_packed(rec)
    assert caught.value.hint == f"rwkvclip inspect {rec} --verify"


def test_a_shards_last_record_is_looked_at_however_many_shards_there_are(tmp_path: Path) -> None:
    rec = split_set(write_packed(tmp_path / "whole.rec", 120), 3, tmp_path / "a.rec")
    assert open_packed(rec).count == 120
    shard = shard_path(rec, 30)
    at = read_index(shard.with_suffix(".idx"))[2]
    shard.write_bytes(shard.read_bytes()[:at].ljust(shard.stat().st_size, b"\0"))
    with pytest.raises(RwkvClipError, match=rf"a-00030\.rec: no record at byte {at:,}, where its index has record 2"):
        open_packed(rec)


def test_an_index_of_another_file_is_refused(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    rec.with_suffix(".idx").write_text("0\t4\n1\t700\n2\t1400\n")
    with pytest.raises(RwkvClipError, match="no record at byte 4, where its index has the first one"):
        open_packed(rec)


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_an_index_of_any_line_ends(tmp_path: Path, ending: str) -> None:
    rec = write_packed(tmp_path / "a.rec", 4)
    lines = rec.with_suffix(".idx").read_text().splitlines()
    text = "\r\n".join(lines) + "\r\n" if ending == "\r\n" else "\n".join(lines) + ending
    rec.with_suffix(".idx").write_bytes(text.encode())
    assert open_packed(rec).offsets.tolist() == [int(line.split("\t")[1]) for line in lines]


def test_a_file_cut_behind_its_last_offset_is_refused(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    manifest = json.loads(rec.with_suffix(".manifest.json").read_text())
    manifest["size_bytes"] = rec.stat().st_size
    rec.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    assert open_packed(rec).count == 3
    rec.write_bytes(rec.read_bytes()[:-8])
    with pytest.raises(RwkvClipError, match="cut off or replaced"):
        open_packed(rec)


@pytest.mark.parametrize(
    "text", ['{"count": 3, "captions": 3}', '{"count": 3, "captions": 3, "context_length": "x"}', "[]"]
)
def test_a_manifest_that_lacks_a_number_is_damaged(tmp_path: Path, text: str) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    rec.with_suffix(".manifest.json").write_text(text)
    with pytest.raises(RwkvClipError, match="damaged manifest"):
        open_packed(rec)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Ten records in shards of four: out-00000.rec to out-00002.rec."""
    return split_set(write_packed(tmp_path / "a.rec", 10), 4, tmp_path / "out.rec")


@pytest.mark.parametrize("name", ["out.rec", "out-*.rec", "out.manifest.json", "out-0000[0-2].rec"])
def test_every_name_of_a_set_of_shards_means_all_of_them(sharded: Path, name: str) -> None:
    whole, packed = open_packed(sharded.with_name("a.rec")), open_packed(sharded.with_name(name))
    assert packed.rec == sharded
    assert packed.recs == tuple(shards_of(sharded))
    assert len(packed.recs) == 3
    assert (packed.offsets.tolist(), packed.size_bytes) == (whole.offsets.tolist(), whole.size_bytes)
    assert (packed.captions, packed.context_length) == (3, 16)
    assert packed.content_hash == packed.manifest["content_hash"]


@pytest.mark.parametrize("name", ["out-00002.rec", "out-*2.rec"])
def test_the_name_of_one_shard_means_that_one(sharded: Path, name: str) -> None:
    packed = open_packed(sharded.with_name(name))
    # 16 tokens a caption: known from the manifest of all shards alone.
    assert (packed.count, packed.captions, packed.context_length) == (2, 3, 16)
    assert packed.offsets[0] == 0
    listed = json.loads(sharded.with_suffix(".manifest.json").read_text())["shards"][2]
    assert (packed.content_hash, packed.size_bytes) == (listed["content_hash"], listed["size_bytes"])


def test_an_index_over_shards_names_the_files_in_the_order_of_reading(sharded: Path) -> None:
    packed = open_packed(sharded)
    names = [rec.name for rec in packed.write_index(sharded.with_name("part.idx"), [(6, 10), (0, 6)])]
    assert names == ["out-00001.rec", "out-00002.rec", "out-00000.rec", "out-00001.rec"]
    lines = sharded.with_name("part.idx").read_text().splitlines()
    found = [int(line.split("\t")[1]) for line in lines]
    assert len(found) == 10
    assert found[0] == packed.offsets[6] - packed.starts[1]
    # Shards 1, 2, 0 and, once more, 1.
    joined_bytes = packed.size_bytes
    assert found[-1] == joined_bytes + packed.offsets[5] - packed.starts[1]


@pytest.mark.parametrize("stem", ["out", "out-00000", "a-b", "two\nlines", "-"])
def test_the_name_of_a_shard_is_taken_apart_as_it_was_put_together(stem: str) -> None:
    for number in (0, 7, 99_999, 100_000):
        for name in shard_names(Path(f"{stem}.rec"), number):
            assert set_of_shard(name) == stem


@pytest.mark.parametrize(
    "name", ["out.rec", "out-0000.rec", "out-00000.tsv", "-00000.rec", "out-0000x.rec", "out-00000"]
)
def test_other_names_are_no_shards(name: str) -> None:
    assert set_of_shard(name) == ""


def test_shards_without_a_manifest_are_found_by_number(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 12, context_length=77)
    out = split_set(rec, 1, tmp_path / "out.rec")
    out.with_suffix(".manifest.json").unlink()
    for suffix in (".rec", ".idx"):  # 9 comes before 1, though the text "1..." comes before "9..."
        shard_path(out, 10).with_suffix(suffix).rename(tmp_path / f"out-99999{suffix}")
        shard_path(out, 11).with_suffix(suffix).rename(tmp_path / f"out-100000{suffix}")
        write_packed(tmp_path / "out-55555.rec", 1)  # a set of its own, with a manifest
    packed = open_packed(out)
    numbers = [f"{number:05}" for number in range(10)] + ["99999", "100000"]
    assert [rec.name for rec in packed.recs] == [f"out-{number}.rec" for number in numbers]
    assert packed.offsets.tolist() == open_packed(rec).offsets.tolist()
    assert packed.content_hash is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.rec", "none.rec: no such file"),
        ("none.manifest.json", "none.manifest.json: no such file"),
        ("none-*.rec", "no .rec file matches"),
        ("out-0000[01].rec", "matches 2 of the 3 shards of .*out.rec; an epoch would lack the others"),
        ("*.rec", "matches files of several packs"),
        ("out.idx", r"not a packed \.rec file"),
    ],
)
def test_names_that_mean_no_set(sharded: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_packed(sharded.with_name(name))


def test_a_pattern_over_files_without_manifests_is_a_set_in_the_order_of_numbers(tmp_path: Path) -> None:
    out = split_set(write_packed(tmp_path / "a.rec", 4, context_length=77), 1, tmp_path / "out.rec")
    out.with_suffix(".manifest.json").unlink()
    for suffix in (".rec", ".idx"):
        shard_path(out, 3).with_suffix(suffix).rename(tmp_path / f"out-100000{suffix}")
    packed = open_packed(tmp_path / "out-*.rec")
    assert [rec.name for rec in packed.recs] == ["out-00000.rec", "out-00001.rec", "out-00002.rec", "out-100000.rec"]


def test_a_rec_beside_shards_of_its_name_could_mean_either(sharded: Path) -> None:
    sharded.with_name("a.rec").rename(sharded)
    with pytest.raises(UsageError, match=r"lists 3 shards: two packs of one name"):
        open_packed(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard_path(sharded, 1).unlink()
    with pytest.raises(RwkvClipError, match=r"out-00001.rec: no such file, but out.manifest.json lists it"):
        open_packed(sharded)


def test_exchanged_shards_are_named(sharded: Path) -> None:
    one, two = shard_path(sharded, 0), shard_path(sharded, 1)
    for suffix in (".rec", ".idx"):
        paths = [path.with_suffix(suffix) for path in (one, two)]
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)
    manifest = json.loads(sharded.with_suffix(".manifest.json").read_text())
    for entry in manifest["shards"][:2]:  # shards of one size would not differ in it
        entry["size_bytes"] = sharded.with_name(entry["rec"]).stat().st_size
    sharded.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RwkvClipError, match=r"out-00000.rec begins with record 4, where .* has record 0: shards are"):
        open_packed(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rec": "../out-00001.rec"}, "shard 1 is called"),
        ({"rec": "out-00000.rec"}, "shard 1 is called"),
        ({"count": 5}, "count is 10, but its 3 shards hold 11"),
        ({"count": "4"}, "count of out-00001.rec is '4'"),
        ({"content_hash": None}, "content_hash of out-00001.rec is None"),
    ],
)
def test_a_list_of_shards_that_cannot_be_is_a_damaged_manifest(sharded: Path, change: dict, message: str) -> None:
    path = sharded.with_suffix(".manifest.json")
    manifest = json.loads(path.read_text())
    manifest["shards"][1] |= change
    path.write_text(json.dumps(manifest))
    for name in ("out.rec", "out-00001.rec"):
        with pytest.raises(RwkvClipError, match=f"damaged manifest: .*{message}"):
            open_packed(sharded.with_name(name))


def test_a_cut_shard_is_named(sharded: Path) -> None:
    shard = shard_path(sharded, 1)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(RwkvClipError, match=r"out-00001.rec has .* bytes, its manifest says .*: cut off or replaced"):
        open_packed(sharded)
