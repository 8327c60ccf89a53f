"""The modes of `rwkvclip inspect`, as documents, as text and as the command line gives them."""

import dataclasses
import json
import os
import re
from hashlib import sha256
from pathlib import Path

import pytest
from helpers import run_cli, write_packed
from inspect_files import bodies, copy_set, flip_bit, offsets, salvaged, verified
from pack_files import files_of
from typer.testing import CliRunner

from rwkvclip_cli import cli
from rwkvclip_cli.config import InspectConfig, PackConfig
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.data.packing.journal import READING, Journal
from rwkvclip_cli.data.packing.output import SUFFIXES, OutputSet
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.packing.reading import Position
from rwkvclip_cli.data.recordio import Record, RecordReader, RecordWriter, pack_record, unpack_record
from rwkvclip_cli.inspect import inspect_data
from rwkvclip_cli.inspect.scan import RecFile
from rwkvclip_cli.inspect.summary import read_range
from rwkvclip_cli.train.losses import SCORES_BYTES


def test_the_summary_says_what_the_set_holds(packed) -> None:
    report = inspect_data(InspectConfig(data=str(packed)))
    document = report.document
    assert report.exit_code == 0
    assert (document["records"], document["size_bytes"]) == (8, packed.stat().st_size)
    assert (document["captions"], document["context_length"], document["label_width"]) == (3, 77, 231)
    assert document["manifest"]["content_hash"] in report.text
    assert document["missing"] == document["faults"] == []


def test_the_summary_tells_a_rec_of_junk_from_one_of_records(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    rec.write_bytes(bytes(range(1, 256)) * (packed.stat().st_size // 255) + bytes(packed.stat().st_size % 255))
    report = inspect_data(InspectConfig(data=str(rec)))
    assert report.exit_code == 1
    assert [(fault["kind"], fault["record"]) for fault in report.document["faults"]] == [
        ("framing", record) for record in range(8)
    ]
    assert "  fault: record 7 at byte " in report.text
    assert report.text.endswith(f"\ntry: rwkvclip inspect {rec} --verify, which looks at every record")


@pytest.mark.parametrize("parts", [SUFFIXES, ("rec", "idx"), ("rec", "idx", "manifest")], ids=len)
@pytest.mark.parametrize("record", [0, 3, 7])
def test_the_summary_names_the_record_that_is_none(packed, tmp_path, record, parts) -> None:
    rec = copy_set(packed, tmp_path, parts)
    flip_bit(rec, offsets(rec)[record] + 2, 0)
    report = inspect_data(InspectConfig(data=str(rec)))
    (fault,) = report.document["faults"]
    assert (report.exit_code, fault["kind"], fault["record"], fault["offset"]) == (
        1,
        "framing",
        record,
        offsets(rec)[record],
    )


def test_the_summary_looks_at_labels_and_numbers_too(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    flip_bit(rec, offsets(rec)[2] + 8 + 8, 0)  # the id
    flip_bit(rec, offsets(rec)[7] + 8 + 24 + 3, 7)  # the first label
    report = inspect_data(InspectConfig(data=str(rec)))
    assert [(fault["kind"], fault["record"]) for fault in report.document["faults"]] == [("header", 2), ("token", 7)]


def test_the_summary_looks_at_a_bounded_number_of_records(tmp_path, monkeypatch) -> None:
    rec = write_packed(tmp_path / "a.rec", 300)
    seen = []
    read = RecFile.read
    monkeypatch.setattr(RecFile, "read", lambda file, offset: seen.append(offset) or read(file, offset))
    assert inspect_data(InspectConfig(data=str(rec))).exit_code == 0
    assert len(seen) == 48
    assert (seen[0], seen[-1]) == (offsets(rec)[0], offsets(rec)[-1])


def test_the_summary_of_a_bare_rec(packed, tmp_path) -> None:
    report = inspect_data(InspectConfig(data=str(copy_set(packed, tmp_path, ("rec",)))))
    assert (report.document["records"], report.document["label_width"]) == (8, 231)
    assert "missing: pairs.idx, pairs.manifest.json, pairs.rejects.jsonl, pairs.sources.tsv" in report.text


def test_an_empty_index_is_told_and_records_are_found_without_it(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    rec.with_suffix(".idx").write_text("")
    report = inspect_data(InspectConfig(data=str(rec)))
    assert report.exit_code == 1
    assert "index-missing: pairs.idx lists no record" in report.text
    assert inspect_data(InspectConfig(data=str(rec), records="3")).document["records"][0]["record"] == 3
    assert verified(rec, None).log.counts["index-missing"] == 8


def test_records_are_shown_with_captions_image_and_source(packed) -> None:
    report = inspect_data(InspectConfig(data=str(packed), records="2:4"))
    two, three = report.document["records"]
    assert (two["record"], three["record"]) == (2, 3)
    assert two["offset"] == offsets(packed)[2]
    assert two["captions"] == ["picture 2"] * 3
    assert (two["format"], two["width"], two["height"], two["kept"]) == ("JPEG", 48, 32, "kept")
    assert two["source"].endswith("imgs/002.jpg")
    assert "  0: picture 3" in report.text


@pytest.mark.parametrize(
    ("text", "found"),
    [("0:5", range(5)), ("3", range(3, 4)), ("-1", range(9, 10)), ("-2:", range(8, 10)), (":2", range(2)), ("4:2", [])],
)
def test_ranges(text, found) -> None:
    assert list(read_range(text, 10)) == list(found)


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "10", "-11", "1-2"])
def test_what_is_no_range(text) -> None:
    with pytest.raises(UsageError, match="--records"):
        read_range(text, 10)


def test_a_damaged_record_is_shown_as_such_among_the_others(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    flip_bit(rec, offsets(packed)[1], 0)
    report = inspect_data(InspectConfig(data=str(rec), records=":"))
    assert report.exit_code == 1
    assert ["fault" in entry for entry in report.document["records"]] == [False, True] + [False] * 6


def test_what_is_exported_packs_to_the_same_bytes(packed, tmp_path) -> None:
    folder = tmp_path / "folder"
    report = inspect_data(InspectConfig(data=str(packed), export=str(folder)))
    assert (report.document["count"], report.document["changed"]) == (8, 0)
    pack(PackConfig(sources=(str(folder),), out=str(tmp_path / "again.rec"), workers=1))
    again = files_of(tmp_path / "again.rec")
    before = files_of(packed)
    assert (again["rec"], again["idx"]) == (before["rec"], before["idx"])
    sidecar = json.loads((folder / "00000" / "00000002.json").read_text())
    assert sidecar["captions"] == ["picture 2"] * 3
    assert sidecar["source"].endswith("002.jpg")


def test_a_part_is_exported(packed, tmp_path) -> None:
    inspect_data(InspectConfig(data=str(packed), export=str(tmp_path / "folder"), records="6:"))
    names = sorted(path.name for path in (tmp_path / "folder" / "00000").iterdir())
    assert names == ["00000006.jpg", "00000006.json", "00000007.jpg", "00000007.json"]


def test_export_counts_captions_that_change(packed, tmp_path) -> None:
    """Token 49406 within a caption and a half word have no text that gives them again."""
    rec = tmp_path / "odd.rec"
    with RecordReader(packed) as reader, RecordWriter(rec) as writer:
        record = unpack_record(reader[0])
        labels = list(record.labels)
        labels[1:3] = [1, 49407]  # '"' that no word follows, without the mark of a word's end
        writer.write(pack_record(Record(labels, record.image, 0)))
    assert inspect_data(InspectConfig(data=str(rec), export=str(tmp_path / "folder"))).document["changed"] == 1


def test_export_shows_nothing_of_a_damaged_set(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    flip_bit(rec, offsets(packed)[5], 0)
    with pytest.raises(RwkvClipError, match="record 5 at byte") as error:
        inspect_data(InspectConfig(data=str(rec), export=str(tmp_path / "folder")))
    assert error.value.hint == f"rwkvclip inspect {rec} --verify"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_export_writes_no_bytes_that_were_not_packed(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    flip_bit(rec, offsets(packed)[6] - 40, 0)  # within the image of record 5, whose frame is whole
    with pytest.raises(RwkvClipError, match=r"record 5 at byte .* is damaged: its captions or image") as error:
        inspect_data(InspectConfig(data=str(rec), export=str(tmp_path / "folder")))
    assert error.value.hint == f"rwkvclip inspect {rec} --verify"
    assert (
        inspect_data(InspectConfig(data=str(rec), export=str(tmp_path / "some"), records="0:5")).document["count"] == 5
    )


def test_export_leaves_a_full_folder_alone(packed, tmp_path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="exists and is no empty folder"):
        inspect_data(InspectConfig(data=str(packed), export=str(tmp_path)))


def test_salvage_refuses_to_write_over_its_source(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    for out in (str(rec), str(packed)):
        with pytest.raises(UsageError, match=r"that is the damaged file itself|exists already"):
            inspect_data(InspectConfig(data=str(rec), salvage=out, proof="none"))
    assert files_of(rec) == files_of(packed)


def test_hints_name_what_this_command_can_do(packed, tmp_path, capsys) -> None:
    rec = copy_set(packed, tmp_path)
    with pytest.raises(UsageError, match="exists already") as error:
        inspect_data(InspectConfig(data=str(packed), salvage=str(rec), proof="none"))
    assert error.value.hint == "another name"
    with pytest.raises(UsageError, match="do not fill one global batch") as error:
        inspect_data(InspectConfig(data=str(rec), plan=True, world_size=5000))
    assert "ranks" in str(error.value.hint)
    for name in ("pairs", "pairs.idx"):
        with pytest.raises(UsageError, match="not a packed") as error:
            inspect_data(InspectConfig(data=str(tmp_path / name)))
        assert error.value.hint == str(rec)
    with pytest.raises(UsageError, match=r"^--verify and --plan exclude each other$"):
        InspectConfig(data=str(rec), verify=True, plan=True)
    capsys.readouterr()
    inspect_data(InspectConfig(data=str(rec), world_size=3))
    assert "warning: --world-size: for --plan alone" in capsys.readouterr().err
    rec.write_bytes(rec.read_bytes()[:-50])
    report = inspect_data(InspectConfig(data=str(rec), verify=True, proof="none"))
    assert f"try: rwkvclip inspect {rec} --salvage SAVED.rec" in report.text


@pytest.mark.parametrize("parts", [("rec",), ("rec", "idx", "sources")], ids=" ".join)
def test_a_set_without_manifest_is_salvaged_whole(packed, tmp_path, prove, parts) -> None:
    rec = copy_set(packed, tmp_path, parts)
    if "idx" in parts:
        rec.with_suffix(".idx").write_text("".join(f"{key}\t{at + 4}\n" for key, at in enumerate(offsets(packed))))
    assert (salvaged(rec, prove, tmp_path / "saved.rec").kept, bodies(tmp_path / "saved.rec")) == (8, bodies(packed))
    assert verified(tmp_path / "saved.rec", prove).is_sound
    assert open_packed(tmp_path / "saved.rec").count == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pairs.manifest.json", b"{"),
        ("pairs.manifest.json", b"[]"),
        ("pairs.manifest.json", b"\xff\xfe"),
        ("pairs.manifest.json", b"[" * 100_000),
        ("pairs.manifest.json", b'{"captions": 3, "context_length": 77, "count": "8"}'),
        ("pairs.manifest.json", b'{"captions": -3, "context_length": 77, "count": 8}'),
        ("pairs.manifest.json", b'{"captions": 3, "context_length": 77, "count": 8, "hashes": []}'),
        ("pairs.sources.tsv", b"0\tonly\n"),
        ("pairs.sources.tsv", b"\0" * 200_000),
        ("pairs.sources.tsv", b""),
    ],
)
def test_other_files_that_are_damaged_are_named(packed, tmp_path, name, text) -> None:
    rec = copy_set(packed, tmp_path)
    (tmp_path / name).write_bytes(text)
    verdict = verified(rec, None)
    assert list(verdict.log.counts) == ["manifest" if "manifest" in name else "sources"]
    assert verdict.sound == 8
    inspect_data(InspectConfig(data=str(rec)))


CHANGES = {
    "another source": ("sources", lambda text: text.replace(b"/003.jpg", b"/004.jpg")),
    "another way it was kept": ("sources", lambda text: text.replace(b"\tkept\t", b"\tKEPT\t", 1)),
    "other line ends": ("sources", lambda text: text.replace(b"\n", b"\r\n")),
    "a reject more": ("rejects", lambda text: text + b'{"source": "x", "reason": "empty-file", "message": "x"}\n'),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_list_that_was_changed_is_told(packed, tmp_path, name) -> None:
    part, change = CHANGES[name]
    rec = copy_set(packed, tmp_path)
    path = rec.with_suffix(SUFFIXES[part])
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    report = inspect_data(InspectConfig(data=str(rec), verify=True, proof="none"))
    assert report.exit_code == 1
    (fault,) = report.document["faults"]
    assert (fault["kind"], fault["message"][:-64]) == (
        part,
        f"{path.name}: SHA-256 {sha256(path.read_bytes()).hexdigest()}, packed with ",
    )
    assert fault["message"].endswith(sha256(before).hexdigest())


@pytest.mark.parametrize("part", ["rejects", "sources"])
@pytest.mark.parametrize(("is_folder", "said"), [(False, "is not there"), (True, "is no regular file")])
def test_a_list_that_the_manifest_has_a_hash_of_is_missed(packed, tmp_path, part, is_folder, said) -> None:
    rec = copy_set(packed, tmp_path, [name for name in SUFFIXES if name != part])
    if is_folder:
        (tmp_path / f"pairs{SUFFIXES[part]}").mkdir()
    report = inspect_data(InspectConfig(data=str(rec), verify=True, proof="none"))
    assert report.exit_code == 1
    (fault,) = report.document["faults"]
    assert fault["kind"] == part
    assert fault["message"].startswith(f"pairs{SUFFIXES[part]} {said}")
    assert part not in report.document["lists_checked"]


def test_one_shard_alone_needs_no_list_of_all(packed, tmp_path) -> None:
    config = PackConfig(sources=(str(packed.parent / "imgs"),), out=str(tmp_path / "o.rec"), workers=1, proof="none")
    pack(dataclasses.replace(config, shard_size=5))
    (tmp_path / "o.rejects.jsonl").unlink()
    assert verified(tmp_path / "o-00001.rec", None).is_sound
    assert [fault.kind for fault in verified(tmp_path / "o.rec", None).log.first] == ["rejects"]


def test_a_manifest_without_hashes_of_the_lists_is_one_of_an_older_version(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    path = rec.with_suffix(SUFFIXES["manifest"])
    manifest = json.loads(path.read_text())
    for has_hashes in (True, False):
        report = inspect_data(InspectConfig(data=str(rec), verify=True, proof="none"))
        assert (report.exit_code, report.document["faults"]) == (0, [])
        assert report.document["lists_checked"] == (["rejects", "sources"] if has_hashes else [])
        assert ("rejects and sources compared with their hashes" in report.text) is has_hashes
        manifest.pop("hashes", None)
        path.write_text(json.dumps(manifest))


def test_a_salvaged_set_has_hashes_of_its_own_lists(packed, tmp_path) -> None:
    damaged = copy_set(packed, tmp_path)
    flip_bit(damaged, offsets(packed)[3] + 2, 0)
    salvaged(damaged, None, tmp_path / "saved.rec")
    verdict = verified(tmp_path / "saved.rec", None)
    assert (verdict.is_sound, verdict.lists_hashed) == (True, ("rejects", "sources"))


def test_labels_that_are_no_tokens(tmp_path) -> None:
    rec = write_packed(tmp_path / "a.rec", 5)
    for record, value in enumerate((1.5, -1.0, 49408.0, float("nan"), float("inf"))):
        with RecordReader(rec) as reader:
            payloads = list(reader)
        odd = unpack_record(payloads[record])
        labels = list(odd.labels)
        labels[17] = value
        payloads[record] = pack_record(Record(labels, odd.image, record))
        with RecordWriter(rec) as writer:
            for payload in payloads:
                writer.write(payload)
    log = verified(rec, None).log
    assert [(fault.kind, fault.record) for fault in log.first] == [("token", record) for record in range(5)]
    assert log.first[0].message == "caption 1, position 1: 1.5 is no token id (0 to 49,407)"


def test_images_that_would_not_train_are_named(packed, tmp_path, prove) -> None:
    with RecordReader(packed) as reader:
        record = unpack_record(reader[0])
    rec = tmp_path / "a.rec"
    png = (Path(__file__).parent.parent / "data/packing/weird_images/paletted-transparent.png").read_bytes()
    # Adobe's mark of red, green and blue.
    rgb = b"\xff\xd8\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00" + record.image[2:]
    images = (record.image, record.image[:-40], b"", png, b"\xff\xd8\xff\xd9", rgb)
    with RecordWriter(rec) as writer:
        for number, image in enumerate(images):
            writer.write(pack_record(Record(record.labels, image, number)))
    log = verified(rec, prove).log
    assert [(fault.kind, fault.record) for fault in log.first] == [("image", number) for number in range(1, 6)]
    assert "another kind than JPEG" in log.first[2].message
    assert "a JPEG that stores red, green and blue" in log.first[4].message


def plan_of(rec: Path, **options: object) -> dict:
    return inspect_data(InspectConfig(data=str(rec), plan=True, **options)).document


def test_the_plan_by_hand(tmp_path) -> None:
    """11 records, 2 ranks x 2 pairs: 2 steps of 4 an epoch, 3 records left out, from a window that moves by 8."""
    found = plan_of(write_packed(tmp_path / "a.rec", 11), world_size=2, batch_size=2, epochs=3, warmup=0.5, lr=0.3)
    assert (found["steps_per_epoch"], found["total_steps"], found["samples"]) == (2, 6, 24)
    assert found["left_out_per_epoch"] == 3
    assert [epoch["ranges"] for epoch in found["left_out"]] == [[[8, 11]], [[5, 8]], [[2, 5]]]
    assert found["times_seen"] == {"min": 2, "max": 3}
    assert found["warmup_steps"] == 3
    rates = {point["step"]: point["lr"] for point in found["learning_rate"]}
    assert rates == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.3, 4: 0.225, 5: 0.075})
    assert found["loss"] == {
        "rows": 2,
        "columns": 4,
        "chunk_size": None,
        "scores_bytes": 128,
        "full_matrix_bytes": 128,
    }


def test_the_plan_of_a_large_batch_has_chunks_within_their_bound(tmp_path) -> None:
    found = plan_of(write_packed(tmp_path / "a.rec", 20_000, captions=1, context_length=3), batch_size=20_000)
    assert found["loss"]["chunk_size"] == 6656
    assert found["loss"]["scores_bytes"] <= SCORES_BYTES < found["loss"]["full_matrix_bytes"]


def test_the_plan_refuses_what_training_would(tmp_path) -> None:
    with pytest.raises(UsageError, match="do not fill one global batch"):
        plan_of(write_packed(tmp_path / "a.rec", 11))


def test_the_plan_is_as_the_readme_shows(tmp_path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    command = "rwkvclip inspect train.rec --plan --world-size 8 --batch-size 100 --epochs 5"
    shown = re.search(rf"{command}\n```\n\n```text\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    rec = write_packed(tmp_path / "train.rec", 6144, captions=1, context_length=3)
    report = inspect_data(InspectConfig(data=str(rec), plan=True, world_size=8, batch_size=100, epochs=5))
    assert report.text + "\n" == shown[1]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["inspect", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--records", "0:2"],
        ["--verify", "--proof", "none"],
        ["--plan", "--batch-size", "2"],
        ["--rebuild-index"],
        ["--export", "{}/folder"],
        ["--salvage", "{}/saved.rec", "--proof", "none"],
    ],
    ids=lambda arguments: arguments[0] if arguments else "summary",
)
def test_every_mode_prints_one_document(packed, tmp_path, arguments) -> None:
    rec = copy_set(packed, tmp_path)
    given = [argument.format(tmp_path) for argument in arguments]
    code, text = run(str(rec), *given, "--json")
    assert code == 0
    document = json.loads(text)
    assert document["data"] == str(rec)
    assert document["mode"] == (arguments[0].removeprefix("--") if arguments else "summary")


@pytest.mark.parametrize(
    "pair", [("--verify", "--plan"), ("--verify", "--rebuild-index"), ("--plan", "--salvage=x.rec")], ids=" ".join
)
def test_modes_exclude_each_other(packed, pair) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        run(str(packed), *pair)


@pytest.mark.parametrize("name", ["none.rec", "folder", "folder.rec"])
@pytest.mark.parametrize("mode", ["--verify", "--rebuild-index", "--plan", "--records=0"])
def test_what_cannot_be_inspected_is_one_error(tmp_path, name, mode) -> None:
    if name != "none.rec":
        (tmp_path / name).mkdir()
    with pytest.raises(RwkvClipError, match=re.escape(name)):
        run(str(tmp_path / name), mode)


def test_the_command_proves_in_processes_and_ends_with_one_for_faults(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    assert run_cli("inspect", rec, "--verify", "--workers", "1").returncode == 0
    flip_bit(rec, offsets(packed)[4] + 1300, 1)
    done = run_cli("inspect", rec, "--verify", "--workers", "1", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["sound"], document["records"], document["sound_records"]) == (False, 8, 7)
    assert {fault["record"] for fault in document["faults"] if "record" in fault} == {4}
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("part", ["manifest", "sources"])
@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")],
    ids=["folder", "pipe", "link to nothing"],
)
def test_what_stands_in_the_place_of_a_file_is_a_fault(packed, tmp_path, part, make) -> None:
    rec = copy_set(packed, tmp_path, [each for each in SUFFIXES if each != part])
    make(rec.with_name(rec.stem + SUFFIXES[part]))
    verdict = verified(rec, None)
    assert verdict.log.counts[part] == 1
    assert "is no regular file" in str(verdict.log.first[0])


def test_salvage_leaves_an_unfinished_pack_of_that_name_alone(packed, prove, tmp_path):
    out = tmp_path / "o.rec"
    with OutputSet(str(out), overwrite=False) as output:
        output.start()
        output.keep(Journal({}, READING, Position(), [], output.flush(), {"count": 1}))
    with pytest.raises(
        UsageError, match=r"there is an unfinished pack of 1 record and 0 rejects, last written"
    ) as error:
        salvaged(packed, prove, out)
    assert error.value.hint == "another name"
    assert (tmp_path / ".o.rec.partial" / "journal.json").is_file()


def lose_a_shard(folder: Path) -> None:
    (folder / "o-00001.rec").unlink()


def lose_all(folder: Path) -> None:
    for path in folder.glob("o*"):
        path.unlink()


def put_a_folder(folder: Path) -> None:
    (folder / "o-00001.rec").unlink()
    (folder / "o-00001.rec").mkdir()


@pytest.mark.parametrize(("damage", "code"), [(lose_a_shard, 1), (put_a_folder, 1), (lose_all, 2)])
@pytest.mark.parametrize("mode", [[], ["--verify", "--proof", "none"], ["--plan", "--batch-size", "2"]], ids=" ".join)
def test_a_bad_set_ends_every_mode_with_the_same_code(packed, tmp_path, mode, damage, code) -> None:
    source = str(packed.parent / "imgs")
    pack(PackConfig(sources=(source,), out=str(tmp_path / "o.rec"), workers=1, proof="none", shard_size=5))
    damage(tmp_path)
    done = run_cli("inspect", tmp_path / "o.rec", *mode)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_one_of_a_thing_is_said_as_one(tmp_path) -> None:
    rec = write_packed(tmp_path / "a.rec", 1)
    assert inspect_data(InspectConfig(data=str(rec))).text.startswith(f"{rec}: 1 record, ")
    (tmp_path / "a.idx").write_text("7\t0\n8\t0\n")
    assert "\n1 fault, " in inspect_data(InspectConfig(data=str(rec), verify=True, proof="none")).text
    rec.with_suffix(".idx").write_text("0\t0\n")
    plan = inspect_data(InspectConfig(data=str(rec), plan=True, batch_size=1, epochs=1)).text
    assert plan.startswith("1 record, 1 rank x 1 pair = 1 a step\nsteps: 1 an epoch, 1 in 1 epoch, 1 pair\n")
