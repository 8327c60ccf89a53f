"""Damage anywhere in a .rec is found and named with record and source, and costs the record that it hits alone."""

import random
from pathlib import Path

import pytest
from inspect_files import Prove, bodies, copy_set, flip_bit, offsets, salvaged, verified

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.recordio import HEADER_BYTES, RecordReader

DRAWN = random.Random(5)
FLIPS = [(DRAWN.random(), DRAWN.randrange(8)) for _ in range(200)]
# What pack proves and a bit can break without the image, the captions or their place being lost.
NUMBER_BYTES = range(12, 32)  # of a record: label, id and id2


def named(verdict, record: int) -> bool:
    """Whether a fault names this record, its place and its source."""
    return any(
        fault.record == record and fault.offset is not None and (fault.source or "").endswith(f"/{record:03}.jpg")
        for fault in verdict.log.first
    )


def check_flip(packed: Path, folder: Path, prove: Prove, share: float, bit: int, parts: tuple[str, ...]) -> None:
    damaged = copy_set(packed, folder, parts)
    byte = int(share * packed.stat().st_size)
    flip_bit(damaged, byte, bit)
    starts = offsets(packed)
    record = max(number for number, start in enumerate(starts) if start <= byte)
    verdict = verified(damaged, prove)
    assert not verdict.is_sound
    assert named(verdict, record), (byte, bit, [str(fault) for fault in verdict.log.first])
    whole = bodies(packed)
    saved = salvaged(damaged, prove, folder / "saved.rec")
    assert saved.before >= record
    found = bodies(folder / "saved.rec")
    assert found in (whole[:record] + whole[record + 1 :], whole), (byte, bit)
    if byte - starts[record] in NUMBER_BYTES:
        assert found == whole
    assert verified(folder / "saved.rec", prove).is_sound


ALL_PARTS = ("idx", "manifest", "rejects", "sources", "rec")


@pytest.mark.parametrize(("share", "bit"), FLIPS[:10])
def test_a_turned_bit_is_named_and_costs_one_record(packed, tmp_path, prove, share, bit) -> None:
    check_flip(packed, tmp_path, prove, share, bit, ALL_PARTS)


@pytest.mark.parametrize("byte", [1, 4, 6, 7, 8, 11, 13, 20, 30, 500, 1400])
def test_a_turned_bit_at_each_kind_of_place_with_and_without_index(packed, tmp_path, prove, byte) -> None:
    share = (offsets(packed)[3] + byte + 0.5) / packed.stat().st_size
    for number, parts in enumerate((ALL_PARTS, tuple(part for part in ALL_PARTS if part != "idx"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_flip(packed, folder, prove, share, 5, parts)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "bit"), FLIPS[10:])
@pytest.mark.parametrize("index", [True, False], ids=["with-index", "without-index"])
def test_200_turned_bits(packed, tmp_path, prove, share, bit, index) -> None:
    check_flip(packed, tmp_path, prove, share, bit, ALL_PARTS if index else ALL_PARTS[1:])


@pytest.mark.slow
@pytest.mark.parametrize("field", [*range(32)])
def test_every_bit_of_a_records_head(packed, tmp_path, prove, field) -> None:
    for bit in range(8):
        folder = tmp_path / str(bit)
        folder.mkdir()
        share = (offsets(packed)[2] + field + 0.5) / packed.stat().st_size
        check_flip(packed, folder, prove, share, bit, ALL_PARTS)


def test_without_checksums_the_hash_still_tells(packed, tmp_path, prove) -> None:
    damaged = copy_set(packed, tmp_path, ("idx", "manifest", "rec"))
    # A turned bit within the picture's own data, which decodes to another picture.
    flip_bit(damaged, offsets(packed)[4] - 200, 0)
    verdict = verified(damaged, prove)
    assert verdict.log.counts["content-hash"] == 1
    assert verdict.checksums == 0


def cut_places(packed: Path, record: int) -> dict[str, int]:
    start = offsets(packed)[record]
    with RecordReader(packed) as reader:
        length = len(reader[record])
    assert length % 4, "the record that is cut has padding"
    return {
        "between": start,
        "magic": start + 2,
        "length": start + 5,
        "header": start + 8 + 10,
        "label": start + 8 + HEADER_BYTES + 301,
        "image": start + 8 + length - 100,
        "last byte": start + 8 + length - 1,
        "padding": start + 8 + length,
    }


KINDS = ("between", "magic", "length", "header", "label", "image", "last byte", "padding")


def padded_record(packed: Path) -> int:
    """A record behind the middle whose data is followed by padding."""
    with RecordReader(packed) as reader:
        return next(number for number in range(len(reader) // 2, len(reader)) if len(reader[number]) % 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_names_the_first_record_that_is_lost_and_keeps_those_before(packed, tmp_path, prove, kind) -> None:
    record = padded_record(packed)
    damaged = copy_set(packed, tmp_path)
    with damaged.open("r+b") as file:
        file.truncate(cut_places(packed, record)[kind])
    verdict = verified(damaged, prove)
    whole = bodies(packed)
    assert all(named(verdict, number) for number in range(record, len(whole)))
    assert not any(named(verdict, number) for number in range(record))
    assert verdict.log.counts["cut-off"] >= len(whole) - record - (kind == "padding")
    saved = salvaged(damaged, prove, tmp_path / "saved.rec")
    # All data of a record whose padding is cut off is there.
    kept = record + (kind == "padding")
    assert bodies(tmp_path / "saved.rec") == whole[:kept]
    assert (saved.kept, saved.before) == (kept, kept)
    assert sum(saved.lost.values()) == len(whole) - kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_without_index_is_told_by_the_list_of_sources(packed, tmp_path, prove, kind) -> None:
    record = padded_record(packed)
    damaged = copy_set(packed, tmp_path, ALL_PARTS[1:])
    with damaged.open("r+b") as file:
        file.truncate(cut_places(packed, record)[kind])
    verdict = verified(damaged, prove)
    assert all(named(verdict, number) for number in range(record, len(bodies(packed))))


@pytest.mark.slow
def test_a_file_cut_at_every_fourth_byte_of_a_record(packed, tmp_path) -> None:
    start, end = offsets(packed)[5:7]
    damaged = copy_set(packed, tmp_path)
    for length in range(end - 1, start, -4):
        with damaged.open("r+b") as file:
            file.truncate(length)
        verdict = verified(damaged, None)
        assert named(verdict, 5), length
        assert verdict.sound == 5, length


def test_an_empty_file_is_one_without_records(packed, tmp_path, prove) -> None:
    damaged = copy_set(packed, tmp_path)
    damaged.write_bytes(b"")
    verdict = verified(damaged, prove)
    assert verdict.records == 0
    assert "the .rec is empty" in [fault.message for fault in verdict.log.first]
    assert all(named(verdict, number) for number in range(8))
    with pytest.raises(RwkvClipError, match="no record is sound"):
        salvaged(damaged, prove, tmp_path / "saved.rec")
    assert not list(tmp_path.glob("saved*"))


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\0" * 4096,
        bytes.fromhex("0a2372ce") * 1024,
        b"\x0a\x23\xd7\xce" * 1000,
        bytes.fromhex("0a23d7ce00000020") * 500,
        bytes.fromhex("0a23d7ceffffff1f") * 500,
        random.Random(1).randbytes(1 << 16),
    ],
    ids=["one-byte", "zeros", "nearly-magic", "magic-alone", "first-parts", "longest", "noise"],
)
@pytest.mark.parametrize("with_index", [True, False])
def test_what_is_no_recordio_at_all_ends_without_a_traceback(packed, tmp_path, prove, data, with_index) -> None:
    damaged = copy_set(packed, tmp_path, ALL_PARTS if with_index else ("rec",))
    damaged.write_bytes(data)
    verdict = verified(damaged, prove)
    assert not verdict.is_sound
    assert verdict.records == 0


def test_a_hole_costs_the_records_in_it_and_those_behind_are_found_again(packed, tmp_path, prove) -> None:
    starts = offsets(packed)
    whole = bodies(packed)
    damaged = copy_set(packed, tmp_path)
    data = bytearray(damaged.read_bytes())
    data[starts[2] + 100 : starts[4] + 100] = bytes(starts[4] - starts[2])
    damaged.write_bytes(data)
    verdict = verified(damaged, prove)
    assert sorted({fault.record for fault in verdict.log.first if fault.record is not None}) == [2, 3, 4]
    salvaged(damaged, prove, tmp_path / "saved.rec")
    assert bodies(tmp_path / "saved.rec") == whole[:2] + whole[5:]
    lines = (tmp_path / "saved.rejects.jsonl").read_text().splitlines()
    assert [line.split('"')[3].rsplit("/", 1)[1] for line in lines] == ["002.jpg", "003.jpg", "004.jpg"]


def test_a_hole_without_index_is_numbered_by_the_records_behind_it(packed, tmp_path, prove) -> None:
    starts = offsets(packed)
    damaged = copy_set(packed, tmp_path, ALL_PARTS[1:])
    data = bytearray(damaged.read_bytes())
    data[starts[2] : starts[4] + 4] = bytes(starts[4] + 4 - starts[2])
    damaged.write_bytes(data)
    verdict = verified(damaged, prove)
    assert verdict.sound == 5
    assert verdict.log.counts["checksum"] == verdict.log.counts["header"] == 0
