"""A set of shards is inspected as one: every fault with its shard, record and source, every mode as for one file."""

import json
import shutil
from pathlib import Path

import pytest
from inspect_files import bodies, flip_bit, offsets, salvaged, verified
from pack_files import files_of
from shard_files import shard_path, shards_of, split_set

from rwkvclip_cli.config import InspectConfig, PackConfig
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.inspect import Report, inspect_data


@pytest.fixture
def sharded(packed: Path, tmp_path: Path) -> Path:
    """The eight photographs in shards of three, three and two."""
    return split_set(packed, 3, tmp_path / "out.rec")


def inspected(rec: Path, **options: object) -> Report:
    return inspect_data(InspectConfig(data=str(rec), **options))  # type: ignore[arg-type]


def found(rec: Path, prove=None) -> list[tuple[str, str | None, int | None, str | None]]:
    """(kind, shard, record, end of the source) of each fault."""
    faults = verified(rec, prove).log.first
    return [(fault.kind, fault.shard, fault.record, fault.source and fault.source[-7:]) for fault in faults]


def exchange(one: Path, two: Path, suffixes: tuple[str, ...] = (".rec", ".idx")) -> None:
    for suffix in suffixes:
        aside = one.with_suffix(".aside")
        one.with_suffix(suffix).rename(aside)
        two.with_suffix(suffix).rename(one.with_suffix(suffix))
        aside.rename(two.with_suffix(suffix))


@pytest.mark.parametrize("name", ["out.rec", "out-*.rec", "out.manifest.json", "out-00001.rec"])
def test_a_sound_set_is_sound_under_every_name(sharded, prove, name) -> None:
    verdict = verified(sharded.with_name(name), prove)
    assert (verdict.log.first, verdict.hashed) == ([], True)
    assert verdict.records == verdict.sound == verdict.checksums == (3 if name == "out-00001.rec" else 8)


def test_the_summary_counts_over_all_shards(packed, sharded) -> None:
    report = inspected(sharded)
    assert (report.exit_code, report.document["records"]) == (0, 8)
    assert report.document["size_bytes"] == packed.stat().st_size
    assert [shard["records"] for shard in report.document["shards"]] == [3, 3, 2]
    assert report.document["missing"] == report.document["faults"] == []
    assert "  shards: 3, out-00000.rec to out-00002.rec" in report.text
    assert inspected(shard_path(sharded, 2)).document["records"] == 2
    assert "shards:" not in inspected(shard_path(sharded, 2)).text


@pytest.mark.parametrize("is_alone", [False, True])
def test_the_summary_looks_into_every_shard(sharded, is_alone) -> None:
    rec = shard_path(sharded, 1)
    flip_bit(rec, offsets(rec)[2] + 2, 0)
    (fault,) = inspected(rec if is_alone else sharded).document["faults"]
    assert (fault["kind"], fault["record"], fault.get("shard")) == (
        ("framing", 2, None) if is_alone else ("framing", 5, "out-00001.rec")
    )


def test_the_summary_tells_what_is_missing(sharded) -> None:
    shard_path(sharded, 1).unlink()
    shard_path(sharded, 2).with_suffix(".idx").unlink()
    report = inspected(sharded)
    assert report.exit_code == 1
    assert report.document["missing"] == ["out-00002.idx", "out-00001.rec"]
    assert "out-00001.rec: missing-shard: out-00001.rec is not there" in report.text


def test_records_are_shown_by_their_number_in_all_shards(packed, sharded) -> None:
    entries = inspected(sharded, records="2:7").document["records"]
    assert [(entry["record"], entry["id"], entry["shard"][-9:]) for entry in entries] == [
        (record, record, f"0000{record // 3}.rec") for record in range(2, 7)
    ]
    assert [entry["offset"] for entry in entries] == [
        offsets(packed)[record] - offsets(packed)[record // 3 * 3] for record in range(2, 7)
    ]
    assert [entry["source"][-7:] for entry in entries] == [f"{record:03}.jpg" for record in range(2, 7)]
    assert "out-00001.rec, record 4 at byte" in inspected(sharded, records="4").text


def test_records_of_one_shard_are_numbered_from_its_own_first(sharded) -> None:
    (entry,) = inspected(shard_path(sharded, 1), records="1").document["records"]
    assert (entry["record"], entry["id"], entry["source"][-7:]) == (1, 4, "004.jpg")
    assert "shard" not in entry


def test_records_in_a_missing_shard_are_shown_as_such(sharded) -> None:
    shard_path(sharded, 1).unlink()
    entries = inspected(sharded, records=":").document["records"]
    assert [entry.get("fault") for entry in entries] == [None] * 3 + ["out-00001.rec is not there"] * 3 + [None] * 2


def test_a_turned_bit_is_named_with_shard_record_and_source(sharded, prove) -> None:
    shard = shard_path(sharded, 1)
    flip_bit(shard, offsets(shard)[1] + 500, 2)
    faults = found(sharded, prove)
    assert ("checksum", "out-00001.rec", 4, "004.jpg") in faults
    assert faults[-1] == ("content-hash", "out-00001.rec", None, None)
    assert {fault[1:3] for fault in faults[:-1]} == {("out-00001.rec", 4)}
    assert "out-00001.rec, record 4 at byte" in inspected(sharded, verify=True, proof="none").text
    # The shard alone: its own numbers, and no name but the one that was given.
    assert ("checksum", None, 1, "004.jpg") in found(shard, prove)
    assert found(shard_path(sharded, 2), prove) == []


def test_damage_to_framing_costs_one_record_and_the_next_shard_keeps_its_numbers(packed, sharded, prove) -> None:
    shard = shard_path(sharded, 1)
    flip_bit(shard, offsets(shard)[2], 0)
    faults = found(sharded, prove)
    assert ("framing", "out-00001.rec", 5, "005.jpg") in faults
    assert {record for _, _, record, _ in faults} == {5, None}
    saved = salvaged(sharded, prove, sharded.with_name("saved.rec"))
    assert (saved.kept, saved.before) == (7, 5)
    assert bodies(sharded.with_name("saved.rec")) == bodies(packed)[:5] + bodies(packed)[6:]


@pytest.mark.parametrize("with_index", [True, False])
def test_a_cut_shard_names_what_is_lost_of_it_alone(sharded, prove, with_index) -> None:
    shard = shard_path(sharded, 0)
    with shard.open("r+b") as file:
        file.truncate(offsets(shard)[1] + 100)
    if not with_index:
        shard.with_suffix(".idx").unlink()
    faults = [fault for fault in found(sharded, prove) if fault[2] is not None]
    assert faults == [("cut-off", "out-00000.rec", record, f"{record:03}.jpg") for record in (1, 2)]


def test_a_missing_shard_is_named_with_every_record_and_the_others_are_saved(packed, sharded, prove) -> None:
    shard_path(sharded, 1).unlink()
    faults = found(sharded, prove)
    lost = [("missing-shard", "out-00001.rec", record, f"{record:03}.jpg") for record in (3, 4, 5)]
    assert faults == [*lost, ("manifest", None, None, None)]
    saved = salvaged(sharded, prove, sharded.with_name("saved.rec"))
    assert (saved.kept, saved.before, saved.lost) == (5, 3, {"missing-shard": 3})
    assert bodies(sharded.with_name("saved.rec")) == bodies(packed)[:3] + bodies(packed)[6:]
    rejects = [json.loads(line) for line in sharded.with_name("saved.rejects.jsonl").read_text().splitlines()]
    assert [reject["source"][-7:] for reject in rejects] == ["003.jpg", "004.jpg", "005.jpg"]
    assert verified(sharded.with_name("saved.rec"), prove).is_sound


def test_exchanged_shards_are_named_and_no_record_is_lost(packed, sharded, prove) -> None:
    exchange(shard_path(sharded, 0), shard_path(sharded, 2))
    verdict = verified(sharded, prove)
    assert [str(fault) for fault in verdict.log.first] == [
        "out-00000.rec: misplaced-shard: it holds the records of out-00002.rec",
        "out-00002.rec: misplaced-shard: it holds the records of out-00000.rec",
    ]
    assert verdict.sound == 8
    salvaged(sharded, prove, sharded.with_name("saved.rec"))
    assert files_of(sharded.with_name("saved.rec"))["rec"] == packed.read_bytes()
    assert [entry["id"] for entry in inspected(sharded, records=":").document["records"]] == list(range(8))


def test_records_exchanged_without_their_indexes_are_told_by_these_too(sharded) -> None:
    exchange(shard_path(sharded, 0), shard_path(sharded, 2), (".rec",))
    kinds = {kind for kind, *_ in found(sharded)}
    assert {"misplaced-shard", "index-missing", "cut-off"} <= kinds
    assert "checksum" not in kinds


def test_a_shard_copied_over_another_costs_the_other(sharded) -> None:
    shutil.copyfile(shard_path(sharded, 0), shard_path(sharded, 1))
    faults = found(sharded)
    assert faults[0] == ("misplaced-shard", "out-00001.rec", None, None)
    assert faults[1:4] == [("missing-shard", "out-00001.rec", record, f"{record:03}.jpg") for record in (3, 4, 5)]
    assert verified(sharded, None).sound == 5


def test_a_damaged_number_makes_no_stranger_of_a_shard(sharded) -> None:
    """The first record's id is 3, the second bit of which makes it the first of shard 0 or, with another, of 2."""
    shard = shard_path(sharded, 1)
    for bit in (0, 1):
        flip_bit(shard, 8 + 8, bit)
    assert [fault for fault in found(sharded) if fault[0] != "content-hash"] == [
        ("header", "out-00001.rec", 3, "003.jpg")
    ]


def test_one_record_of_two_makes_no_stranger_of_a_shard_either(sharded) -> None:
    """The first of the last shard's two records is 6; with two of its bits turned it is the first of shard 1."""
    for bit in (0, 2):
        flip_bit(shard_path(sharded, 2), 8 + 8, bit)
    assert [fault for fault in found(sharded) if fault[0] != "content-hash"] == [
        ("header", "out-00002.rec", 6, "006.jpg")
    ]


def test_shards_behind_one_that_lost_records_keep_their_numbers(sharded, prove) -> None:
    """Nothing but the manifest tells how many records the first one had."""
    shard = shard_path(sharded, 0)
    with shard.open("r+b") as file:
        file.truncate(offsets(shard)[1])
    shard.with_suffix(".idx").unlink()
    sharded.with_suffix(".sources.tsv").unlink()
    kinds = [(kind, shard, record) for kind, shard, record, _ in found(sharded, prove)]
    assert kinds == [
        ("index-missing", "out-00000.rec", None),
        ("content-hash", "out-00000.rec", None),
        ("manifest", None, None),
        ("manifest", "out-00000.rec", None),
        ("sources", None, None),
    ]


def test_a_manifest_that_is_damaged_or_missing_leaves_the_shards_to_be_found_by_their_names(sharded, prove) -> None:
    manifest = sharded.with_suffix(".manifest.json")
    manifest.write_text("{")
    assert found(sharded, prove) == [("manifest", None, None, None)]
    manifest.unlink()
    assert found(sharded, prove) == []
    assert verified(sharded, prove).records == 8
    shard_path(sharded, 1).with_suffix(".idx").unlink()
    flip_bit(shard_path(sharded, 1), 2, 0)
    assert ("framing", "out-00001.rec", 3, "003.jpg") in found(sharded, prove)


def test_a_hash_of_all_shards_that_is_wrong_is_told(sharded) -> None:
    path = sharded.with_suffix(".manifest.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"content_hash": "0" * 64}))
    assert [kind for kind, *_ in found(sharded)] == ["content-hash", "manifest"]


def test_a_list_of_sources_of_another_length_is_told(sharded) -> None:
    path = sharded.with_suffix(".sources.tsv")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7]))
    assert found(sharded) == [("sources", None, None, None)]
    assert found(shard_path(sharded, 0)) == []
    assert found(shard_path(sharded, 2)) == [("sources", None, None, None)]


def test_a_changed_list_of_sources_is_told_of_the_set_and_not_of_one_shard(sharded) -> None:
    path = sharded.with_suffix(".sources.tsv")
    path.write_text(path.read_text().replace("/004.jpg", "/005.jpg"))
    assert found(sharded) == [("sources", None, None, None)]
    assert [found(shard) for shard in shards_of(sharded)] == [[], [], []]


def test_indexes_are_rebuilt_byte_for_byte(sharded) -> None:
    wanted = {path: path.with_suffix(".idx").read_bytes() for path in shards_of(sharded)}
    for number, path in enumerate(wanted):
        path.with_suffix(".idx").write_text("0\t0\n" if number else "")
    shard_path(sharded, 2).with_suffix(".idx").unlink()
    report = inspected(sharded, rebuild_index=True)
    assert {path: path.with_suffix(".idx").read_bytes() for path in wanted} == wanted
    assert report.document["records"] == 8
    assert [each["records"] for each in report.document["indexes"]] == [3, 3, 2]


def test_what_cannot_be_rebuilt_is_named_once_the_others_are(sharded) -> None:
    last = shard_path(sharded, 2).with_suffix(".idx")
    wanted = last.read_bytes()
    last.unlink()
    shard_path(sharded, 0).unlink()
    flip_bit(shard_path(sharded, 1), 0, 0)
    with pytest.raises(RwkvClipError, match=r"out-00000.rec: no such file, but the manifest lists it"):
        inspected(sharded, rebuild_index=True)
    assert last.read_bytes() == wanted


def test_what_is_exported_packs_to_the_unsharded_set(packed, sharded, tmp_path) -> None:
    assert inspected(sharded, export=str(tmp_path / "folder")).document["count"] == 8
    pack(PackConfig(sources=(str(tmp_path / "folder"),), out=str(tmp_path / "again.rec"), workers=1))
    assert files_of(tmp_path / "again.rec")["rec"] == packed.read_bytes()
    inspected(shard_path(sharded, 1), export=str(tmp_path / "part"))
    sidecar = json.loads((tmp_path / "part" / "00000" / "00000002.json").read_text())
    assert (sidecar["captions"][0], sidecar["source"][-7:]) == ("picture 5", "005.jpg")


def test_export_of_a_damaged_set_names_the_shard(sharded, tmp_path) -> None:
    flip_bit(shard_path(sharded, 1), 0, 0)
    with pytest.raises(RwkvClipError, match=r"out-00001.rec: record 3 at byte 0 is damaged") as error:
        inspected(sharded, export=str(tmp_path / "folder"))
    assert error.value.hint == f"rwkvclip inspect {sharded} --verify"


def test_salvage_makes_one_file_of_all_shards(packed, sharded, prove, tmp_path) -> None:
    salvaged(sharded, prove, tmp_path / "saved.rec")
    saved, before = files_of(tmp_path / "saved.rec"), files_of(packed)
    assert [saved[part] for part in ("rec", "idx", "sources", "rejects")] == [
        before[part] for part in ("rec", "idx", "sources", "rejects")
    ]
    assert open_packed(tmp_path / "saved.rec").count == 8
    salvaged(shard_path(sharded, 2), prove, tmp_path / "last.rec")
    assert bodies(tmp_path / "last.rec") == bodies(packed)[6:]
    for name in ("out.rec", "out-00001.rec"):
        with pytest.raises(UsageError, match="that is the damaged file itself"):
            salvaged(sharded, prove, tmp_path / name)


def test_the_plan_is_that_of_the_unsharded_set(packed, sharded) -> None:
    plans = [inspected(rec, plan=True, batch_size=3, epochs=2).document for rec in (packed, sharded)]
    assert plans[0] | {"data": ""} == plans[1] | {"data": ""}
