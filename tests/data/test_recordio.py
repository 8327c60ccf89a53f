"""RecordIO: literal bytes, the real mxnet in both directions, DALI, damage, size and memory."""

import errno
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.recordio import (
    MAGIC_BYTES,
    MAX_PAYLOAD_BYTES,
    Record,
    RecordReader,
    RecordWriter,
    Written,
    pack_record,
    unpack_record,
)

HEAD = "0a23d7ce"


def write(path: Path, payloads: list[bytes]) -> Path:
    with RecordWriter(path) as writer:
        for payload in payloads:
            writer.write(payload)
    return path


def bytes_of(text: str) -> bytes:
    return bytes.fromhex(text.replace("|", " "))


def payloads_with_magic(seed: int, count: int = 200) -> list[bytes]:
    """Random payloads with magic words at aligned and other places, overlapping, in runs, at both ends."""
    rng = random.Random(seed)
    payloads = []
    for _ in range(count):
        payload = bytearray(rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(6)):
            place = rng.choice(
                [0, len(payload), rng.randrange(len(payload) + 1), rng.randrange(len(payload) + 1) // 4 * 4]
            )
            payload[place : place + rng.choice([0, 4])] = MAGIC_BYTES * rng.choice([1, 1, 3])
        payloads.append(bytes(payload))
    return payloads


# payload, and the parts that hold it: magic, flag and length, data, padding
LITERAL = [
    ("", f"{HEAD} 00000000"),
    ("616263", f"{HEAD} 03000000 616263 00"),
    ("61626364", f"{HEAD} 04000000 61626364"),
    (f"61626364 {HEAD} 78797a", f"{HEAD} 04000020 61626364 | {HEAD} 03000060 78797a 00"),
    (f"61 {HEAD} 626364", f"{HEAD} 08000000 61 {HEAD} 626364"),
    (f"{HEAD}", f"{HEAD} 00000020 | {HEAD} 00000060"),
    (f"{HEAD} {HEAD} {HEAD}", f"{HEAD} 00000020 | {HEAD} 00000040 | {HEAD} 00000040 | {HEAD} 00000060"),
    (f"{HEAD} 61", f"{HEAD} 00000020 | {HEAD} 01000060 61 000000"),
    (f"61626364 {HEAD}", f"{HEAD} 04000020 61626364 | {HEAD} 00000060"),
    (f"6162 {HEAD} {HEAD} 6364", f"{HEAD} 0c000000 6162 {HEAD} {HEAD} 6364"),
    ("0a23d7", f"{HEAD} 03000000 0a23d7 00"),
    ("61626364 0a23d7", f"{HEAD} 07000000 61626364 0a23d7 00"),
]


@pytest.mark.parametrize(("payload", "parts"), LITERAL)
def test_the_bytes_of_a_record(tmp_path: Path, payload: str, parts: str) -> None:
    path = write(tmp_path / "one.rec", [bytes_of(payload)])
    assert path.read_bytes() == bytes_of(parts)
    assert (tmp_path / "one.idx").read_bytes() == b"0\t0\n"
    with RecordReader(path) as reader:
        assert list(reader) == [bytes_of(payload)]


def test_the_bytes_of_an_image_record() -> None:
    packed = pack_record(Record(array("f", [1.0, 49407.0]), b"\xff\xd8", id=7, id2=2**63))
    assert packed == bytes_of("02000000 00000000 0700000000000000 0000000000000080 | 0000803f 00ff4047 | ffd8")
    assert pack_record(Record((1, 49407), b"\xff\xd8", 7, 2**63)) == packed


@pytest.mark.parametrize(
    "record",
    [
        Record(array("f"), b""),
        Record(array("f"), b"image", 1, 2, label=0.5),
        Record(array("f", [0.0] * 231), b"\0" * 5, 2**64 - 1),
    ],
)
def test_image_records_come_back(record: Record) -> None:
    assert unpack_record(pack_record(record)) == record


def test_writer_returns_offsets_and_takes_keys(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec", tmp_path / "elsewhere.index") as writer:
        assert [writer.write(b"abc"), writer.write(b"", key=90), writer.write(b"abcdefgh")] == [0, 12, 20]
        assert (writer.count, writer.size_bytes) == (3, 36)
    assert (tmp_path / "elsewhere.index").read_bytes() == b"0\t0\n90\t12\n2\t20\n"
    with RecordReader(tmp_path / "a.rec", tmp_path / "elsewhere.index") as reader:
        assert list(reader.offsets) == [0, 12, 20]


def test_reader_by_ordinal(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"one", b"two" + MAGIC_BYTES, b"three"])
    with RecordReader(path) as reader:
        assert len(reader) == 3
        assert (reader[1], reader[-1]) == (b"two" + MAGIC_BYTES, b"three")
        with pytest.raises(IndexError, match="has 3 records; there is no record 3"):
            reader[3]
        with pytest.raises(IndexError, match="no record -4"):
            reader[-4]
    with pytest.raises(ValueError, match="closed"):
        reader[0]


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    with RecordReader(write(tmp_path / "a.rec", [])) as reader:
        assert list(reader) == []


def test_an_index_may_name_some_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"0" * 9, b"1" * 9, b"2" * 9, b"3" * 9])
    (tmp_path / "some.idx").write_bytes(b"7\t20\r\n3\t60")  # the line ends of Windows, and none at the end
    with RecordReader(path, tmp_path / "some.idx") as reader:
        assert list(reader) == [b"1" * 9, b"3" * 9]


@pytest.mark.parametrize("seed", range(4))
def test_walking_finds_what_the_index_says(tmp_path: Path, seed: int) -> None:
    payloads = payloads_with_magic(seed)
    path = write(tmp_path / "a.rec", payloads)
    with RecordReader(path) as indexed:
        assert list(indexed) == payloads
    (tmp_path / "a.idx").unlink()
    with RecordReader(path) as walked:
        assert walked.index_path is None
        assert walked.offsets == indexed.offsets
        assert list(walked) == payloads


def test_records_longer_than_the_read_buffer(tmp_path: Path) -> None:
    long = random.Random(0).randbytes(3 * 2**20)
    payloads = [b"a", long, long[: 2**20] + MAGIC_BYTES + long, b"b"]
    with RecordReader(write(tmp_path / "a.rec", payloads)) as reader:
        assert list(reader) == payloads


def test_threads_share_a_reader(tmp_path: Path) -> None:
    payloads = payloads_with_magic(9)
    wrong: list[int] = []

    def read_at_random(seed: int) -> None:
        rng = random.Random(seed)
        for ordinal in (rng.randrange(len(payloads)) for _ in range(500)):
            if reader[ordinal] != payloads[ordinal]:
                wrong.append(ordinal)

    with RecordReader(write(tmp_path / "a.rec", payloads)) as reader:
        threads = [threading.Thread(target=read_at_random, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


MXNET_WRITES = """
import pickle, sys, mxnet
payloads = pickle.load(open(sys.argv[1], "rb"))
writer = mxnet.recordio.MXIndexedRecordIO(sys.argv[3], sys.argv[2], "w")
for key, payload in enumerate(payloads):
    writer.write_idx(key, payload)
writer.close()
"""
MXNET_READS = """
import pickle, sys, mxnet
payloads = pickle.load(open(sys.argv[1], "rb"))
reader = mxnet.recordio.MXIndexedRecordIO(sys.argv[3], sys.argv[2], "r")
assert [reader.read_idx(key) for key in reader.keys] == payloads
"""
MXNET_PACKS = """
import pickle, sys, mxnet
from mxnet.recordio import IRHeader, pack, unpack
records = pickle.load(open(sys.argv[1], "rb"))
packed = [pack(IRHeader(0, label, id, id2), image) for label, image, id, id2 in records]
for (label, image, id, id2), payload in zip(records, packed):
    header, data = unpack(payload)
    assert (list(header.label) if isinstance(label, list) else header.label) == label
    assert (data, header.id, header.id2) == (image, id, id2)
pickle.dump(packed, open(sys.argv[2], "wb"))
"""


def test_same_files_as_mxnet_in_both_directions(tmp_path: Path, run_mxnet: Callable[..., None]) -> None:
    payloads = [bytes_of(payload) for payload, _ in LITERAL] + payloads_with_magic(1, 2000)
    (tmp_path / "payloads").write_bytes(pickle.dumps(payloads))
    ours, theirs = write(tmp_path / "ours.rec", payloads), tmp_path / "theirs.rec"
    run_mxnet(MXNET_WRITES, tmp_path / "payloads", theirs, theirs.with_suffix(".idx"))
    run_mxnet(MXNET_READS, tmp_path / "payloads", ours, ours.with_suffix(".idx"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert ours.with_suffix(".idx").read_bytes() == theirs.with_suffix(".idx").read_bytes()
    with RecordReader(theirs) as reader:
        assert list(reader) == payloads


def test_same_image_records_as_mxnet(tmp_path: Path, run_mxnet: Callable[..., None]) -> None:
    rng = random.Random(2)
    records: list[tuple[list[float] | float, bytes, int, int]] = [(0.25, b"scalar label", 3, 4)]
    records += [
        ([float(rng.randrange(49408)) for _ in range(231)], rng.randbytes(rng.randrange(99)), ordinal, 0)
        for ordinal in range(50)
    ]
    (tmp_path / "records").write_bytes(pickle.dumps(records))
    run_mxnet(MXNET_PACKS, tmp_path / "records", tmp_path / "packed")
    for (label, image, id_, id2), packed in zip(records, pickle.loads((tmp_path / "packed").read_bytes()), strict=True):
        labels, scalar = (label, 0.0) if isinstance(label, list) else ([], label)
        record = Record(array("f", labels), image, id_, id2, scalar)
        assert pack_record(record) == packed
        assert unpack_record(packed) == record


def dali_reads(path: Path, index_path: Path, count: int) -> list[tuple[bytes, list[float]]]:
    """Image bytes and labels of the first `count` records, as DALI's reader hands them on, undecoded."""
    dali = pytest.importorskip("nvidia.dali")
    pipeline = dali.Pipeline(batch_size=count, num_threads=1, device_id=None)
    with pipeline:
        images, labels = dali.fn.readers.mxnet(path=[str(path)], index_path=[str(index_path)])
        pipeline.set_outputs(images, labels)
    pipeline.build()
    images, labels = pipeline.run()
    return [(images.at(i).tobytes(), labels.at(i).tolist()) for i in range(count)]


def test_dali_reads_every_record_split_ones_too(tmp_path: Path) -> None:
    rng = random.Random(3)
    records = [
        Record(array("f", [float(rng.randrange(49408)) for _ in range(rng.randrange(1, 7))]), image, ordinal)
        for ordinal, image in enumerate(payload or b"x" for payload in payloads_with_magic(3, 300))
    ]
    path = write(tmp_path / "a.rec", [pack_record(record) for record in records])
    assert path.read_bytes().count(MAGIC_BYTES) > 2 * len(records), "no record was split"
    assert dali_reads(path, tmp_path / "a.idx", len(records)) == [
        (record.image, list(record.labels)) for record in records
    ]


(MAGIC_AS_FLOAT,) = struct.unpack("<f", MAGIC_BYTES)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (Record([1.0], b"", id=0xCED7230A), "id 3470205706, id2 0 holds the bytes 0a23d7ce in the header"),
        (Record([1.0], b"", id2=0xCED7230A << 32), "in the header"),
        (Record([1.0, MAGIC_AS_FLOAT], b""), "id 0, id2 0 holds the bytes 0a23d7ce in label 1"),
    ],
)
def test_records_that_dali_cannot_join_are_refused(record: Record, said: str) -> None:
    with pytest.raises(RwkvClipError, match=said):
        pack_record(record)
    # Half a word further on they lie across two words, where nothing is split.
    pack_record(Record([1.0], b"", id=0xCED7230A << 16))


def write_sparsely(descriptor: int, pieces: list[bytes]) -> int:
    """os.writev for which long runs of zeros take no room on the disk."""
    for piece in pieces:
        if len(piece) < 2**24:
            assert os.write(descriptor, piece) == len(piece)
        else:
            assert not any(piece[:: 2**12])
            os.lseek(descriptor, len(piece), os.SEEK_CUR)
    return sum(map(len, pieces))


def test_beyond_four_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(array("f", [1.0, 2.0]), b"behind four GiB" + MAGIC_BYTES * 8, 9)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", write_sparsely)
        with RecordWriter(tmp_path / "a.rec") as writer:
            zeros = bytes(MAX_PAYLOAD_BYTES)
            offsets = [writer.write(zeros) for _ in range(9)]
            offsets.append(writer.write(pack_record(record)))
    assert offsets == [ordinal * (2**29 + 8) for ordinal in range(10)]
    assert offsets[-1] == 4_831_838_280
    assert (tmp_path / "a.idx").read_bytes().splitlines()[-1] == b"9\t4831838280"

    with RecordReader(tmp_path / "a.rec") as reader:
        assert reader.record(9) == record
    (tmp_path / "a.idx").rename(tmp_path / "all.idx")
    with RecordReader(tmp_path / "a.rec") as walked:
        assert list(walked.offsets) == offsets
    (tmp_path / "last.idx").write_bytes(b"9\t4831838280\n")
    assert dali_reads(tmp_path / "a.rec", tmp_path / "last.idx", 1) == [(record.image, [1.0, 2.0])]


@pytest.mark.parametrize("most", [1, 7, 100])
def test_what_the_system_takes_only_a_part_of_is_offered_again(tmp_path: Path, monkeypatch, most: int) -> None:
    records = [Record(array("f", [1.0]), bytes(range(number)) + MAGIC_BYTES * number, number) for number in range(9)]
    whole = write(tmp_path / "whole.rec", list(map(pack_record, records))).read_bytes()

    def write_some(descriptor: int, pieces: list[bytes]) -> int:
        return os.write(descriptor, b"".join(pieces)[:most])

    monkeypatch.setattr(os, "writev", write_some)
    with RecordWriter(tmp_path / "some.rec") as writer:
        for record in records:
            writer.write_record(record)
    assert (tmp_path / "some.rec").read_bytes() == whole


def test_a_buffer_that_its_owner_fills_again_is_written_as_it_was(tmp_path: Path) -> None:
    buffer = bytearray(b"AAAA")
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(buffer)  # type: ignore[arg-type]
        writer.write_record(Record([1.0], buffer))  # type: ignore[arg-type]
        buffer[:] = b"BBBB"
    with RecordReader(tmp_path / "a.rec") as reader:
        assert list(reader) == [b"AAAA", pack_record(Record([1.0], b"AAAA"))]


def test_memory_stays_the_same_however_long_the_file(tmp_path: Path) -> None:
    payload = random.Random(4).randbytes(20_000)
    tracemalloc.start()
    try:
        write(tmp_path / "a.rec", [payload] * 2000)
        with RecordReader(tmp_path / "a.rec") as reader:
            assert sum(len(read) for read in reader) == 40_000_000
        (tmp_path / "a.idx").unlink()
        with RecordReader(tmp_path / "a.rec") as reader:
            assert sum(1 for _ in reader) == 2000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


def test_a_payload_too_long_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        with pytest.raises(RwkvClipError, match=r"record 0 of .*a\.rec has 536,870,912 bytes; .* at most 536,870,911"):
            writer.write(bytes(2**29))
        writer.write(b"short")
    with RecordReader(tmp_path / "a.rec") as reader:
        assert list(reader) == [b"short"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("which", ["records", "index"])
@pytest.mark.parametrize("payload", [b"small", bytes(2**21)])
def test_a_full_disk_is_an_error(tmp_path: Path, which: str, payload: bytes) -> None:
    full, fine = Path("/dev/full"), tmp_path / "fine"
    paths = (full, fine) if which == "records" else (fine, full)
    with pytest.raises(RwkvClipError, match="No space left on device") as caught, RecordWriter(*paths) as writer:
        writer.write(payload)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert caught.value.hint.startswith("df -h ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_failed_write_is_not_forgotten(tmp_path: Path) -> None:
    writer = RecordWriter("/dev/full", tmp_path / "a.idx")
    with pytest.raises(RwkvClipError, match="No space left"):
        writer.write(bytes(2**21))
    with pytest.raises(RwkvClipError, match="incomplete: an earlier write failed"):
        writer.write(b"small")
    with pytest.raises(RwkvClipError, match="incomplete: an earlier write failed"):
        writer.close()
    writer.close()


def test_an_error_inside_with_leaves_the_files_closed_and_there(tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with writer:
            writer.write(b"abc")
            raise ZeroDivisionError

    writer = RecordWriter(tmp_path / "a.rec")
    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert (tmp_path / "a.rec").stat().st_size == 12
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"abc")


def test_places_where_nothing_can_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(RwkvClipError, match=r"cannot write .*nowhere/a.rec: No such file"):
        RecordWriter(tmp_path / "nowhere" / "a.rec")
    with pytest.raises(RwkvClipError, match=r"cannot write .*nowhere/a.idx: No such file"):
        RecordWriter(tmp_path / "a.rec", tmp_path / "nowhere" / "a.idx")
    with pytest.raises(RwkvClipError, match="need two files"):
        RecordWriter(tmp_path / "a.idx")
    with pytest.raises(RwkvClipError, match=r"cannot read .*none.rec: No such file"):
        RecordReader(tmp_path / "none.rec")
    with pytest.raises(RwkvClipError, match=r"cannot read .*none.idx: No such file"):
        RecordReader(write(tmp_path / "a.rec", []), tmp_path / "none.idx")
    with pytest.raises(RwkvClipError, match="/dev/null is no regular file"):
        RecordReader("/dev/null")


GOOD = f"{HEAD} 03000000 616263 00"  # 12 bytes
# bytes behind one good record, and what is said of record 1
DAMAGED = [
    ("00", r"record 1 at byte 12 is damaged: only 1 bytes of a part's head at byte 12"),
    (f"{HEAD} 030000", r"only 7 bytes of a part's head at byte 12"),
    ("00000000 00000000", r"0x00000000 at byte 12, not the magic 0xced7230a"),
    (f"{HEAD} 05000000 616263", r"part 0 would end at byte 28, but the file ends at 23"),
    (f"{HEAD} 03000000 616263", r"part 0 would end at byte 24, but the file ends at 23"),
    (f"{HEAD} 03000040 616263 00", r"part 0 at byte 12 has flag 2, not 0 \(whole\) or 1 \(first\)"),
    (f"{HEAD} 03000060 616263 00", r"part 0 at byte 12 has flag 3, not 0 \(whole\) or 1 \(first\)"),
    (f"{HEAD} 030000a0 616263 00", r"part 0 at byte 12 has flag 5, not 0"),
    (f"{HEAD} 00000020", r"only 0 bytes of a part's head at byte 20"),
    (f"{HEAD} 00000020 {GOOD}", r"part 1 at byte 20 has flag 0, not 2 \(middle\) or 3 \(last\)"),
    (f"{HEAD} 00000020 {HEAD} 00000040 {HEAD} 00000020", r"part 2 at byte 28 has flag 1, not 2"),
    (f"{HEAD} 00000020 0000000000000000", r"record 1 at byte 12 .* 0x00000000 at byte 20"),
]


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(("tail", "said"), DAMAGED)
def test_damage_is_named(tmp_path: Path, tail: str, said: str, indexed: bool) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(bytes_of(GOOD + tail))
    if not indexed:
        with pytest.raises(RwkvClipError, match=said) as caught:
            RecordReader(path)
    else:
        (tmp_path / "a.idx").write_bytes(b"0\t0\n1\t12\n")
        with RecordReader(path) as reader:
            assert reader[0] == b"abc"
            with pytest.raises(RwkvClipError, match=said) as caught:
                reader[1]
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"abc" * 1000])
    with RecordReader(path) as reader:
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(RwkvClipError, match="has shrunk from 3,008 bytes"):
            reader[0]


BAD_INDEXES = [
    (b"", "lists no record, but .*a.rec holds 36 bytes"),
    (b"\xef\xbb\xbf0\t0\n", "starts with a byte order mark"),
    (b"0\t0\nkey\t12\n2\t24\n", r"line 2 is b'key\\t12\\n', not a key, a tab and an offset"),
    (b"0\t0\n1\n2\t24\n", r"line 2 is b'1\\n'"),
    (b"0\t0\n1\t12\t7\n2\t24\n", r"line 2 is b'1\\t12\\t7\\n'"),
    (b"0\t0\n1 12\n", r"line 2 is b'1 12\\n'"),
    (b"0\t0\n\n1\t12\n", r"line 2 is b'\\n'"),
    (b"0\t0\n1\t-12\n", r"line 2 is b'1\\t-12\\n'"),
    (b"0\t0\n1\t1_2\n", r"line 2 is b'1\\t1_2\\n'"),
    (b"0\t0\n1\t9999999999999999999\n", "line 2 is"),
    (b"0\t0\n1\t24\n2\t12\n", "line 3: offset 12 goes back in the file after offset 24"),
    (b"0\t0\n1\t12\n2\t12\n", "line 3: offset 12 repeats the offset 12"),
    (b"5\t0\n3\t12\n5\t24\n", "line 3 repeats the key 5 of line 1"),
    (b"0\t0\n1\t36\n", "line 2: record 1 would start at byte 36, but .*a.rec ends at 36"),
    (b"0\t0\n1\t400\n2\t500\n", "line 2: record 1 would start at byte 400"),
    (b"0\t0\n1\t12\n2\t2", "line 3: offset 2 goes back"),  # an index cut off in the middle of a number
]


@pytest.mark.parametrize(("index", "said"), BAD_INDEXES)
def test_a_damaged_index_is_named(tmp_path: Path, index: bytes, said: str) -> None:
    path = write(tmp_path / "a.rec", [b"abc", b"def", b"ghi"])
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(RwkvClipError, match=said) as caught:
        RecordReader(path)
    assert str(tmp_path / "a.idx") in caught.value.message
    assert caught.value.hint == f"rwkvclip inspect {path} --rebuild-index"


def test_an_index_that_points_between_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b"abc", b"def"])
    (tmp_path / "a.idx").write_bytes(b"0\t0\n1\t14\n")
    with RecordReader(path) as reader, pytest.raises(RwkvClipError, match=r"record 1 at byte 14 .* not the magic"):
        reader[1]


def test_a_long_index_is_checked_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.rec", [b""] * 200_000)
    with RecordReader(path) as reader:
        assert list(reader.offsets) == list(range(0, 1_600_000, 8))
    index = tmp_path / "a.idx"
    assert index.stat().st_size > 2 * 2**20  # more than two of the blocks in which it is read
    index.write_bytes(index.read_bytes() + b"x\n")
    with pytest.raises(RwkvClipError, match=r"line 200001 is b'x\\n'"):
        RecordReader(path)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"short", "has 5 bytes, fewer than an image record's header of 24"),
        (pack_record(Record([1.0, 2.0], b""))[:-1], "promises 2 labels, 8 bytes, but only 7 bytes follow"),
    ],
)
def test_payloads_that_are_no_image_record(tmp_path: Path, payload: bytes, said: str) -> None:
    path = write(tmp_path / "a.rec", [payload])
    with RecordReader(path) as reader, pytest.raises(RwkvClipError, match=f"record 0 of {path} {said}"):
        reader.record(0)


def test_recordio_needs_neither_numpy_nor_torch() -> None:
    program = "import sys, rwkvclip_cli.data.recordio; sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_writer_goes_on_behind_what_another_flushed(tmp_path):
    payloads = [pack_record(Record([1.0], bytes([number]) * number, id=number)) for number in range(9)]
    with RecordWriter(tmp_path / "whole.rec") as writer:
        for payload in payloads:
            writer.write(payload)
    for stop in range(9):
        path = tmp_path / f"{stop}.rec"
        with RecordWriter(path) as writer:
            for payload in payloads[:stop]:
                writer.write(payload)
            written = writer.flush()
            assert written == Written(stop, path.stat().st_size, path.with_suffix(".idx").stat().st_size)
            writer.write(b"what a killed process wrote behind")
        with RecordWriter(path, after=written) as writer:
            for number, payload in enumerate(payloads[stop:], stop):
                assert writer.count == number
                writer.write(payload)
        for suffix in (".rec", ".idx"):
            assert path.with_suffix(suffix).read_bytes() == (tmp_path / "whole.rec").with_suffix(suffix).read_bytes()
