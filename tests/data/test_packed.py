"""Opening a packed set: what fits together opens, what does not says what is wrong."""

import json
from pathlib import Path

import pytest
from helpers import write_packed

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packed import open_packed


def test_what_a_packed_set_knows(tmp_path: Path) -> None:
    packed = open_packed(write_packed(tmp_path / "a.rec", 3))
    assert (packed.count, packed.captions, packed.context_length) == (3, 3, 16)
    assert packed.ordinals(packed.offsets[[2, 0]]).tolist() == [2, 0]


def test_a_file_without_manifest_is_taken_as_the_published_layout(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3, context_length=77)
    rec.with_suffix(".manifest.json").unlink()
    assert (open_packed(rec).captions, open_packed(rec).context_length) == (3, 77)


def test_an_epochs_index_holds_the_window_alone(tmp_path: Path) -> None:
    packed = open_packed(write_packed(tmp_path / "a.rec", 5))
    packed.write_index(tmp_path / "part.idx", [(0, 2), (4, 5)])
    lines = [line.split("\t") for line in (tmp_path / "part.idx").read_text().splitlines()]
    assert [(int(key), int(offset)) for key, offset in lines] == [(i, packed.offsets[i]) for i in (0, 1, 4)]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.idx", None, "a.idx: no such file"),
        ("a.rec", None, "a.rec: no such file"),
        ("a.idx", "", "the index is empty"),
        ("a.idx", "0\t0\nx\t5\n", "line 2"),
        ("a.idx", "0\t0\n1\t99999999\n", "offset 99,999,999 lies outside"),
        ("a.idx", "0\t0\n", "lists 1 records, a.manifest.json says 3"),
        ("a.manifest.json", "{", "damaged manifest"),
        ("a.manifest.json", "{}", "damaged manifest"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(RwkvClipError, match=message):
        open_packed(rec)


def test_another_suffix_is_not_a_packed_set(tmp_path: Path) -> None:
    with pytest.raises(RwkvClipError, match=r"not a packed \.rec file") as error:
        open_packed(tmp_path)
    assert error.value.hint == f"rwkvclip pack {tmp_path} data.rec"


def test_labels_of_another_width_are_refused(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3, captions=2, context_length=77)
    rec.with_suffix(".manifest.json").unlink()
    with pytest.raises(
        RwkvClipError, match=r"its first record has 154 label values, not 3 captions of 77 tokens \(231\)"
    ):
        open_packed(rec)


def test_an_index_of_another_file_is_refused(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    rec.with_suffix(".idx").write_text("0\t4\n1\t700\n2\t1400\n")
    with pytest.raises(RwkvClipError, match="no record at byte 4, where its index has the first one"):
        open_packed(rec)


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_an_epochs_index_from_any_line_ends(tmp_path: Path, ending: str) -> None:
    rec = write_packed(tmp_path / "a.rec", 4)
    lines = rec.with_suffix(".idx").read_text().splitlines()
    text = "\r\n".join(lines) + "\r\n" if ending == "\r\n" else "\n".join(lines) + ending
    rec.with_suffix(".idx").write_bytes(text.encode())
    open_packed(rec).write_index(tmp_path / "part.idx", [(0, 1), (3, 4)])
    assert (tmp_path / "part.idx").read_bytes().split() == [word.encode() for i in (0, 3) for word in lines[i].split()]
    assert (tmp_path / "part.idx").read_bytes().endswith(b"\n")


def test_a_file_cut_behind_its_last_offset_is_refused(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    manifest = json.loads(rec.with_suffix(".manifest.json").read_text())
    manifest["size_bytes"] = rec.stat().st_size
    rec.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    assert open_packed(rec).count == 3
    rec.write_bytes(rec.read_bytes()[:-8])
    with pytest.raises(RwkvClipError, match="cut off or replaced"):
        open_packed(rec)


@pytest.mark.parametrize(
    "text", ['{"count": 3, "captions": 3}', '{"count": 3, "captions": 3, "context_length": "x"}', "[]"]
)
def test_a_manifest_that_lacks_a_number_is_damaged(tmp_path: Path, text: str) -> None:
    rec = write_packed(tmp_path / "a.rec", 3)
    rec.with_suffix(".manifest.json").write_text(text)
    with pytest.raises(RwkvClipError, match="damaged manifest"):
        open_packed(rec)
