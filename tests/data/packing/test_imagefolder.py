"""Hugging Face image folders: a table of file names and captions beside the images, or one a split."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_files import photo, told, write

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.packing.folders import read_folder
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.packing.samples import SourceOptions
from rwkvclip_cli.data.packing.sources import columns_taken, find_sources, read_sources
from rwkvclip_cli.data.packing.tables import Columns


def folder(root: Path, **options: Any) -> list[tuple[str, object]]:
    chosen = SourceOptions(**options)
    return told(list(read_sources(find_sources([str(root)], chosen), chosen)), root)


def test_rows_come_in_their_order_and_then_what_they_do_not_list(tmp_path):
    rows = [
        "\ufefffile_name,text",
        'b.jpg,"a dog, NA"',
        "./sub//c d.JPG,None",
        "none.jpg,gone",
        ",no name",
        "b.jpg,again",
    ]
    table = "\r\n".join(rows)
    names = ["a.jpg", "b.jpg", "sub/c d.JPG", "sub/e.jpg", "sub/e.txt", "f.txt"]
    write(tmp_path, {"metadata.csv": table} | dict.fromkeys(names, "x"))
    assert folder(tmp_path) == [
        ("metadata.csv:2:b.jpg", ["a dog, NA"]),
        ("metadata.csv:3:./sub//c d.JPG", ["None"]),
        ("metadata.csv:4:none.jpg", ["gone"]),
        ("metadata.csv:5", "missing-image"),
        ("metadata.csv:6:b.jpg", ["again"]),
        ("a.jpg", "missing-caption"),
        ("f.txt", "missing-image"),
        ("sub/e.jpg", ["x"]),
    ]
    assert find_sources([str(tmp_path)], SourceOptions()) == [(str(tmp_path), "folder")]


def metadata(root: Path, kind: str, names: list[str]) -> None:
    if kind == "parquet":
        pq.write_table(pa.table({"file_name": names, "text": names}), root / "metadata.parquet")
    elif kind == "jsonl":
        (root / "metadata.jsonl").write_text("\n".join(json.dumps({"file_name": name, "text": name}) for name in names))
    else:
        (root / "metadata.csv").write_text("\n".join(["file_name,text", *(f"{name},{name}" for name in names)]))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_each_split_has_its_own_table_of_any_kind(tmp_path, kind):
    for split in ("test", "train"):
        write(tmp_path / split, {"1.jpg": split, "2.jpg": split})
        metadata(tmp_path / split, kind, ["2.jpg", "1.jpg"])
    line = {"csv": 2}.get(kind, 1)
    assert folder(tmp_path) == [
        (f"{split}/metadata.{kind}:{line + at}:{name}", [name])
        for split in ("test", "train")
        for at, name in enumerate(["2.jpg", "1.jpg"])
    ]
    assert folder(tmp_path, format="imagefolder") == folder(tmp_path)
    taken = columns_taken([(str(tmp_path), "folder")], SourceOptions())
    assert taken == {str(tmp_path): Columns(("file_name",), ("text",))}


def test_a_table_deep_below_counts_and_folders_beside_it_pair_by_stem(tmp_path):
    write(
        tmp_path,
        {"a/b/c/1.jpg": "", "a/b/c/metadata.csv": "file_name,text\n1.jpg,deep\n", "a/2.jpg": "", "a/2.txt": "two"},
    )
    assert folder(tmp_path) == [("a/2.jpg", ["two"]), ("a/b/c/metadata.csv:2:1.jpg", ["deep"])]


def test_a_table_above_and_one_below_list_each_image_once(tmp_path):
    tables = {"metadata.csv": "file_name,text\nsub/1.jpg,above\n", "sub/metadata.csv": "file_name,text\n2.jpg,below\n"}
    write(tmp_path, tables | {"sub/1.jpg": "", "sub/2.jpg": "", "sub/3.jpg": ""})
    assert folder(tmp_path) == [
        ("metadata.csv:2:sub/1.jpg", ["above"]),
        ("sub/metadata.csv:2:2.jpg", ["below"]),
        ("sub/3.jpg", "missing-caption"),
    ]


def test_names_that_are_awkward_are_found(tmp_path):
    names = [b"new\nline.jpg", b"a.b.JPG", b"caf\xe9.jpg", "日本 😀.jpg".encode(), b"bare"]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"")
    (tmp_path / "link.jpg").symlink_to(tmp_path / "bare")
    rows = b"".join(b'"' + name + b'",x\n' for name in [*names, b"link.jpg"])
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text\n" + rows)
    found = list(read_folder(str(tmp_path), SourceOptions()))
    assert len(found) == 6
    assert all(os.path.exists(item.image) for item in found)


def test_without_a_column_of_names_a_metadata_file_is_any_file(tmp_path):
    write(tmp_path, {"metadata.csv": "id,text\n1,x\n", "a.jpg": "", "a.txt": "x"})
    assert folder(tmp_path) == [("a.jpg", ["x"]), ("metadata.csv", [])]


def test_format_folder_pairs_by_stem_whatever_the_table_says(tmp_path):
    write(tmp_path, {"metadata.csv": "file_name,text\na.jpg,table\n", "a.jpg": "", "a.txt": "beside"})
    assert folder(tmp_path) == [("metadata.csv:2:a.jpg", ["table"])]
    assert folder(tmp_path, format="folder") == [("a.jpg", ["beside"]), ("metadata.csv", [])]


def test_a_table_without_captions_is_refused_and_its_columns_are_named(tmp_path):
    write(tmp_path / "train", {"metadata.csv": "file_name,label\na.jpg,1\n", "a.jpg": ""})
    with pytest.raises(UsageError, match=r"train/metadata\.csv: no caption column among file_name, label") as fault:
        find_sources([str(tmp_path)], SourceOptions())
    assert fault.value.hint == "--caption-key COLUMN"
    assert folder(tmp_path, caption_keys=("label",)) == [("train/metadata.csv:2:a.jpg", ["1"])]


def test_such_a_table_deep_below_costs_its_images_and_not_the_run(tmp_path):
    write(tmp_path, {"a/b/metadata.csv": "file_name,label\n1.jpg,x\n", "a/b/1.jpg": "", "2.jpg": "", "2.txt": "two"})
    assert folder(tmp_path) == [
        ("2.jpg", ["two"]),
        ("a/b/metadata.csv", "bad-row"),
        ("a/b/1.jpg", "missing-caption"),
    ]


def test_format_imagefolder_needs_a_table(tmp_path):
    write(tmp_path, {"a.jpg": "", "a.txt": "x", "metadata.csv": "id\n1\n"})
    with pytest.raises(
        UsageError, match=r"no metadata\.jsonl, metadata\.csv, metadata\.parquet with a column file_name"
    ):
        find_sources([str(tmp_path)], SourceOptions(format="imagefolder"))
    with pytest.raises(UsageError, match="is a file"):
        find_sources([str(tmp_path / "a.jpg")], SourceOptions(format="imagefolder"))


def test_a_link_back_to_the_folder_above_lists_nothing_twice(tmp_path):
    write(tmp_path, {"metadata.csv": "file_name,text\nsub/a.jpg,x\n", "sub/a.jpg": ""})
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    assert folder(tmp_path) == [("metadata.csv:2:sub/a.jpg", ["x"])]


def test_an_image_folder_packs_and_the_summary_says_from_which_columns(tmp_path):
    root = tmp_path / "imgs"
    write(
        root,
        {
            "b.jpg": photo(1),
            "a.jpg": photo(2),
            "left.jpg": photo(3),
            "metadata.csv": "file_name,text\nb.jpg,b\na.jpg,a\n",
        },
    )
    summary = pack(PackConfig(sources=(str(root),), out=str(tmp_path / "out.rec"), proof="structure", workers=1))
    assert (summary.count, summary.reasons) == (2, {"missing-caption": 1})
    assert "columns: image from file_name; captions from text" in summary.text()
    assert summary.document()["columns"] == {
        str(root): {"image": ("file_name",), "captions": ("text",), "are_named": False}
    }


def test_a_split_behind_a_link_is_read(tmp_path):
    write(tmp_path / "elsewhere", {"metadata.jsonl": '{"file_name": "A.JPG", "text": "x"}\n', "A.JPG": ""})
    root = tmp_path / "root"
    root.mkdir()
    (root / "train").symlink_to(tmp_path / "elsewhere")
    assert folder(root) == [("train/metadata.jsonl:1:A.JPG", ["x"])]
    assert folder(root, format="imagefolder") == folder(root)
