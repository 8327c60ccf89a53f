"""Parquet tables as sources: what a picture and a caption may be stored as, damage, and columns that cannot be."""

import builtins
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_files import photo, told

from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.data.packing.estimate import estimate_inputs
from rwkvclip_cli.data.packing.parquet import read_parquet
from rwkvclip_cli.data.packing.samples import Reject, Sample, SourceOptions
from rwkvclip_cli.data.packing.sources import columns_taken, find_sources, read_sources
from rwkvclip_cli.data.packing.tables import Columns


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def samples(path: Path, **options: Any) -> list[Any]:
    return list(read_parquet(str(path), SourceOptions(**options)))


def captions(path: Path, **options: Any) -> list[tuple[str, object]]:
    return told(samples(path, **options), path.parent)


IMAGE_CELLS = {
    "bytes": pa.array([b"A", b"B"]),
    "large bytes": pa.array([b"A", b"B"], pa.large_binary()),
    "fixed bytes": pa.array([b"A", b"B"], pa.binary(1)),
    "structs": pa.array([{"bytes": b"A", "path": "a.png"}, {"bytes": b"B", "path": None}]),
    "lists of structs": pa.array([[{"bytes": b"A", "path": None}], [{"bytes": b"B", "path": None}, None]]),
    "lists of bytes": pa.array([[65, 0], [66, 0]], pa.list_(pa.uint8())),
}


@pytest.mark.parametrize("kind", IMAGE_CELLS)
def test_pictures_may_lie_in_the_table(tmp_path, kind):
    first, second = samples(written(tmp_path / "t.parquet", {"image": IMAGE_CELLS[kind], "text": ["a", "b"]}))
    assert [first.image[:1], second.image[:1]] == [b"A", b"B"]
    assert second.source == f"{tmp_path}/t.parquet:2"
    if kind == "structs":
        assert first.source == f"{tmp_path}/t.parquet:1:a.png"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_pictures_may_be_paths_beside_the_table(tmp_path, kind):
    names = ["a.jpg", "/abs/b.JPG", "s p/\nc.d.jpg", "s3://bucket/d.jpg", "", None, "nul\0.jpg"]
    path = written(tmp_path / "t.parquet", {"image": pa.array(names, kind), "text": ["x"] * 7})
    found = samples(path)
    assert [item.image if isinstance(item, Sample) else item.reason for item in found] == [
        f"{tmp_path}/a.jpg",
        "/abs/b.JPG",
        f"{tmp_path}/s p/\nc.d.jpg",
        "missing-image",
        "missing-image",
        "missing-image",
        f"{tmp_path}/nul\0.jpg",
    ]
    assert "img2dataset" in found[3].message


def test_a_struct_without_bytes_is_its_path_and_without_both_nothing(tmp_path):
    cells = [{"bytes": None, "path": "a.jpg"}, {"bytes": None, "path": None}, None, {"bytes": b"", "path": "a.jpg"}]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    path = written(tmp_path / "t.parquet", {"image": pa.array(cells, kind), "text": ["x"] * 4})
    first, second, third, fourth = samples(path)
    assert first.image == f"{tmp_path}/a.jpg"
    assert (second.reason, third.reason) == ("missing-image", "missing-image")
    assert fourth.image == b""


def test_a_null_picture_falls_back_to_the_next_usual_column(tmp_path):
    columns = {"image": pa.array([b"A", None]), "path": ["ignored.jpg", "b.jpg"], "text": ["x", "y"]}
    first, second = samples(written(tmp_path / "t.parquet", columns))
    assert (first.image, second.image) == (b"A", f"{tmp_path}/b.jpg")


def test_words_that_mean_nothing_elsewhere_are_captions_and_nulls_are_none(tmp_path):
    texts = ["None", "NA", "null", "nan", " \0", "", None, "a\r\nb", "\ufeffx", "w" * 100_000]
    path = written(tmp_path / "t.parquet", {"image": ["a.jpg"] * 10, "caption": texts})
    expected = [[text] if text and text.strip(" \0") else [] for text in texts]
    assert [found for _, found in captions(path)] == expected


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([["x", "y"], [], None]), [["x", "y"], [], []]),
        (pa.array([["x", None], ["y"], [None]], pa.list_(pa.large_string())), [["x"], ["y"], []]),
        (pa.array([1.5, float("nan"), 3]), [["1.5"], [], ["3.0"]]),
        (pa.array([b"caf\xe9", b"caf\xc3\xa9", None]), [["café"], ["café"], []]),
        (pa.array(["x", "x", None]).dictionary_encode(), [["x"], ["x"], []]),
        (pa.array([True, None, False]), [[], [], []]),
        (pa.array([10**18, 2, 3], pa.timestamp("ns")), [[], [], []]),
    ],
    ids=["lists", "lists with null", "numbers", "bytes", "dictionary", "bools", "times beyond Python's"],
)
def test_captions_of_every_type(tmp_path, column, expected):
    path = written(tmp_path / "t.parquet", {"image": ["a.jpg"] * 3, "captions": column})
    assert [found for _, found in captions(path)] == expected


def invalid(values: list[bytes]) -> pa.Array:
    """Strings that are no UTF-8, as careless writers leave them: Arrow does not look."""
    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())


def test_strings_that_are_no_utf8_are_read_and_their_files_found(tmp_path):
    path = written(
        tmp_path / "t.parquet", {"image": invalid([b"caf\xe9.jpg", b"b.jpg"]), "text": invalid([b"\xe9", b"x"])}
    )
    first, second = samples(path)
    assert os.fsencode(first.image) == os.fsencode(tmp_path) + b"/caf\xe9.jpg"
    assert (first.captions, second.captions) == (("é",), ("x",))


def test_a_lone_surrogate_in_a_string_becomes_text(tmp_path):
    path = written(tmp_path / "t.parquet", {"image": ["a.jpg"], "text": invalid([b"\xed\xa0\xbd half a smile"])})
    ((_, (caption,)),) = captions(path)
    assert caption.encode().decode().endswith(" half a smile")


def test_a_table_whose_name_is_no_utf8_is_read(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9\n.PARQUET"))
    with open(path, "wb") as file:
        pq.write_table(pa.table({"image": ["a.jpg"], "text": ["x"]}), file)
    found = find_sources([str(path)], SourceOptions())
    assert [item.captions for item in read_sources(found, SourceOptions())] == [("x",)]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="not a regular file"):
        find_sources([str(tmp_path / "t.parquet")], SourceOptions())


def test_strings_that_are_no_utf8_inside_structs_and_lists(tmp_path):
    images = pa.StructArray.from_arrays([pa.array([b"A"]), invalid([b"\xe9.jpg"])], ["bytes", "path"])
    texts = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), invalid([b"\xe9", b"x"]))
    (item,) = samples(written(tmp_path / "t.parquet", {"image": images, "captions": texts}))
    assert (item.image, item.captions) == (b"A", ("é", "x"))
    assert item.source.endswith("t.parquet:1:\udce9.jpg")


def test_named_columns_fill_the_slots_in_their_order(tmp_path):
    columns = {"id": [1], "file.name": ["a.jpg"], "short": ["s"], "long": ["l"], "caption": ["not asked for"]}
    path = written(tmp_path / "t.parquet", columns)
    (item,) = samples(path, image_key="file.name", caption_keys=("long", "short", "id"))
    assert item.captions == ("l", "s", "1")


def test_of_two_columns_with_one_name_the_first_counts(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a.jpg"]), pa.array(["one"]), pa.array(["two"])], ["image", "text", "text"])
    pq.write_table(table, tmp_path / "t.parquet")
    assert captions(tmp_path / "t.parquet") == [("t.parquet:1:a.jpg", ["one"])]


def test_rows_keep_their_order_over_row_groups_and_files(tmp_path):
    for number, name in enumerate(["b.parquet", "a.PARQUET", ".hidden.parquet"]):
        names = [f"{number}{row}.jpg" for row in range(25)]
        written(tmp_path / name, {"image": names, "text": names}, row_group_size=4)
    options = SourceOptions()
    found = find_sources([str(tmp_path)], options)
    assert found == [(str(tmp_path), "parquet")]
    assert [item.captions[0] for item in read_sources(found, options)] == [
        f"{number}{row}.jpg" for number in (1, 0) for row in range(25)
    ]
    assert estimate_inputs(found, options) == 50


def test_a_folder_with_more_than_parquet_files_is_a_folder_of_images(tmp_path):
    written(tmp_path / "t.parquet", {"image": ["a.jpg"], "text": ["x"]})
    (tmp_path / "a.jpg").write_bytes(photo())
    assert find_sources([str(tmp_path)], SourceOptions()) == [(str(tmp_path), "folder")]
    (tmp_path / "_SUCCESS").write_bytes(b"")
    parquet = SourceOptions(format="parquet")
    assert [item.source for item in read_sources(find_sources([str(tmp_path)], parquet), parquet)] == [
        f"{tmp_path}/t.parquet:1:a.jpg"
    ]


def test_a_parquet_table_is_known_by_its_first_bytes_too(tmp_path):
    path = written(tmp_path / "rows", {"image": ["a.jpg"], "text": ["x"]})
    assert find_sources([str(path)], SourceOptions(format="table")) == [(str(path), "parquet")]


@pytest.mark.parametrize(
    ("columns", "options", "message", "hint"),
    [
        ({"file": ["a"], "text": ["x"]}, {}, r"no image column among file, text", "--image-key"),
        ({"image": ["a"], "words": ["x"]}, {}, r"no caption column among image, words", "--caption-key"),
        ({"image": ["a"], "txet": ["x"]}, {"caption_keys": ("text",)}, r"no column 'text'", "--caption-key txet"),
        ({"image": [1], "text": ["x"]}, {}, r"'image' holds int64; an image column holds bytes", "--image-key"),
        (
            {"image": ["a"], "text": pa.array([[1] * 76], pa.list_(pa.int16(), 76))},
            {},
            r"'text' holds 76 token ids a row, no whole number of slots of 77",
            "--context-length",
        ),
    ],
)
def test_a_table_without_the_columns_is_refused_before_any_work(tmp_path, columns, options, message, hint):
    path = written(tmp_path / "t.parquet", columns)
    with pytest.raises(UsageError, match=message) as fault:
        find_sources([str(path)], SourceOptions(**options))
    assert hint in fault.value.hint


def test_the_columns_that_are_read_can_be_told(tmp_path):
    path = written(tmp_path / "t.parquet", {"Text": ["x"], "path": ["p"], "image": [7], "caption": ["x"]})
    taken = columns_taken([(str(path), "parquet")], SourceOptions())
    assert taken == {str(path): Columns(("path",), ("caption", "Text"))}
    taken = columns_taken([(str(path), "parquet")], SourceOptions(caption_keys=("Text", "caption")))
    assert taken == {str(path): Columns(("path",), ("Text", "caption"), are_named=True)}


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100, b"image,caption\n" * 9], ids=repr)
def test_what_is_no_parquet_table_is_refused(tmp_path, content):
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(UsageError, match="not a readable parquet table"):
        find_sources([str(tmp_path / "t.parquet")], SourceOptions())


def test_a_footer_that_contradicts_itself_is_refused(tmp_path):
    """Its count of all rows (i64 in the file's metadata) and that of its row groups, each a zigzag varint."""
    path = written(tmp_path / "t.parquet", {"image": ["a.jpg"] * 33, "text": ["x"] * 33}, store_schema=False)
    data = path.read_bytes()
    at = data.rindex(b"\x16\x42")  # field of type i64, zigzag(33): the last one is the row group's
    path.write_bytes(data[:at] + b"\x16\x44" + data[at + 2 :])
    with pytest.raises(UsageError, match="its row groups do not hold its 33 rows"):
        find_sources([str(path)], SourceOptions())


def test_damage_costs_the_rest_of_its_row_group(tmp_path):
    names = [f"{row}.jpg" for row in range(12)]
    path = written(
        tmp_path / "t.parquet",
        {"image": names, "text": names},
        row_group_size=4,
        write_page_checksum=True,
        use_dictionary=False,
        compression="none",
    )
    data = path.read_bytes()
    at = data.index(b"5.jpg")
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    found = captions(path)
    assert [what for _, what in found] == [[name] for name in names[:4]] + ["bad-row"] * 4 + [
        [name] for name in names[8:]
    ]
    assert [source for source, _ in found[4:8]] == [f"t.parquet:{row}" for row in (5, 6, 7, 8)]
    assert all("damaged data" in item.message for item in samples(path) if isinstance(item, Reject))


def test_without_pyarrow_the_command_that_installs_it_is_told(tmp_path, monkeypatch):
    path = written(tmp_path / "t.parquet", {"image": ["a.jpg"], "text": ["x"]})
    real = builtins.__import__

    def without_pyarrow(name: str, *arguments: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(UnableError, match="parquet tables need pyarrow") as fault:
        find_sources([str(path)], SourceOptions())
    assert fault.value.hint == "pip install pyarrow"


@pytest.mark.slow
def test_a_million_rows_and_a_large_row_group_stay_small_in_memory(tmp_path):
    """In a process of its own, which says how much memory it has held at most."""
    import subprocess
    import sys

    with pq.ParquetWriter(
        tmp_path / "many.parquet", pa.schema([("image", pa.string()), ("text", pa.string())])
    ) as many:
        for start in range(0, 1_000_000, 100_000):
            names = [f"{row}.jpg" for row in range(start, start + 100_000)]
            many.write_table(pa.table({"image": names, "text": names}), row_group_size=100_000)
    pixels = [os.urandom(50_000) for _ in range(100)]
    written(tmp_path / "large.parquet", {"image": pixels * 60, "text": ["x"] * 6000}, use_dictionary=False)
    # VmHWM: what getrusage says starts with the memory of this process.
    program = (
        "import re, sys\n"
        "from rwkvclip_cli.data.packing.parquet import read_parquet\n"
        "from rwkvclip_cli.data.packing.samples import SourceOptions\n"
        "count = sum(1 for path in sys.argv[1:] for item in read_parquet(path, SourceOptions()))\n"
        "print(count, re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *(str(tmp_path / name) for name in ("many.parquet", "large.parquet"))],
        capture_output=True,
        text=True,
        check=True,
    )
    count, kib = map(int, done.stdout.split())
    assert count == 1_006_000
    assert kib < 500_000
