"""Reading goes on behind any input, and says where it stands however far it has read ahead."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_files import folder_of, photo, write_tar

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packing import tars
from rwkvclip_cli.data.packing.parquet import read_parquet
from rwkvclip_cli.data.packing.reading import Position, Reading, parts_of
from rwkvclip_cli.data.packing.samples import Ignored, SourceOptions
from rwkvclip_cli.data.packing.sources import find_sources
from rwkvclip_cli.data.packing.tars import read_tar

OPTIONS = SourceOptions()
# Images before and behind their captions, files of no sample inside one, an image that lacks its caption and the other
# way round, an image that is a folder's.
MEMBERS = [
    *[("a.jpg", b"A"), ("LICENSE", b"l"), ("a.txt", b"a")],
    *[("b.txt", b"b"), ("README", b"r"), ("b.jpg", b"B"), ("c.jpg", b"C"), ("d.txt", b"d"), ("x/e.jpg", b"E")],
    *[("x/e.json", b'{"caption": "e"}'), ("f.csv", b"f"), ("g.jpg", b"G"), ("g.txt", b"g")],
]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("cut", [0, 1024 + 512, 512 * 12])
def test_a_tar_goes_on_behind_each_of_its_inputs(tmp_path, mode, cut):
    path = write_tar(tmp_path / "t.tar", MEMBERS, mode)
    if cut and mode == "w":
        path.write_bytes(path.read_bytes()[: len(MEMBERS) * 1024 - cut])
    items = list(read_tar(str(path)))
    assert len(items) > 4
    for behind, item in enumerate(items, 1):
        if not isinstance(item, Ignored) and getattr(item, "reason", "") != "damaged-tar":
            assert list(read_tar(str(path), behind=behind)) == items[behind:]


def test_what_is_passed_in_a_tar_is_not_read(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "t.tar", [(f"{n}.{end}", b"x") for n in range(9) for end in ("jpg", "txt")])
    read = []
    really = tars._read
    monkeypatch.setattr(tars, "_read", lambda tar, info: (read.append(info.name), really(tar, info))[1])
    assert len(list(read_tar(str(path), behind=6))) == 3
    assert read == [f"{n}.{end}" for n in (6, 7, 8) for end in ("jpg", "txt")]


def test_a_parquet_file_goes_on_behind_each_row_damaged_ones_too(tmp_path):
    path = tmp_path / "t.parquet"
    table = pa.table({"image": [photo(n) for n in range(8)], "caption": [f"row {n}" for n in range(8)]})
    pq.write_table(table, path, row_group_size=3, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(photo(4)) + 100] ^= 1
    path.write_bytes(data)
    items = list(read_parquet(str(path), OPTIONS))
    assert [type(item).__name__ for item in items] == ["Sample"] * 3 + ["Reject"] * 3 + ["Sample"] * 2
    for behind in range(1, 9):
        assert list(read_parquet(str(path), OPTIONS, behind)) == items[behind:]


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """A folder, an empty one, two tars and a table."""
    folder_of(tmp_path / "imgs", 3)
    (tmp_path / "none").mkdir()
    write_tar(tmp_path / "a.tar", [("1.jpg", b"x"), ("1.txt", b"x"), ("2.jpg", b"x"), ("2.txt", b"x")])
    write_tar(tmp_path / "b.tar", [("1.jpg", b"x"), ("1.txt", b"x")])
    (tmp_path / "t.csv").write_text("image,caption\nimgs/000.jpg,a\nimgs/001.jpg,b\n")
    return [str(tmp_path / name) for name in ("imgs", "none", "a.tar", "b.tar", "none", "t.csv")]


@pytest.mark.parametrize("ahead", [0, 1, 3, 99])
def test_positions_follow_what_is_done_and_reading_goes_on_at_each(sources, ahead):
    parts = parts_of(find_sources(sources, OPTIONS))
    whole = [item.source for item in Reading(parts, OPTIONS).items()]
    assert len(whole) == 8
    reading = Reading(parts, OPTIONS)
    items = reading.items()
    waiting = []
    positions = [reading.position]
    for source in whole:
        while len(waiting) <= ahead and (item := next(items, None)):
            waiting.append(item.source)
        assert waiting.pop(0) == source
        reading.advance(source)
        positions.append(reading.position)
    assert [(position.part, position.items) for position in positions[1:]] == [
        *[(0, 1), (0, 2), (0, 3)],
        *[(2, 1), (2, 2), (3, 1), (5, 1), (5, 2)],
    ]
    for done, position in enumerate(positions):
        again = Reading(parts, OPTIONS, position)
        assert [item.source for item in again.items()] == whole[done:]
        for source in whole[done:]:
            again.advance(source)
        assert again.position == positions[-1]


def test_a_listing_that_has_become_shorter_is_refused(sources):
    parts = parts_of(find_sources(sources, OPTIONS))
    with pytest.raises(UsageError, match=r"imgs: its first 4 inputs are not those that were packed"):
        Reading(parts, OPTIONS, Position(0, 4, 0))


def test_a_file_that_vanishes_before_its_turn_is_named(sources):
    parts = parts_of(find_sources(sources, OPTIONS))
    Path(sources[3]).unlink()
    with pytest.raises(RwkvClipError, match=r"b\.tar has vanished since this pack began"):
        list(Reading(parts, OPTIONS).items())
