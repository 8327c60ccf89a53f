"""Files that grow, are cut to what was written down of them, and are refused where they are something else."""

import hashlib
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rwkvclip_cli.console import Progress, RwkvClipError, UsageError, progress
from rwkvclip_cli.data.packing import record_files
from rwkvclip_cli.data.packing.growing import ANEW, Extent, FollowingHash, GrowingFile, check_extent
from rwkvclip_cli.data.packing.record_files import RecordFiles

DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(b"abcdf"),
    "shorter": lambda path: path.write_bytes(b"abcd"),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def test_a_file_goes_on_behind_what_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = GrowingFile(path)
    file.write("a\u00e4")
    done = file.flush()
    assert done == Extent(3, hashlib.sha256(b"a\xc3\xa4").hexdigest())
    file.append(b"lost")
    file.abandon()
    again = GrowingFile(path, done)
    assert path.read_bytes() == b"a\xc3\xa4"
    again.append(b"xyz")
    assert again.read(2, 9) == b"\xa4xyz"
    assert again.close() == Extent(6, hashlib.sha256(b"a\xc3\xa4xyz").hexdigest())
    assert again.close() is None


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_what_it_was_is_refused_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log"
    file = GrowingFile(path)
    file.append(b"abcde")
    done = file.close()
    assert done is not None
    check_extent(path, done)
    DAMAGE[damage](path)
    before = path.read_bytes() if path.is_file() else None
    for use in (check_extent, GrowingFile):
        with pytest.raises(UsageError, match="cannot be continued") as fault:
            use(path, done)
        assert fault.value.hint == ANEW
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_hash_follows_beside_its_caller_and_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rwkvclip_cli.data.packing.growing.BLOCK_BYTES", 1000)
    path, total = tmp_path / "log", hashlib.sha256()
    following = FollowingHash(path, total)
    written = b""
    with path.open("wb", buffering=0) as file:
        for number in range(100):
            piece = bytes([number]) * (number * 97 if number < 99 else 3_000_000)
            file.write(piece)
            written += piece
            following.follow()
    assert following.update() == Extent(len(written), hashlib.sha256(written).hexdigest())
    assert total.digest() == hashlib.sha256(written).digest()
    following.follow()
    following.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rwkvclip-hash"]


def test_what_fails_beside_the_caller_is_raised_by_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    following = FollowingHash(tmp_path)  # a folder, which nobody can read
    following.follow()
    with pytest.raises(IsADirectoryError):
        following.update()
    following.close()
    assert failures == []


def test_a_hash_follows_without_a_thread_where_none_can_be_had(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abc")
    following = FollowingHash(path)
    usual = threading.stack_size(1 << 46)  # more than there is: no thread starts
    try:
        following.follow()
    finally:
        threading.stack_size(usual)
    path.write_bytes(b"xyz")
    assert following.update() == Extent(3, hashlib.sha256(b"abc").hexdigest())
    following.close()


def test_a_hash_over_several_files_is_that_of_all_bytes_in_turn(tmp_path: Path) -> None:
    total = hashlib.sha256()
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 3)
        following = FollowingHash(tmp_path / name, total)
        assert following.update(2).size_bytes == 2
        assert following.update() == Extent(3, hashlib.sha256(name.encode() * 3).hexdigest())
        following.close()
    assert total.digest() == hashlib.sha256(b"aaabbb").digest()


def test_a_file_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    for folder in (tmp_path / ".o.rec.partial", tmp_path / ".o.rec.partial" / "unshuffled"):
        with pytest.raises(RwkvClipError, match=r"cannot write .*log: No such file or directory") as fault:
            GrowingFile(folder / "log")
        assert fault.value.hint == f"ls -ld {tmp_path}"


def test_the_check_of_what_was_packed_comes_to_its_total_and_not_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar counts what is read, a MiB at most at a time, of every file."""

    def paths(number: int) -> tuple[Path, Path]:
        return tmp_path / f"{number}.rec", tmp_path / f"{number}.idx"

    labels = array("f", [49406.0])
    with RecordFiles("native", paths, 2) as files:
        for size_bytes in (100, 3 << 19, 10, 20, 30):
            files.write(labels, bytes(size_bytes))
        done = files.flush()
    assert done is not None
    totals, counts = [], []

    @contextmanager
    def spied(total: int, what: str, unit: str) -> Iterator[Progress]:
        totals.append(total)
        with progress(total, what, unit) as bar:
            yield bar
            counts.append(bar.done)  # type: ignore[attr-defined]

    monkeypatch.setattr(record_files, "progress", spied)
    with RecordFiles("native", paths, 2, done):
        assert totals == counts == [2 + 1 + 1]
