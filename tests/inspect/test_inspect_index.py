"""An index that does not fit its records is told line by line, and made anew from records that are whole."""

from pathlib import Path

import pytest
from inspect_files import copy_set, flip_bit, offsets, verified

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.shards import locate
from rwkvclip_cli.inspect.files import read_beside
from rwkvclip_cli.inspect.index import read_listing, rebuild_indexes


def rebuilt(rec: Path) -> list[tuple[Path, int]]:
    return rebuild_indexes(read_beside(locate(rec)))


def faults_with(packed: Path, folder: Path, text: str | bytes) -> list[tuple[str, int | None, int | None]]:
    """(kind, line, record) of each fault that a verification finds with this index."""
    rec = copy_set(packed, folder)
    rec.with_suffix(".idx").write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(fault.kind, fault.line, fault.record) for fault in verified(rec, None).log.first]


@pytest.fixture
def lines(packed: Path) -> list[str]:
    return packed.with_suffix(".idx").read_text().splitlines(keepends=True)


def test_a_sound_index_has_no_fault(packed, tmp_path, lines) -> None:
    assert faults_with(packed, tmp_path, "".join(lines)) == []


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_line_ends_that_dali_reads_are_no_fault(packed, tmp_path, lines, ending) -> None:
    assert faults_with(packed, tmp_path, ending.join(line.strip() for line in lines)) == []


def test_a_missing_line_is_a_record_that_is_not_listed(packed, tmp_path, lines) -> None:
    assert faults_with(packed, tmp_path, "".join(lines[:3] + lines[4:])) == [("index-missing", None, 3)]


def test_a_line_twice(packed, tmp_path, lines) -> None:
    found = faults_with(packed, tmp_path, "".join([*lines[:3], lines[2], *lines[3:]]))
    assert sorted(found) == [("index-duplicate", 4, None), ("index-duplicate", 4, None)]


def test_shuffled_lines_name_each_descent(packed, tmp_path, lines) -> None:
    found = faults_with(packed, tmp_path, "".join([lines[1], lines[0], *lines[2:]]))
    assert sorted(found) == [("index-order", 2, None), ("index-order", 2, None)]


def test_keys_of_other_records(packed, tmp_path, lines) -> None:
    keys = [line.split("\t")[0] for line in lines]
    keys[4], keys[5] = keys[5], keys[4]
    text = "".join(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets(packed), strict=True))
    assert faults_with(packed, tmp_path, text) == [("index-order", 6, None)]


@pytest.mark.parametrize(
    ("keys", "wrong"), [(range(1, 9), range(1, 9)), ([0, 1, 2, 5, 6, 7, 8, 9], range(4, 9)), (range(8), ())], ids=str
)
def test_rising_keys_that_are_no_numbers_of_records(packed, tmp_path, keys, wrong) -> None:
    text = "".join(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets(packed), strict=True))
    assert faults_with(packed, tmp_path, text) == [("index-key", line, None) for line in wrong]
    rec = tmp_path / packed.name
    assert open_packed(rec).offsets.tolist() == offsets(packed), "training goes by the offsets alone"
    rebuilt(rec)
    assert verified(rec, None).is_sound


def test_keys_of_a_set_that_others_wrote_are_theirs(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path, ("rec",))
    text = "".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets(packed), 1000))
    rec.with_suffix(".idx").write_text(text)
    assert verified(rec, None).is_sound


def test_keys_begin_anew_in_every_shard(packed, tmp_path) -> None:
    source = str(packed.parent / "imgs")
    pack(PackConfig(sources=(source,), out=str(tmp_path / "o.rec"), workers=1, proof="none", shard_size=5))
    index = tmp_path / "o-00001.idx"
    index.write_text("".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets(index), 5)))
    for name in ("o.rec", "o-00001.rec"):
        log = verified(tmp_path / name, None).log
        assert [(fault.kind, fault.line) for fault in log.first] == [("index-key", line) for line in (1, 2, 3)]


def test_shifted_offsets_are_foreign_and_their_records_missing(packed, tmp_path) -> None:
    text = "".join(f"{key}\t{offset + 4}\n" for key, offset in enumerate(offsets(packed)))
    found = faults_with(packed, tmp_path, text)
    assert [line for kind, line, _ in found if kind == "index-foreign"] == list(range(1, 9))
    assert [record for kind, _, record in found if kind == "index-missing"] == list(range(8))


@pytest.mark.parametrize("left", range(1, 7))
def test_cut_in_the_middle_of_a_line(packed, tmp_path, lines, left) -> None:
    """Whatever is left of the line `5\\t8976\\n`, record 5 is not where it says; those behind are not listed at all."""
    found = faults_with(packed, tmp_path, "".join(lines[:5]) + lines[5][:left])
    if lines[5][:left] == lines[5].strip():
        assert found == [("index-missing", None, record) for record in (6, 7)]
        return
    assert [record for kind, _, record in found if kind == "index-missing"] == [5, 6, 7]
    # A line of key, tab and some digits reads well; it leads nowhere, or to a record before.
    wrong = [(kind, line) for kind, line, _ in found if kind != "index-missing"]
    assert wrong[0][1] == 6
    assert wrong[0][0] in ("index-line", "index-order")


@pytest.mark.parametrize(
    "bad", ["x\t12\n", "-1\t12\n", "3 44\n", "\n", "3\t99999999999999999999\n", "\ufeff0\t0\n", "\0" * 5000]
)
def test_lines_that_are_none(packed, tmp_path, lines, bad) -> None:
    found = faults_with(packed, tmp_path, "".join([*lines, bad]))
    assert {(kind, record) for kind, _, record in found} == {("index-line", None)}
    assert found[0][1] == 9


def test_an_index_of_a_longer_file(packed, tmp_path, lines) -> None:
    found = faults_with(packed, tmp_path, "".join([*lines, f"8\t{packed.stat().st_size}\n"]))
    assert ("cut-off", None, 8) in found


def test_no_index(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path, ("rec", "manifest", "sources", "rejects"))
    (fault,) = verified(rec, None).log.first
    assert str(fault) == "index-missing: there is no pairs.idx"


@pytest.mark.parametrize("text", ["", "x", "0\t0\n"])
def test_rebuilt_byte_for_byte(packed, tmp_path, text) -> None:
    rec = copy_set(packed, tmp_path)
    rec.with_suffix(".idx").write_text(text)
    assert rebuilt(rec) == [(rec.with_suffix(".idx"), 8)]
    assert rec.with_suffix(".idx").read_bytes() == packed.with_suffix(".idx").read_bytes()
    assert rec.read_bytes() == packed.read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("byte", [0, 7])
def test_not_rebuilt_beyond_damage(packed, tmp_path, byte) -> None:
    rec = copy_set(packed, tmp_path)
    start = offsets(packed)[3]
    flip_bit(rec, start + byte, 6)
    before = rec.with_suffix(".idx").read_bytes()
    with pytest.raises(RwkvClipError, match=rf"record 3 at byte {start:,} is damaged") as error:
        rebuilt(rec)
    assert error.value.hint == f"rwkvclip inspect {rec} --salvage OUT.rec"
    assert rec.with_suffix(".idx").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_not_rebuilt_for_a_file_that_lost_its_last_records(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    with rec.open("r+b") as file:
        file.truncate(offsets(packed)[6])
    with pytest.raises(RwkvClipError, match="holds 6 records, its manifest says 8"):
        rebuilt(rec)


def test_a_shuffled_listing_keeps_its_line_numbers(tmp_path) -> None:
    path = tmp_path / "a.idx"
    path.write_text("0\t40\nbad\n1\t8\n2\t16\n")
    listing = read_listing(path)
    assert list(listing.offsets) == [8, 16, 40]
    assert [listing.line(position) for position in range(3)] == [3, 4, 1]
