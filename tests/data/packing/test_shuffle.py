"""--shuffle: the same records in an order of the whole set, drawn from the seed alone."""

import json
import tracemalloc
from pathlib import Path

import pytest
from helpers import jpeg

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.packing import shuffle as shuffle_module
from rwkvclip_cli.data.packing.growing import GrowingFile
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.packing.record_files import RecordFiles
from rwkvclip_cli.data.packing.shuffle import Unshuffled, _line_starts, shuffle, shuffled_order
from rwkvclip_cli.data.recordio import RecordReader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "pictures"
    source.mkdir()
    for number in range(30):
        (source / f"{number:02d}.jpg").write_bytes(jpeg(number))
        (source / f"{number:02d}.txt").write_text(f"number {number}")
    (source / "alone.jpg").write_bytes(jpeg(99))
    return source


def packed(folder: Path, name: str, **options: object) -> tuple[bytes, list[bytes], list[list[str]]]:
    """The .rec's bytes, its images and the cells of its sources."""
    out = folder.parent / f"{name}.rec"
    pack(PackConfig(sources=(str(folder),), out=str(out), proof="none", **options))  # type: ignore[arg-type]
    with RecordReader(out, out.with_suffix(".idx")) as reader:
        records = [reader.record(ordinal) for ordinal in range(len(reader))]
    assert [record.id for record in records] == list(range(30))
    lines = out.with_suffix(".sources.tsv").read_text().splitlines()
    return out.read_bytes(), [bytes(record.image) for record in records], [line.split("\t") for line in lines]


def test_a_shuffled_set_holds_the_same_records_elsewhere(folder: Path) -> None:
    _, images, sources = packed(folder, "plain")
    _, shuffled, moved = packed(folder, "shuffled", shuffle=True, seed=3)
    order = shuffled_order(30, 3).tolist()
    assert sorted(order) == list(range(30)) != order
    assert shuffled == [images[place] for place in order]
    assert moved == [[str(new), *sources[old][1:]] for new, old in enumerate(order)]
    manifest = json.loads((folder.parent / "shuffled.manifest.json").read_text())
    assert (manifest["shuffled"], manifest["seed"], manifest["count"], manifest["rejects"]) == (True, 3, 30, 1)
    plain = json.loads((folder.parent / "plain.manifest.json").read_text())
    assert (plain["shuffled"], "seed" in plain) == (False, False)
    assert manifest["content_hash"] != plain["content_hash"]
    assert manifest["statistics"] == plain["statistics"]
    left = {path.name for path in folder.parent.iterdir() if path.name.startswith((".", "shuffled"))}
    assert left == {f"shuffled{end}" for end in (".rec", ".idx", ".manifest.json", ".rejects.jsonl", ".sources.tsv")}


def test_the_order_depends_on_the_seed_alone(folder: Path) -> None:
    one, two, other = (
        packed(folder, f"{w}-{s}", shuffle=True, seed=s, workers=w)[0] for w, s in ((1, 7), (2, 7), (1, 8))
    )
    assert one == two != other


def test_the_draw_stays_what_it_is() -> None:
    # Sets that users have packed depend on it.
    assert shuffled_order(8, 0).tolist() == [0, 3, 5, 7, 6, 2, 1, 4]
    assert shuffled_order(0, 0).tolist() == []


@pytest.mark.parametrize("damage", ["cut off", "another last record"])
def test_records_that_were_cut_off_are_told_before_any_is_copied(folder: Path, damage: str) -> None:
    packed(folder, "plain")
    unshuffled = Unshuffled(*(folder.parent / f"plain{end}" for end in (".rec", ".idx", ".sources.tsv")))
    data = bytearray(unshuffled.rec.read_bytes())
    if damage == "cut off":
        del data[-8:]
    else:
        data[-100] ^= 1
    unshuffled.rec.write_bytes(data)
    new = folder.parent / "new.rec"
    with RecordFiles("native", lambda _: (new, new.with_suffix(".idx"))) as files:
        sources = GrowingFile(folder.parent / "new.sources.tsv")
        # Of this seed the last record comes late.
        assert shuffled_order(30, 3).tolist().index(29) > 5
        with pytest.raises(UsageError, match=r"plain\.rec: cannot be continued: .*record 29 "):
            shuffle(unshuffled, files, sources, seed=3, after_each=lambda: None)
        sources.abandon()
    assert files.count == 0


def test_memory_is_what_the_module_says_of_it(tmp_path: Path) -> None:
    count = 1 << 18
    (tmp_path / "sources.tsv").write_bytes(b"0\n" * count)
    (tmp_path / "a.idx").write_text("".join(f"{record}\t{4 * record}\n" for record in range(count)))
    with (tmp_path / "a.rec").open("wb") as rec:
        rec.truncate(4 * count)
    with RecordReader(tmp_path / "a.rec") as reader:
        starts, offsets = _line_starts(tmp_path / "sources.tsv"), reader.offsets
        tracemalloc.start()
        order = shuffled_order(count, 0)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        places = starts.itemsize + offsets.itemsize
    held, at_most = places + order.itemsize, places + round(peak_bytes / count)
    said = " ".join(str(shuffle_module.__doc__).split())
    assert f"{held} bytes a record ({at_most} while the order is drawn)" in said
