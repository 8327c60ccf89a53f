"""Tables as sources: columns, quoting, encodings, and rows that cannot be trusted."""

import json
from pathlib import Path

import pytest
from pack_files import told

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.packing.samples import Reject, Sample, SourceOptions
from rwkvclip_cli.data.packing.sources import find_sources
from rwkvclip_cli.data.packing.tables import read_table


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


def test_a_quoted_cell_of_a_csv_may_hold_tabs_and_line_ends(tmp_path):
    content = 'image,caption\na.jpg,"one\n\ttwo"\nb.jpg,fine\n'
    assert table(tmp_path / "t.csv", content) == [("t.csv:2:a.jpg", ["one\n\ttwo"]), ("t.csv:4:b.jpg", ["fine"])]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("Image", "Caption"), ["c"]),
        (("JPG", "TEXT"), ["c"]),
        (("image", "id", "Title", "caption"), ["caption of its own"]),
        (("Image", "caption", "Caption"), ["c"]),
        (("file_name", "Captions"), ["c"]),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_the_usual_columns_are_found_in_any_case_in_every_kind_of_table(tmp_path, names, found, suffix):
    values = [{0: "a.jpg", 1: "c", 3: "caption of its own"}.get(at, "other") for at in range(len(names))]
    if suffix == "jsonl":
        content = json.dumps(dict(zip(names, values, strict=True)))
    else:
        delimiter = "," if suffix == "csv" else "\t"
        content = "\n".join(delimiter.join(cells) for cells in (names, values))
    path = tmp_path / f"t.{suffix}"
    (kept,) = table(path, content)
    assert kept == (f"t.{suffix}:{1 if suffix == 'jsonl' else 2}:a.jpg", found)
    assert find_sources([str(path)], SourceOptions()) == [(str(path), "table")]


def test_named_columns_are_taken_as_they_are_spelled(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"Image": "a.jpg", "Caption": "c"}')
    with pytest.raises(UsageError, match="no column 'image' among Image, Caption") as fault:
        find_sources([str(tmp_path / "t.jsonl")], SourceOptions(image_key="image"))
    assert fault.value.hint == "--image-key Image"


def test_of_two_columns_with_one_name_the_first_counts_and_short_rows_end_in_blanks(tmp_path):
    content = "image,caption,caption\na.jpg,one,two\nb.jpg\n"
    assert table(tmp_path / "t.csv", content) == [("t.csv:2:a.jpg", ["one"]), ("t.csv:3:b.jpg", [])]


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


@pytest.mark.parametrize(
    ("content", "options", "message", "hint"),
    [
        ("file,caption\n", {}, r"no image column among file, caption", "--image-key"),
        ("image,words\n", {}, r"no caption column among image, words", "--caption-key"),
        ("images,texts\n", {}, r"no image column among images, texts", "--image-key images"),
        ("image,captoin\n", {"caption_keys": ("caption",)}, r"no column 'caption'", "--caption-key captoin"),
        ("image,caption\n", {"image_key": "imgae"}, r"no column 'imgae'", "--image-key image"),
        ("", {}, "no rows", ""),
    ],
)
def test_a_table_without_the_columns_is_refused_before_any_work(tmp_path, content, options, message, hint):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(UsageError, match=message) as fault:
        find_sources([str(tmp_path / "t.csv")], SourceOptions(**options))
    assert hint in fault.value.hint


@pytest.mark.parametrize("cell", ["[{[]}]", "[0x" + "f" * 5000 + "]", "[" * 5000, "[1, 2"])
def test_a_cell_that_only_looks_like_a_list_kills_nothing(tmp_path, cell):
    (tmp_path / "t.csv").write_text(f'image,captions\nx.jpg,"{cell}"\n')
    (item,) = read_table(str(tmp_path / "t.csv"))
    assert type(item).__name__ in ("Sample", "Reject")


def test_a_csv_cell_that_spells_token_ids_is_token_ids(tmp_path):
    content = 'image,caption\na.jpg,"[49406, 320, 49407]"\nb.jpg,"[49406.0,320.0]"\nc.jpg,[49406]\nd.jpg,"[1, 2]"\n'
    (tmp_path / "t.csv").write_text(content)
    captions = [item.captions for item in read_table(str(tmp_path / "t.csv")) if isinstance(item, Sample)]
    assert captions == [((49406, 320, 49407),), ((49406.0, 320.0),), ("[49406]",), ("[1, 2]",)]


def test_of_two_keys_with_one_name_in_a_jsonl_the_last_counts(tmp_path):
    content = '{"image": "a.jpg", "image": "b.jpg", "caption": "x", "caption": "\\ud83d"}'
    assert table(tmp_path / "t.jsonl", content) == [("t.jsonl:1:b.jpg", ["\ufffd"])]


def test_addresses_of_any_kind_are_no_files(tmp_path):
    found = table(tmp_path / "t.csv", "image,caption\ns3://b/a.jpg,x\nC:/a.jpg,y\nfile:///a.jpg,z\n")
    assert [what for _, what in found] == ["missing-image", ["y"], "missing-image"]
