"""WebDataset tars as sources: grouping, compressions, joined and damaged archives."""

import io
import itertools
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from pack_files import told, write_tar

from rwkvclip_cli.data.packing.samples import MAX_SIDECAR_BYTES, Reject, Sample
from rwkvclip_cli.data.packing.tars import read_tar

PAIRS = [item for n in range(3) for item in ((f"{n}.jpg", bytes([n]) * 700), (f"{n}.txt", b"caption"))]
ALL = [(f"t.tar:{n}.jpg", ["caption"]) for n in range(3)]


def tar(path: Path, **keys: object) -> list[tuple[str, object]]:
    return told(list(read_tar(str(path), **keys)), path.parent)  # type: ignore[arg-type]


def test_a_tar_groups_files_by_their_name_up_to_the_first_dot(tmp_path):
    files = [
        ("./000.jpg", b"J"),
        ("./000.txt", b"a cat\na tabby"),
        ("a/1.left.png", b"P"),
        ("a/1.json", b'{"caption": "dotted"}'),
        ("a/1.cls", b"3"),
        ("b/1.JPG", b"J"),
        ("b/1.TXT", b"upper"),
        ("CREDITS.tsv", b"x"),
        ("alone.jpg", b"J"),
        ("README", b"x"),
        ("orphan.txt", b"x"),
        ("same.jpg", b"1"),
        ("same.txt", b"one"),
        ("same.jpg", b"2"),
        ("same.txt", b"two"),
    ]
    assert tar(write_tar(tmp_path / "t.tar", files)) == [
        ("t.tar:000.jpg", ["a cat", "a tabby"]),
        ("t.tar:a/1.left.png", ["dotted"]),
        ("t.tar:b/1.JPG", ["upper"]),
        ("t.tar:CREDITS.tsv", "ignored"),
        ("t.tar:README", "ignored"),
        ("t.tar:alone.jpg", "missing-caption"),
        ("t.tar:orphan.txt", "missing-image"),
        ("t.tar:same.jpg", ["one"]),
        ("t.tar:same.jpg", ["two"]),
    ]


def test_hidden_files_between_do_not_part_a_sample(tmp_path):
    files = [("._1.jpg", b"x"), ("1.jpg", b"J"), ("._1.txt", b"x"), ("1.txt", b"text")]  # as macOS packs them
    assert tar(write_tar(tmp_path / "t.tar", files))[-1] == ("t.tar:1.jpg", ["text"])


def test_an_image_key_chooses_among_a_samples_pictures(tmp_path):
    files = [("1.left.jpg", b"L"), ("1.right.jpg", b"R"), ("1.bin", b"B"), ("1.txt", b"x")]
    path = write_tar(tmp_path / "t.tar", files)
    assert tar(path) == [("t.tar:1.left.jpg", ["x"])]
    assert tar(path, image_key="right.jpg") == [("t.tar:1.right.jpg", ["x"])]
    assert tar(path, image_key="bin") == [("t.tar:1.bin", ["x"])]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_compression_and_format(tmp_path, mode, format):
    long = "long/" * 40
    files = [*PAIRS, (f"{long[:150]}é.jpg", b"J"), (f"{long[:150]}é.txt", b"long")]
    found = tar(write_tar(tmp_path / "t.tar", files, mode, format=format))
    assert found == [*ALL, (f"t.tar:{long[:150]}é.jpg", ["long"])]


def test_tars_joined_end_to_end_are_read_to_the_end(tmp_path):
    first = write_tar(tmp_path / "1.tar", PAIRS[:2]).read_bytes()
    second = write_tar(tmp_path / "2.tar", PAIRS[2:]).read_bytes()
    (tmp_path / "t.tar").write_bytes(first + second)
    assert tar(tmp_path / "t.tar") == ALL


# In PAIRS a sample takes 512 + 1024 bytes for its image and 512 + 512 for its caption.
STRIDE = 2560


@pytest.mark.parametrize(
    ("cut", "kept", "byte"),
    [
        (2 * STRIDE + 512 + 100, 2, 2 * STRIDE),
        (2 * STRIDE + 1536 + 100, 2, 2 * STRIDE + 1536),
        (STRIDE + 100, 1, STRIDE),
        (2 * STRIDE, 2, 2 * STRIDE),
        (2 * STRIDE + 1536, 2, 2 * STRIDE + 1536),
        (0, 0, 0),
    ],
    ids=["in an image", "in a header", "in a sample's header", "between samples", "within a sample", "empty"],
)
def test_a_cut_tar_keeps_what_precedes_and_names_the_byte(tmp_path, cut, kept, byte):
    path = write_tar(tmp_path / "t.tar", PAIRS)
    path.write_bytes(path.read_bytes()[:cut])
    *before, last = read_tar(str(path))
    assert told(before, tmp_path) == ALL[:kept]
    assert isinstance(last, Reject)
    assert (last.reason, last.source) == ("damaged-tar", str(path))
    assert f"at byte {byte:,}" in last.message


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path):
    path = write_tar(tmp_path / "t.tar", PAIRS)
    data = bytearray(path.read_bytes())
    data[STRIDE : STRIDE + 100] = b"\xff" * 100
    path.write_bytes(data)
    *before, last = read_tar(str(path))
    assert told(before, tmp_path) == ALL[:1]
    assert isinstance(last, Reject)
    assert f"at byte {STRIDE:,}" in last.message


def test_a_cut_gzip_and_what_is_no_tar_are_rejects(tmp_path):
    whole = write_tar(tmp_path / "t.tar", [(f"{n}.bin", os.urandom(5000)) for n in range(9)], "w:gz").read_bytes()
    (tmp_path / "t.tar").write_bytes(whole[: len(whole) // 2])
    assert told(list(read_tar(str(tmp_path / "t.tar"))), tmp_path)[-1] == ("t.tar", "damaged-tar")
    (tmp_path / "n.tar").write_bytes(b"no tar at all" * 100)
    assert tar(tmp_path / "n.tar") == [("n.tar", "damaged-tar")]


def tar_with_links(path: Path, members: list[tuple[str, str | bytes]], kind: bytes) -> Path:
    """A tar of files and, where text stands for the content, of links to that name."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = kind, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


LINKS = {tarfile.LNKTYPE: ("a hard link", "--hard-dereference"), tarfile.SYMTYPE: ("a symbolic link", "--dereference")}


@pytest.mark.parametrize("kind", LINKS, ids=["hard", "symbolic"])
def test_a_link_in_a_tar_is_a_reject_that_says_so(tmp_path, kind):
    members = [
        ("0.jpg", b"J"), ("0.txt", b"x"),
        ("1.jpg", "0.jpg"), ("1.txt", b"x"),
        ("2.jpg", b"J"), ("2.txt", "0.txt"),
        ("3.txt", "0.txt"),
        ("4.jpg", b"J"), ("4.json", b'{"caption": "c"}'), ("4.txt", "0.txt"),
    ]  # fmt: skip
    path = tar_with_links(tmp_path / "t.tar", members, kind)
    items = list(read_tar(str(path)))
    reasons = ["unreadable-image", "unreadable-caption", "missing-image"]
    expected = [("0.jpg", ["x"]), *zip(("1.jpg", "2.jpg", "3.txt"), reasons, strict=True), ("4.jpg", ["c"])]
    assert told(items, tmp_path) == [(f"t.tar:{name}", what) for name, what in expected]
    what, option = LINKS[kind]
    for item, link, target in ((items[1], "1.jpg", "0.jpg"), (items[2], "2.txt", "0.txt")):
        assert isinstance(item, Reject)
        assert item.message == f"{path}:{link} is {what} to {target}; make the tar with {option}"


def test_a_caption_file_in_a_tar_that_is_too_large_is_told_as_that(tmp_path):
    path = write_tar(tmp_path / "t.tar", [("0.jpg", b"J"), ("0.txt", b" " * (MAX_SIDECAR_BYTES + 1))])
    (item,) = read_tar(str(path))
    assert isinstance(item, Reject)
    assert (item.reason, item.message) == (
        "unreadable-caption",
        f"{path}:0.txt: a caption file has at most 16,777,216 bytes",
    )


def test_a_long_tar_takes_constant_memory(tmp_path):
    files = [(f"{n:06}.{suffix}", b"x" * 2000) for n in range(1000) for suffix in ("jpg", "txt")]
    path = str(write_tar(tmp_path / "t.tar", files))
    tracemalloc.start()
    assert sum(isinstance(item, Sample) for item in read_tar(path)) == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The headers alone, kept, would take more than a million bytes, the files four.
    assert peak < 300_000


def raw_header(name: bytes, size_field: bytes, kind: bytes) -> bytes:
    head = bytearray(512)
    head[: len(name)] = name
    head[100:108], head[108:116], head[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    head[124:136], head[136:148], head[156:157] = size_field, b"00000000000\0", kind
    head[257:265] = b"ustar\00000"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def base_256(size: int) -> bytes:
    return (size & ((1 << 96) - 1)).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")


@pytest.mark.parametrize(
    "junk",
    [
        raw_header(b"b.dat", base_256(-512), b"0"),
        raw_header(b"b.jpg", base_256(-512), b"0"),
        raw_header(b"b.dat", base_256(-512), b"S"),
        raw_header(b"long", base_256(2**62), b"L"),
        raw_header(b"long", base_256(2**70), b"x"),
        raw_header(b"chain", b"00000000000\0", b"x") * 3000,
        raw_header(b"chain", b"00000000000\0", b"L") * 3000,
    ],
    ids=["negative", "negative-image", "negative-sparse", "huge-name", "huge-pax", "pax-chain", "name-chain"],
)
def test_headers_that_loop_or_claim_too_much_end_the_tar_with_one_reject(tmp_path, junk):
    write_tar(tmp_path / "t.tar", PAIRS)
    whole = (tmp_path / "t.tar").read_bytes().rstrip(b"\0")
    whole += bytes(-len(whole) % 512)
    (tmp_path / "t.tar").write_bytes(whole + junk + bytes(1024))
    found = list(itertools.islice(read_tar(str(tmp_path / "t.tar")), 20))
    assert [item.source for item in found if isinstance(item, Sample)] == [
        f"{tmp_path}/t.tar:{n}.jpg" for n in range(3)
    ]
    assert isinstance(found[-1], Reject)
    assert found[-1].reason == "damaged-tar"
    assert f"at byte {len(whole):,}" in found[-1].message


def test_a_sparse_file_that_claims_gigabytes_costs_none(tmp_path):
    # 1 GiB of zeros in one block: a list of no data segments, and the size that the whole file has.
    headers = {
        f"GNU.sparse.{key}": value for key, value in {"major": "1", "minor": "0", "realsize": str(2**30)}.items()
    }
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, extra in (
            ("0.jpg", b"0\n".ljust(512, b"\0"), headers), ("0.txt", b"a cat", {}), ("1.jpg", b"J", {}),
            ("1.txt", b"0\n".ljust(512, b"\0"), headers),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(content), extra
            archive.addfile(info, io.BytesIO(content))
    tracemalloc.start()
    found = list(read_tar(str(tmp_path / "t.tar")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [item.reason for item in found if isinstance(item, Reject)] == ["too-large", "unreadable-caption"]
    assert peak < 2**20
