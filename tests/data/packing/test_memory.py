"""Packing needs no more memory for a set that is larger: the peak of the process and its workers, as Linux counts it.

At the size that is asked for, by hand (files of holes, which take no disk):

    python tests/data/packing/test_memory.py FOLDER --tars 20 --gigabytes 1 --images 10000
"""

import argparse
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from helpers import plain_environment
from pack_files import family, photo

LIMIT_BYTES = 500 * 10**6
HOLE_BYTES = 1 << 25
SAMPLE_S = 0.05


def write_tars(folder: Path, tars: int, size_bytes: int, images: int, *, side: int = 256) -> list[Path]:
    """Tars of `size_bytes`, nearly all of it members that are no pictures and on the disk are holes.

    Among them lie `images` photographs with captions in each tar. Of each hundred, one is no picture and one repeats
    another.
    """
    holes = max(1, size_bytes // HOLE_BYTES)
    paths = []
    for number in range(tars):
        path = folder / f"{number:03}.tar"
        with path.open("wb") as file:
            for index in range(images):
                key, seed = f"{number:03}-{index:06}", number * images + index - (index % 100 == 98)
                picture = bytes(1000) if index % 100 == 99 else photo(seed, (side, side * 3 // 4))
                _add(file, f"{key}.jpg", picture)
                _add(file, f"{key}.txt", f"photograph {index % 977} of {number}".encode())
                if index % max(1, images // holes) == 0:
                    _add_hole(file, f"{key}-raw.bin", HOLE_BYTES)
            file.write(bytes(2 * tarfile.BLOCKSIZE))
        paths.append(path)
    return paths


def _header(name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    return info.tobuf()


def _add(file, name: str, content: bytes) -> None:
    file.write(_header(name, len(content)) + content + bytes(-len(content) % tarfile.BLOCKSIZE))


def _add_hole(file, name: str, size_bytes: int) -> None:
    file.write(_header(name, size_bytes))
    file.seek(size_bytes, 1)


def peak_bytes(command: list[str]) -> tuple[int, int]:
    """Run a command; the greatest sums, over it and all below it, of resident memory and of each one's share of it.

    What several of them have in common, such as libraries, counts once for each in the first sum, once in the second.
    """
    process = subprocess.Popen(command, env=plain_environment(None), stdout=subprocess.DEVNULL)
    resident = proportional = 0
    while process.poll() is None:
        members = family(process.pid)
        resident = max(resident, sum(_read(pid, "Rss:") for pid in members))
        proportional = max(proportional, sum(_read(pid, "Pss:") for pid in members))
        time.sleep(SAMPLE_S)
    assert process.returncode == 0
    return resident, proportional


def _read(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def pack_command(tars: list[Path], out: Path, workers: int = 2) -> list[str]:
    options = ["--dedupe", "--workers", str(workers)]
    return [sys.executable, "-m", "rwkvclip_cli", "pack", *map(str, tars), str(out), *options]


@pytest.mark.slow
def test_a_larger_set_takes_no_more_memory(tmp_path: Path) -> None:
    """A tar of 64 MB with 100 photographs of 640 x 480, and five of 2 GB with as many each."""
    peaks = []
    for name, tars, size_bytes in (("small", 1, 1 << 26), ("large", 5, 1 << 31)):
        folder = tmp_path / name
        folder.mkdir()
        paths = write_tars(folder, tars, size_bytes, 100, side=640)
        assert sum(path.stat().st_size for path in paths) > tars * size_bytes
        _, proportional = peak_bytes(pack_command(paths, folder / "out.rec"))
        peaks.append(proportional)
        assert (folder / "out.rejects.jsonl").read_text().count('"duplicate"') == tars
        assert (folder / "out.idx").read_text().count("\n") == tars * 98
    assert max(peaks) < LIMIT_BYTES
    assert peaks[1] < peaks[0] * 1.25


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tars", type=int, default=20)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--images", type=int, default=500, help="a tar")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    made = write_tars(given.folder, given.tars, int(given.gigabytes * 1e9), given.images, side=given.side)
    started_s = time.monotonic()
    resident_bytes, proportional_bytes = peak_bytes(pack_command(made, given.folder / "out.rec", given.workers))
    size_bytes = sum(path.stat().st_size for path in made)
    print(f"{size_bytes:,} bytes in {given.tars} tars, packed in {time.monotonic() - started_s:.0f} s")
    print(f"peak: resident {resident_bytes / 1e6:.0f} MB, proportional {proportional_bytes / 1e6:.0f} MB")
