"""Folders as sources and the captions beside their images; how sources are told apart and counted."""

import gzip
import os
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_files import open_descriptors, told, write, write_tar

from rwkvclip_cli.config import PackConfig, option_fields
from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.captions import clean_captions
from rwkvclip_cli.data.packing.estimate import estimate_inputs
from rwkvclip_cli.data.packing.folders import read_folder
from rwkvclip_cli.data.packing.parquet import is_parquet
from rwkvclip_cli.data.packing.samples import (
    DEFAULT_CAPTION_KEYS,
    MAX_SIDECAR_BYTES,
    SIDECAR_PIECE_BYTES,
    BadCaptions,
    Sample,
    Sidecar,
    SourceOptions,
    find_captions,
    printable,
    texts,
)
from rwkvclip_cli.data.packing.sources import count_inputs, find_sources, read_sources


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
        ([("json", b'{"Caption": "c", "TEXT": "t"}')], ["c"]),
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


def test_a_caption_file_of_many_pieces_is_read_to_its_end(tmp_path):
    for size_bytes in (0, SIDECAR_PIECE_BYTES, 2 * SIDECAR_PIECE_BYTES + 7, MAX_SIDECAR_BYTES):
        caption = ("word " * (size_bytes // 5 + 1))[:size_bytes]
        (tmp_path / "a.txt").write_text(caption)
        assert find_captions(Sample("x", b"", sidecars=(Sidecar("txt", str(tmp_path / "a.txt")),))) == [caption]


def test_a_sidecar_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "big.txt").write_bytes(b"x" * (2**24 + 1))
    with pytest.raises(BadCaptions, match=r"big\.txt: a caption file has at most 16,777,216 bytes"):
        find_captions(Sample("x", b"", sidecars=(Sidecar("txt", str(tmp_path / "big.txt")),)))
    descriptors = open_descriptors()
    with pytest.raises(BadCaptions, match="Is a directory") as kept:
        find_captions(Sample("x", b"", sidecars=(Sidecar("txt", str(tmp_path)),)))
    assert (open_descriptors(), is_parquet(str(tmp_path)), open_descriptors()) == (descriptors, False, descriptors), (
        kept
    )


PAIRS = [item for n in range(3) for item in ((f"{n}.jpg", b"J"), (f"{n}.txt", b"caption"))]


def find(*paths: Path, **options: object) -> list[tuple[str, str]]:
    return find_sources([str(path) for path in paths], SourceOptions(**options))  # type: ignore[arg-type]


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


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".tar", ".tar.gz", ""])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_source_that_gives_its_bytes_once_or_for_ever_is_refused_unread(tmp_path, kind, suffix):
    source = tmp_path / f"rows{suffix}"
    if kind == "pipe":
        os.mkfifo(source)
    else:
        source.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="not a regular file but a pipe"):
        find(source)


def test_a_link_to_itself_is_one_reject_of_its_folder(tmp_path):
    write(tmp_path, {"a.jpg": "", "a.txt": "a"})
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    items = list(read_sources(find(tmp_path), SourceOptions()))
    assert [item.source for item in items] == [str(tmp_path / "a.jpg"), str(tmp_path / "loop.jpg")]


def test_a_dangling_source_is_not_proposed_in_its_own_place(tmp_path):
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(UsageError) as fault:
        find(tmp_path / "gone")
    assert fault.value.hint == f"ls {tmp_path}"


def test_a_misspelt_source_gets_the_nearest_name(tmp_path):
    write(tmp_path, {"images/a.jpg": ""})
    with pytest.raises(UsageError) as fault:
        find(tmp_path / "imagse")
    assert fault.value.hint == str(tmp_path / "images")


def test_a_folder_of_tars_is_read_in_order_when_asked(tmp_path):
    for name in ("b.tar", "a.tar"):
        write_tar(tmp_path / name, PAIRS[:2])
    options = SourceOptions(format="webdataset")
    items = list(read_sources(find_sources([str(tmp_path)], options), options))
    assert [source for source, _ in told(items, tmp_path)] == ["a.tar:0.jpg", "b.tar:0.jpg"]


def test_the_number_of_inputs_is_estimated(tmp_path):
    write(tmp_path / "imgs", {"a.jpg": "", "a.txt": "a", "b/c.jpg": "", "orphan.txt": ""})
    write(tmp_path, {"t.csv": "image,caption\nx,1\ny,2", "t.jsonl": '{"image": "x", "text": ""}\n' * 3})
    write_tar(tmp_path / "t.tar", [*PAIRS, ("CREDITS.tsv", b"")])
    options = SourceOptions()
    counts = [estimate_inputs(find(tmp_path / name), options) for name in ("imgs", "t.csv", "t.jsonl", "t.tar")]
    assert counts == [3, 2, 3, 3]
    (tmp_path / "z.tar").write_bytes(gzip.compress((tmp_path / "t.tar").read_bytes()))
    assert estimate_inputs(find(tmp_path / "z.tar"), options) is None


def test_what_names_or_footers_tell_is_counted_in_one_way_whole_or_not_at_all(tmp_path):
    write(tmp_path / "imgs", {f"{number}.jpg": "" for number in range(1030)})
    pq.write_table(pa.table({"image": ["x", "y"], "caption": ["a", "b"]}), tmp_path / "t.parquet")
    write(tmp_path, {"t.csv": "image,caption\nx,1"})
    options = SourceOptions()
    for name, count in (("imgs", 1030), ("t.parquet", 2)):
        found = find(tmp_path / name)
        assert count_inputs(found, options) == estimate_inputs(found, options) == count
        assert count_inputs(found, options, lambda: True) is estimate_inputs(found, options, budget_s=-1.0) is None
    both = [*find(tmp_path / "imgs"), *find(tmp_path / "t.parquet")]
    assert count_inputs(both, options) == estimate_inputs(both, options) == 1032
    assert count_inputs([*both, *find(tmp_path / "t.csv")], options) is None
    assert estimate_inputs([*both, *find(tmp_path / "t.csv")], options) == 1033


def test_what_takes_too_long_to_count_is_extrapolated(tmp_path):
    files = [(f"{n:06}.{suffix}", b"x" * 100) for n in range(640) for suffix in ("jpg", "txt")]
    write_tar(tmp_path / "t.tar", files)
    (tmp_path / "t.csv").write_text("image,caption\n" + "x.jpg,words\n" * 200_000)
    for name, true in (("t.tar", 640), ("t.csv", 200_000)):
        estimate = estimate_inputs(find(tmp_path / name), SourceOptions(), budget_s=0.0)
        assert estimate == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize(
    ("value", "captions"),
    [
        (["a", ["b", ["c"]], 3], ["a", "b", "c", "3"]),
        ([float("nan"), float("inf"), "x"], ["x"]),
        (10**6000, []),
        (True, []),
        ({"a": "b"}, []),
    ],
    ids=["nested", "not-finite", "thousands-of-digits", "bool", "mapping"],
)
def test_what_speaks_in_a_cell(value, captions):
    assert texts(value) == captions


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("imgs/cat.JPG", "its folder, imgs"),
        ("cat.webp", r"its folder, \."),
        ("imgs/old.rec", r"rwkvclip inspect imgs/old\.rec --export FOLDER"),
        ("imgs/pairs.dat", "--format table, or webdataset, for imgs/pairs.dat"),
        ("imgs/not/there/x.csv", "ls imgs$"),
        ("nowhere/x.csv", r"ls \.$"),
    ],
)
def test_a_source_that_is_none_leads_to_one(tmp_path, monkeypatch, source, hint):
    monkeypatch.chdir(tmp_path)
    Path("imgs").mkdir()
    if Path(source).parent.is_dir():
        Path(source).write_bytes(b"x")
    with pytest.raises(UsageError) as error:
        find_sources([source], SourceOptions())
    assert re.search(hint, error.value.hint or "")


def test_lists_nested_deeper_than_calls_may_be():
    nested = ["deep"]
    for _ in range(100_000):
        nested = [nested]
    assert texts(nested) == ["deep"]


def test_help_says_where_captions_are_looked_for():
    (sources, *_) = option_fields(PackConfig)
    assert f"the first of {', '.join(DEFAULT_CAPTION_KEYS)} there is" in sources.metadata["help"]
