"""Folders, tables and tars as sources: which inputs they hold, in which order, with which captions."""

import gzip
import io
import json
import os
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.captions import clean_captions
from rwkvclip_cli.data.estimate import estimate_inputs
from rwkvclip_cli.data.samples import (
    REASONS,
    BadCaptions,
    Item,
    Reject,
    Sample,
    Sidecar,
    find_captions,
    printable,
)
from rwkvclip_cli.data.sources import SourceOptions, find_sources, read_folder, read_sources
from rwkvclip_cli.data.tables import read_table
from rwkvclip_cli.data.tars import read_tar


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write small files below a folder and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_tar(path: Path, files: list[tuple[str, bytes]], mode: str = "w", **options: object) -> Path:
    """Write a tar of the files in that order."""
    with tarfile.open(path, mode, **options) as tar:  # type: ignore[call-overload]
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def told(items: list[Item], root: Path) -> list[tuple[str, object]]:
    """Each item as (source below root, its captions or its reason)."""
    found: list[tuple[str, object]] = []
    for item in items:
        source = item.source.removeprefix(f"{root}/")
        if isinstance(item, Sample):
            found.append((source, clean_captions(find_captions(item))))
        elif isinstance(item, Reject):
            assert item.reason in REASONS
            assert item.message
            found.append((source, item.reason))
        else:
            found.append((source, "ignored"))
    return found


def folder(root: Path, **options: object) -> list[tuple[str, object]]:
    return told(list(read_folder(str(root), SourceOptions(**options))), root)  # type: ignore[arg-type]


def test_a_folder_pairs_images_with_captions_of_the_same_stem(tmp_path):
    write(
        tmp_path,
        {
            "b.jpg": "",
            "b.txt": "a cat\r\n\n  \na tabby\n",
            "a/z.png": "",
            "a/z.json": '{"caption": "from json", "url": "x"}',
            "alone.jpg": "",
            "orphan.txt": "no image",
            "orphan.json": "{}",
            ".hidden.jpg": "",
            ".hidden/x.jpg": "",
        },
    )
    assert folder(tmp_path) == [
        ("a/z.png", ["from json"]),
        ("alone.jpg", []),
        ("b.jpg", ["a cat", "a tabby"]),
        ("orphan.json", "missing-image"),
    ]


def test_every_regular_file_is_an_input_and_stems_end_at_the_last_dot(tmp_path):
    write(
        tmp_path,
        {
            "IMG.JPG": "",
            "IMG.TXT": "upper",
            "a.b.jpg": "",
            "a.b.txt": "dotted",
            "a.txt": "not of a.b.jpg",
            "bare": "",
            "bare.txt": "no suffix",
            "shared.jpg": "",
            "shared.png": "",
            "shared.txt": "for both",
            "x.jpg.txt": "of x.jpg, which has no picture of its own",
        },
    )
    assert folder(tmp_path) == [
        ("IMG.JPG", ["upper"]),
        ("a.b.jpg", ["dotted"]),
        ("a.txt", "missing-image"),
        ("bare", ["no suffix"]),
        ("shared.jpg", ["for both"]),
        ("shared.png", ["for both"]),
        ("x.jpg.txt", "missing-image"),
    ]


def test_names_are_sorted_by_their_bytes_with_folders_in_their_place(tmp_path):
    names = ["B.jpg", "a b.jpg", "a\nb.jpg", "a.jpg", "a/c.jpg", "é.jpg", "\uff46.jpg", "\U0001d538.jpg"]
    write(tmp_path, dict.fromkeys(names, ""))
    assert [source for source, _ in folder(tmp_path)] == [
        "B.jpg",
        "a/c.jpg",
        "a\nb.jpg",
        "a b.jpg",
        "a.jpg",
        "é.jpg",
        "\uff46.jpg",
        "\U0001d538.jpg",
    ]


def test_a_name_that_is_no_unicode_survives(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.jpg"
    Path(os.fsdecode(name)).write_bytes(b"")
    (item,) = read_folder(str(tmp_path), SourceOptions())
    assert isinstance(item, Sample)
    assert os.fsencode(str(item.image)) == name
    assert printable(item.source).endswith("/caf\\xe9.jpg")
    assert printable("a\udce9\ud83d") == "a??"


def test_links_are_followed_but_not_round_and_round(tmp_path):
    root = write(tmp_path / "root", {"a/x.jpg": "", "a/x.txt": "x"})
    outside = write(tmp_path / "outside", {"y.jpg": "", "y.txt": "y"})
    (root / "a" / "up").symlink_to(root)
    (root / "linked").symlink_to(outside)
    (root / "one.jpg").symlink_to(outside / "y.jpg")
    (root / "one.txt").symlink_to(outside / "y.txt")
    (root / "dangling.jpg").symlink_to(outside / "none.jpg")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    os.mkfifo(root / "pipe.jpg")
    assert folder(root) == [
        ("a/x.jpg", ["x"]),
        ("dangling.jpg", []),
        ("linked/y.jpg", ["y"]),
        ("one.jpg", ["y"]),
        ("self.jpg", []),
    ]


def test_folders_deeper_than_pythons_recursion_are_no_problem(tmp_path):
    deep = tmp_path.joinpath(*"d" * 300)
    write(deep, {"x.jpg": ""})
    # Pytest itself could not remove a tree beyond the usual limit, so the limit comes down instead.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(250)
    try:
        items = list(read_folder(str(tmp_path), SourceOptions()))
    finally:
        sys.setrecursionlimit(limit)
    assert [item.source for item in items] == [str(deep / "x.jpg")]


def test_what_is_being_written_is_no_input(tmp_path):
    write(tmp_path, {"a.jpg": "", "out.rec": "", "out.idx": "", "sub/out.rec": ""})
    skip = frozenset(str(tmp_path.resolve() / name) for name in ("out.rec", "out.idx"))
    assert [source for source, _ in folder(tmp_path, skip=skip)] == ["a.jpg", "sub/out.rec"]


def test_a_folder_that_cannot_be_listed_is_a_reject(tmp_path, monkeypatch):
    write(tmp_path, {"a/x.jpg": "", "b.jpg": ""})
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert folder(tmp_path) == [("a", "unreadable-folder"), ("b.jpg", [])]


def sample(*sidecars: tuple[str, bytes], keys: tuple[str, ...] = ()) -> Sample:
    return Sample("x", b"", sidecars=tuple(Sidecar(k, c) for k, c in sidecars), caption_keys=keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sidecars", "captions"),
    [
        ([("txt", b"a\nb\rc\r\nd")], ["a", "b", "c", "d"]),
        ([("txt", b"\xef\xbb\xbfmark")], ["mark"]),
        ([("txt", "ünï".encode("utf-16"))], ["ünï"]),
        ([("txt", "\u2028 is no line end".encode())], ["\u2028 is no line end"]),
        ([("txt", b"None\nNA\nnull")], ["None", "NA", "null"]),
        ([("txt", b"twice\ntwice")], ["twice", "twice"]),
        ([("json", b'{"captions": ["a", "b"], "caption": "c"}')], ["a", "b"]),
        ([("json", b'{"captions": [], "caption": "c"}')], ["c"]),
        ([("json", b'{"caption": null, "text": "t"}')], ["t"]),
        ([("json", b'{"title": "t"}')], ["t"]),
        ([("json", b'\xef\xbb\xbf{"caption": 7}')], ["7"]),
        ([("json", b'["a", "b"]')], ["a", "b"]),
        ([("json", b'{"url": "u"}')], []),
        ([("txt", b"same"), ("json", b'{"caption": "same"}')], ["same"]),
        ([("txt", b"one"), ("json", b'{"captions": ["two", "one"]}')], ["one", "two"]),
        ([("txt", b"good"), ("json", b"{broken")], ["good"]),
        ([("json", b'{"caption": "\\ud83d"}')], ["\ufffd"]),
        ([("json", b'{"caption": "\\ud83d\\ude00"}')], ["😀"]),
    ],
)
def test_captions_of_sidecars(sidecars, captions):
    assert clean_captions(find_captions(sample(*sidecars))) == captions


def test_caption_keys_choose_among_a_sidecars_keys():
    sidecar = ("json", b'{"caption": "short", "long": "longer", "alt": ["a", "b"]}')
    assert find_captions(sample(sidecar, keys=("long", "alt", "none"))) == ["longer", "a", "b"]


@pytest.mark.parametrize("content", [b"{broken", b"", b"[" * 100_000])
def test_a_broken_sidecar_alone_is_said(content):
    with pytest.raises(BadCaptions, match="not valid JSON"):
        find_captions(sample(("json", content)))


def test_a_sidecar_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "big.txt").write_bytes(b"x" * (2**24 + 1))
    with pytest.raises(BadCaptions, match=r"big\.txt: a caption file has at most 16,777,216 bytes"):
        find_captions(Sample("x", b"", sidecars=(Sidecar("txt", str(tmp_path / "big.txt")),)))
    with pytest.raises(BadCaptions, match="Is a directory"):
        find_captions(Sample("x", b"", sidecars=(Sidecar("txt", str(tmp_path)),)))


def table(path: Path, content: str | bytes, **keys: object) -> list[tuple[str, object]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return told(list(read_table(str(path), **keys)), path.parent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        "image,caption\ncat.jpg,a cat\ndog.jpg,a dog\n",
        "\ufeffimage,caption\r\ncat.jpg,a cat\r\n\r\ndog.jpg,a dog",
        'caption,Image,extra\n"a cat",cat.jpg,1\n"a dog",dog.jpg,2\n',
        "image,caption\ncat.jpg,a cat,,\ndog.jpg,a dog\n",
        "image,caption\ncat.jpg,a cat\ndog.jpg,a dog\n".encode("utf-16"),
    ],
    ids=["plain", "bom crlf blank", "order and case", "empty extra cells", "utf-16"],
)
def test_csv(tmp_path, content):
    found = table(tmp_path / "t.csv", content)
    assert [source.split(":")[-1] for source, _ in found] == ["cat.jpg", "dog.jpg"]
    assert [captions for _, captions in found] == [["a cat"], ["a dog"]]


def test_rows_keep_their_order_their_lines_and_their_quoted_cells(tmp_path):
    content = 'image,caption\nz.jpg,"two\nlines, ""quoted"""\na.jpg,NA\nb.jpg,\n,no image\n'
    assert table(tmp_path / "t.csv", content) == [
        ("t.csv:2:z.jpg", ['two\nlines, "quoted"']),
        ("t.csv:4:a.jpg", ["NA"]),
        ("t.csv:5:b.jpg", []),
        ("t.csv:6", "missing-image"),
    ]


def test_relative_image_paths_start_at_the_tables_folder(tmp_path):
    (tmp_path / "t.csv").write_text("image,caption\nsub/a.jpg,x\n/abs/b.jpg,y\nhttp://host/c.jpg,z\n")
    first, second, third = read_table(str(tmp_path / "t.csv"))
    assert isinstance(first, Sample)
    assert isinstance(second, Sample)
    assert isinstance(third, Reject)
    assert (first.image, second.image) == (f"{tmp_path}/sub/a.jpg", "/abs/b.jpg")
    assert (third.reason, "img2dataset" in third.message) == ("missing-image", True)


def test_named_columns_fill_the_slots_in_their_order(tmp_path):
    content = "id\tfile\tshort\tlong\n1\ta.jpg\ts\tl\n2\tb.jpg\t\tl2\n"
    found = table(tmp_path / "t.tsv", content, image_key="file", caption_keys=("long", "short"))
    assert found == [("t.tsv:2:a.jpg", ["l", "s"]), ("t.tsv:3:b.jpg", ["l2"])]


@pytest.mark.parametrize("cell", ['"[""a"", ""b""]"', "\"['a', 'b']\""], ids=["json", "python"])
def test_a_captions_column_may_list_them(tmp_path, cell):
    assert table(tmp_path / "t.csv", f"image,captions\nx.jpg,{cell}\n") == [("t.csv:2:x.jpg", ["a", "b"])]


def test_a_bracket_is_no_list_elsewhere(tmp_path):
    found = table(tmp_path / "t.csv", "image,caption,captions\nx.jpg,[1],[broken\n")
    assert found == [("t.csv:2:x.jpg", ["[broken"])]
    found = table(tmp_path / "t.csv", "image,caption\nx.jpg,[1]\n")
    assert found == [("t.csv:2:x.jpg", ["[1]"])]


def test_cells_may_be_large_and_legacy_bytes_are_read(tmp_path):
    content = b"image,caption\nx.jpg,caf\xe9\ny.jpg," + b"w" * 300_000 + b"\n"
    (_, first), (_, second) = table(tmp_path / "t.csv", content)
    assert first == ["café"]
    assert second == ["w" * 300_000]


def test_rows_that_cannot_be_trusted_are_rejects_with_their_line(tmp_path):
    content = 'image,caption\na.jpg,one, two\nb.jpg,fine\nc.jpg,"never closed\nd.jpg,swallowed\n'
    assert table(tmp_path / "t.csv", content) == [
        ("t.csv:2", "bad-row"),
        ("t.csv:3:b.jpg", ["fine"]),
        ("t.csv:4", "bad-row"),
    ]
    (*_, last) = read_table(str(tmp_path / "t.csv"))
    assert isinstance(last, Reject)
    assert "lines 4 to 5" in last.message


def test_a_stray_quote_in_a_tsv_does_not_merge_rows_silently(tmp_path):
    content = 'image\tcaption\na.jpg\t"open\nb.jpg\tx\nc.jpg\tclose"\nd.jpg\tfine\n'
    assert table(tmp_path / "t.tsv", content) == [("t.tsv:2", "bad-row"), ("t.tsv:5:d.jpg", ["fine"])]


def test_jsonl(tmp_path):
    rows = [
        {"image": "a.jpg", "captions": ["x", "y"]},
        {"file_name": "b.jpg", "text": "t"},
        {"image": None, "path": "c.jpg", "caption": 5},
        {"caption": "no image"},
        {"image": {"bytes": "..."}, "caption": "no path"},
        {"image": "d.jpg", "caption": None},
    ]
    lines = [json.dumps(row) for row in rows] + ["", "[1]", "{broken", '{"image": "e.jpg", "caption": "\u2028"}']
    assert table(tmp_path / "t.jsonl", "\ufeff" + "\r\n".join(lines)) == [
        ("t.jsonl:1:a.jpg", ["x", "y"]),
        ("t.jsonl:2:b.jpg", ["t"]),
        ("t.jsonl:3:c.jpg", ["5"]),
        ("t.jsonl:4", "missing-image"),
        ("t.jsonl:5", "missing-image"),
        ("t.jsonl:6:d.jpg", []),
        ("t.jsonl:8", "bad-row"),
        ("t.jsonl:9", "bad-row"),
        ("t.jsonl:10:e.jpg", []),
    ]


def find(*paths: Path, **options: object) -> list[tuple[str, str]]:
    return find_sources([str(path) for path in paths], SourceOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "options", "message", "hint"),
    [
        ("file,caption\n", {}, r"no image column among file, caption", "--image-key"),
        ("image,words\n", {}, r"no caption column among image, words", "--caption-key"),
        ("image,captoin\n", {"caption_keys": ("caption",)}, r"no column 'caption'", "--caption-key captoin"),
        ("image,caption\n", {"image_key": "imgae"}, r"no column 'imgae'", "--image-key image"),
        ("", {}, "no rows", ""),
    ],
)
def test_a_table_without_the_columns_is_refused_before_any_work(tmp_path, content, options, message, hint):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(UsageError, match=message) as fault:
        find(tmp_path / "t.csv", **options)
    assert hint in fault.value.hint


def test_sources_are_known_by_suffix_or_by_format(tmp_path):
    write(tmp_path, {"a.CSV": "image,caption\n", "b.jsonl": '{"image": "", "text": ""}', "c.tar": "", "rows": "{}"})
    (tmp_path / "rows").write_text('{"image": "a", "text": ""}\n')
    kinds = [kind for _, kind in find(tmp_path, tmp_path / "a.CSV", tmp_path / "b.jsonl", tmp_path / "c.tar")]
    assert kinds == ["folder", "table", "table", "webdataset"]
    assert find(tmp_path / "rows", format="table")[0][1] == "table"
    assert find(tmp_path, format="webdataset")[0][1] == "webdataset"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonesuch", {}, "no such folder or file"),
        ("x.jpg", {}, "a source is a folder or ends in"),
        ("x.jpg", {"format": "folder"}, "is a file"),
        ("", {"format": "table"}, "is a folder"),
        ("", {"format": "webdataset"}, r"no \.tar file"),
    ],
)
def test_a_source_that_cannot_be_is_refused(tmp_path, name, options, message):
    write(tmp_path, {"x.jpg": ""})
    with pytest.raises(UsageError, match=message):
        find(tmp_path / name, **options)


def test_a_misspelt_source_gets_the_nearest_name(tmp_path):
    write(tmp_path, {"images/a.jpg": ""})
    with pytest.raises(UsageError) as fault:
        find(tmp_path / "imagse")
    assert fault.value.hint == str(tmp_path / "images")


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


PAIRS = [item for n in range(3) for item in ((f"{n}.jpg", bytes([n]) * 700), (f"{n}.txt", b"caption"))]
ALL = [(f"t.tar:{n}.jpg", ["caption"]) for n in range(3)]


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


def test_a_link_in_a_tar_is_a_reject_that_says_so(tmp_path):
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        info = tarfile.TarInfo("1.jpg")
        info.type, info.linkname = tarfile.LNKTYPE, "0.jpg"
        archive.addfile(info)
        text = tarfile.TarInfo("1.txt")
        text.size = 1
        archive.addfile(text, io.BytesIO(b"x"))
    (item,) = read_tar(str(tmp_path / "t.tar"))
    assert isinstance(item, Reject)
    assert (item.reason, "--hard-dereference" in item.message) == ("unreadable-image", True)


def test_a_folder_of_tars_is_read_in_order_when_asked(tmp_path):
    for name in ("b.tar", "a.tar"):
        write_tar(tmp_path / name, PAIRS[:2])
    options = SourceOptions(format="webdataset")
    items = list(read_sources(find_sources([str(tmp_path)], options), options))
    assert [source for source, _ in told(items, tmp_path)] == ["a.tar:0.jpg", "b.tar:0.jpg"]


def test_a_long_tar_takes_constant_memory(tmp_path):
    files = [(f"{n:06}.{suffix}", b"x" * 2000) for n in range(1000) for suffix in ("jpg", "txt")]
    path = str(write_tar(tmp_path / "t.tar", files))
    tracemalloc.start()
    assert sum(isinstance(item, Sample) for item in read_tar(path)) == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The headers alone, kept, would take more than a million bytes, the files four.
    assert peak < 300_000


def test_the_number_of_inputs_is_estimated(tmp_path):
    write(tmp_path / "imgs", {"a.jpg": "", "a.txt": "a", "b/c.jpg": "", "orphan.txt": ""})
    write(tmp_path, {"t.csv": "image,caption\nx,1\ny,2", "t.jsonl": '{"image": "x", "text": ""}\n' * 3})
    write_tar(tmp_path / "t.tar", [*PAIRS, ("CREDITS.tsv", b"")])
    options = SourceOptions()
    counts = [estimate_inputs(find(tmp_path / name), options) for name in ("imgs", "t.csv", "t.jsonl", "t.tar")]
    assert counts == [3, 2, 3, 3]
    (tmp_path / "z.tar").write_bytes(gzip.compress((tmp_path / "t.tar").read_bytes()))
    assert estimate_inputs(find(tmp_path / "z.tar"), options) is None


def test_what_takes_too_long_to_count_is_extrapolated(tmp_path):
    files = [(f"{n:06}.{suffix}", b"x" * 100) for n in range(640) for suffix in ("jpg", "txt")]
    write_tar(tmp_path / "t.tar", files)
    (tmp_path / "t.csv").write_text("image,caption\n" + "x.jpg,words\n" * 200_000)
    for name, true in (("t.tar", 640), ("t.csv", 200_000)):
        estimate = estimate_inputs(find(tmp_path / name), SourceOptions(), budget_s=0.0)
        assert estimate == pytest.approx(true, rel=0.1)
