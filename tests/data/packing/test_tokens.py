"""Captions that are token ids: columns, .npy files, what joins and what cannot; the published YFCC15M layout."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_files import files_of, folder_of, photo, write, write_tar

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.packing.pack import PackSummary, pack
from rwkvclip_cli.data.packing.samples import Ignored, Reject, Sample, texts_or_tokens
from rwkvclip_cli.data.packing.tokens import BadTokens, join_tokens, open_tokens, read_tokens, token_slots
from rwkvclip_cli.data.recordio import RecordReader

LENGTH = 8
TOKENIZER = Tokenizer()


def ids(text: str, length: int = LENGTH) -> list[int]:
    return TOKENIZER.tokenize(text, length)


def packed(out: Path, *sources: Path, **options: Any) -> tuple[PackSummary, list[list[list[float]]]]:
    """The summary, and the slots of each record."""
    options = {"context_length": LENGTH, "captions": 3, "proof": "structure", "workers": 1} | options
    summary = pack(PackConfig(sources=tuple(map(str, sources)), out=str(out), **options))
    length = options["context_length"]
    with RecordReader(out, out.with_suffix(".idx")) as reader:
        labels = [list(reader.record(number).labels) for number in range(len(reader))]
    return summary, [[row[at : at + length] for at in range(0, len(row), length)] for row in labels]


def reasons(out: Path) -> list[tuple[str, str]]:
    lines = out.with_suffix(".rejects.jsonl").read_text().splitlines()
    return [(row["source"].rpartition("/")[2], row["reason"]) for row in map(json.loads, lines)]


def test_numbers_are_cut_into_slots_and_blank_slots_say_nothing():
    assert token_slots((1, 2, 0, 0, 0, 0, 49407, 0, 0), 3) == [(1, 2, 0), (49407, 0, 0)]
    assert token_slots((1.0, 2.0, 0.0), 3) == [(1, 2, 0)]
    assert token_slots((), 3) == []


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1, 2), "2 token ids fill no whole number of slots of 3"),
        ((1, 49408, 0), "49408 at place 1 is no token id; they go from 0 to 49407"),
        ((-1, 2, 0), "-1 at place 0"),
        ((1, 2.5, 0), "2.5 at place 1"),
        ((1, float("nan"), 0), "nan at place 1"),
        ((1, 2, float("inf")), "inf at place 2"),
        ((None, 2, 0), "None at place 0"),
        ((1, 2, 10**400), "at place 2"),
    ],
)
def test_numbers_that_are_no_ids_are_named_with_their_place(numbers, message):
    with pytest.raises(BadTokens, match=message):
        token_slots(numbers, 3)


def test_lists_of_numbers_are_tokens_and_nothing_else_is():
    assert texts_or_tokens([[1, 2], [3]]) == [(1, 2, 3)]
    assert texts_or_tokens([1.0, None]) == [(1.0, None)]
    assert texts_or_tokens([None, None]) == []
    assert texts_or_tokens([]) == []
    assert texts_or_tokens([1, "a"]) == ["1", "a"]
    assert texts_or_tokens([True]) == []
    assert texts_or_tokens(7) == ["7"]


COLUMNS = {
    "int64": pa.list_(pa.int64()),
    "uint16 of fixed size": pa.list_(pa.uint16(), LENGTH),
    "float32": pa.list_(pa.float32()),
    "large": pa.large_list(pa.int32()),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_of_ids_is_taken_as_it_is(tmp_path, kind):
    rows = [ids("a cat"), ids("a dog"), [0] * LENGTH, None]
    columns = {"image": [photo(number) for number in range(4)], "text": pa.array(rows, COLUMNS[kind])}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    summary, slots = packed(tmp_path / "out.rec", tmp_path / "t.parquet")
    assert slots == [[ids("a cat")] * 3, [ids("a dog")] * 3]
    assert reasons(tmp_path / "out.rec") == [("t.parquet:3", "missing-caption"), ("t.parquet:4", "missing-caption")]
    assert summary.statistics["token_slots_unmarked"] == 0


def test_a_jsonl_holds_ids_too_and_columns_fill_the_slots_in_their_order(tmp_path):
    (tmp_path / "a.jpg").write_bytes(photo())
    row = {"image": "a.jpg", "words": "a bird", "raw": ids("a cat"), "pair": [ids("x"), ids("y")]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    source = tmp_path / "t.jsonl"
    _, slots = packed(tmp_path / "a.rec", source, caption_key=("words", "raw"))
    assert slots == [[ids("a bird"), ids("a cat"), ids("a bird")]]
    summary, slots = packed(tmp_path / "b.rec", source, caption_key=("pair", "words", "raw"))
    assert slots == [[ids("x"), ids("y"), ids("a bird")]]
    assert summary.statistics["captions_dropped"] == 1


def test_rows_of_bad_ids_are_rejects_that_say_why(tmp_path):
    good = ids("a cat")
    rows = [good, good[:-1], [49408, *good[1:]], [-1, *good[1:]], [None, *good[1:]], good * 2]
    columns = {"image": [photo()] * 6, "text": pa.array(rows, pa.list_(pa.int32()))}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    _, slots = packed(tmp_path / "out.rec", tmp_path / "t.parquet")
    assert slots == [[good] * 3, [good] * 3]
    assert reasons(tmp_path / "out.rec") == [(f"t.parquet:{row}", "bad-tokens") for row in (2, 3, 4, 5)]


def test_ids_of_another_tokenizer_are_taken_but_told(tmp_path):
    columns = {"image": [photo()], "text": [[101, 2, 3, 102, 0, 0, 0, 0]]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    summary, slots = packed(tmp_path / "out.rec", tmp_path / "t.parquet")
    assert slots[0][0] == [101, 2, 3, 102, 0, 0, 0, 0]
    assert "token slots without CLIP's start or end token: 1; ids of another tokenizer?" in summary.text()


def yfcc15m(root: Path, rows: int = 9) -> np.ndarray[Any, Any]:
    """The published layout in small: numbered parts with pictures as structs and the generated description as floats,
    77 of them; raw and synthetic captions as rows of 154 in one file for all parts."""
    root.mkdir()
    pictures = [{"bytes": photo(row), "path": None} for row in range(rows)]
    generated = [list(map(float, ids(f"generated {row}", 77))) for row in range(rows)]
    for part, start in enumerate(range(0, rows, 4)):
        columns = {"images": pictures[start : start + 4], "texts": generated[start : start + 4]}
        pq.write_table(pa.table(columns), root / f"train-{part + 1:05}-of-00003.parquet", row_group_size=2)
    tokens = np.array([ids(f"raw {row}", 77) + ids(f"synthetic {row}", 77) for row in range(rows)])
    np.save(root.parent / "tokens.npy", tokens)
    return tokens


@pytest.mark.parametrize("source", ["folder", "parts"])
def test_the_published_yfcc15m_layout_joins_in_one_command(tmp_path, source):
    tokens = yfcc15m(tmp_path / "data")
    sources = [tmp_path / "data"] if source == "folder" else sorted((tmp_path / "data").iterdir())
    options = {"image_key": "images", "caption_key": ("texts",), "tokens": str(tmp_path / "tokens.npy")}
    summary, slots = packed(tmp_path / "out.rec", *sources, context_length=77, **options)
    assert (summary.count, summary.rejects, summary.statistics["captions_dropped"]) == (9, 0, 0)
    for row, (raw, synthetic, generated) in enumerate(slots):
        assert raw + synthetic == tokens[row].tolist()
        assert generated == ids(f"generated {row}", 77)
    assert "columns: image from images; captions from texts" in summary.text()
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["options"]["tokens"] == str(tmp_path / "tokens.npy")


def test_the_joined_set_is_the_same_for_any_number_of_workers(tmp_path):
    yfcc15m(tmp_path / "data", rows=70)
    options = {"image_key": "images", "caption_key": ("texts",), "tokens": str(tmp_path / "tokens.npy")}
    for workers in (1, 3):
        (tmp_path / f"w{workers}").mkdir()
        packed(tmp_path / f"w{workers}" / "out.rec", tmp_path / "data", context_length=77, workers=workers, **options)
    one, three = (files_of(tmp_path / f"w{workers}" / "out.rec") for workers in (1, 3))
    assert one == three


@pytest.mark.parametrize("shape", [(3, LENGTH), (3, 2 * LENGTH), (3, 2, LENGTH)])
@pytest.mark.parametrize("dtype", ["<i8", ">i4", "<u2", "<f4"])
def test_shapes_and_types_of_a_npy(tmp_path, shape, dtype):
    expected = (np.arange(np.prod(shape)) + 49_000).reshape(3, -1)
    np.save(tmp_path / "t.npy", expected.reshape(shape).astype(dtype))
    tokens = open_tokens(str(tmp_path / "t.npy"), LENGTH)
    assert (tokens.rows, tokens.width) == (3, expected.shape[1])
    assert [list(row) for row in read_tokens(tokens)] == expected.tolist()


def saved(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (saved(np.zeros((3, LENGTH + 1), int)), rf"shape \(3, {LENGTH + 1}\); .* {LENGTH} ids a slot"),
        (saved(np.zeros(LENGTH, int)), r"shape"),
        (saved(np.zeros((3, 2, 2 * LENGTH), int)), r"three axes are \(rows, slots, 8\)"),
        (saved(np.zeros((1, 1, 1, LENGTH), int)), r"shape"),
        (saved(np.zeros((3, LENGTH), bool)), r"dtype bool"),
        (saved(np.zeros((3, LENGTH), np.float16)), r"dtype float16"),
        (saved(np.zeros((3, LENGTH), np.int16)), r"dtype int16 does not hold ids up to 49407"),
        (saved(np.zeros((3, LENGTH), "U3")), r"dtype <U3"),
        (saved(np.array([[None] * LENGTH]), allow_pickle=True), r"not a whole \.npy array"),
        (saved(np.asfortranarray(np.zeros((3, LENGTH), int))), r"stored column by column"),
        (saved(np.zeros((3, LENGTH), int))[:-1], r"not a whole \.npy array"),
        (saved(np.zeros((3, LENGTH), int))[:40], r"not a whole \.npy array"),
        (saved(np.zeros((3, LENGTH), int)).replace(b"{'descr", b"{(descr"), r"not a whole \.npy array"),
        (b"", r"not a whole \.npy array"),
        (b"PK\x03\x04 an archive", r"not a whole \.npy array"),
    ],
)
def test_a_npy_that_is_no_array_of_ids_is_refused(tmp_path, content, message):
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_tokens(str(tmp_path / "t.npy"), LENGTH)


def test_a_npy_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        open_tokens(str(tmp_path / "t.npy"), LENGTH)


def test_a_npy_that_is_cut_while_it_is_read_ends_with_an_error(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros((3, LENGTH), np.int64))
    tokens = open_tokens(str(tmp_path / "t.npy"), LENGTH)
    (tmp_path / "t.npy").write_bytes(saved(np.zeros((3, LENGTH), np.int64))[:-1])
    with pytest.raises(RwkvClipError, match="it was cut"):
        list(read_tokens(tokens))


def rows_of(path: Path, count: int) -> str:
    np.save(path, np.array([ids(f"row {row}") for row in range(count)]))
    return str(path)


def test_a_folder_of_images_takes_a_row_each_with_or_without_captions(tmp_path):
    """Caption files without an image are no samples; the token file is no picture."""
    root = folder_of(tmp_path / "imgs", 3)
    (root / "001.txt").unlink()
    (root / "0005.txt").write_text("no image")
    (root / "002.jpg").write_bytes(b"damaged")
    write(root, {"z.jpg": photo(9)})
    tokens = rows_of(root / "tokens.npy", 4)
    _, slots = packed(tmp_path / "out.rec", root, tokens=tokens)
    assert slots == [
        [ids("row 0"), ids("picture 0"), ids("row 0")],
        [ids("row 1")] * 3,
        [ids("row 3")] * 3,
    ]
    assert reasons(tmp_path / "out.rec") == [("0005.txt", "missing-image"), ("002.jpg", "unreadable-image")]


def test_a_csv_without_captions_takes_its_rows_and_rejected_ones_use_theirs_up(tmp_path):
    write(tmp_path, {"a.jpg": photo(1), "b.jpg": photo(2), "t.csv": "image\na.jpg\n\nnone.jpg\nx,y,z\nb.jpg\n"})
    _, slots = packed(tmp_path / "out.rec", tmp_path / "t.csv", tokens=rows_of(tmp_path / "t.npy", 4))
    assert [record[0] for record in slots] == [ids("row 0"), ids("row 3")]


def test_a_tar_of_images_alone_takes_a_row_each(tmp_path):
    tar = write_tar(
        tmp_path / "s.tar", [("CREDITS.tsv", b"x"), ("a.jpg", photo(1)), ("b.png", b"no"), ("c.jpg", photo(3))]
    )
    _, slots = packed(tmp_path / "out.rec", tar, tokens=rows_of(tmp_path / "t.npy", 3))
    assert [record[0] for record in slots] == [ids("row 0"), ids("row 2")]


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("kind", ["parquet", "folder", "csv", "tar"])
def test_another_number_of_rows_is_an_error_and_nothing_is_written(tmp_path, kind, rows):
    root = folder_of(tmp_path / "imgs", 3)
    names = [f"imgs/{number:03}.jpg" for number in range(3)]
    (tmp_path / "t.csv").write_text("\n".join(["image", *names]))
    pq.write_table(pa.table({"image": names}), tmp_path / "t.parquet")
    write_tar(tmp_path / "t.tar", [(f"{number}.jpg", photo(number)) for number in range(3)])
    source = {"folder": root}.get(kind, tmp_path / f"t.{kind}")
    with pytest.raises(RwkvClipError, match=rf"{rows} rows, but the sources hold (3|more) samples"):
        packed(tmp_path / "out.rec", source, tokens=rows_of(tmp_path / "t.npy", rows))
    assert list(tmp_path.glob("*out*")) == []


def test_behind_a_damaged_tar_no_row_is_guessed(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros((2, LENGTH), int))
    tokens = open_tokens(str(tmp_path / "t.npy"), LENGTH)
    items = [Sample("a.jpg", b""), Ignored("x"), Reject("s.tar", "damaged-tar", "s.tar: cut off"), Sample("b.jpg", b"")]
    with pytest.raises(RwkvClipError, match=r"s\.tar: cut off; which row of --tokens"):
        list(join_tokens(items, tokens))
