"""An interrupted pack goes on to the bytes of one that nobody disturbed."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pack_killed
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pack_files import HALTING, photo, write, write_tar

TAKEN = 64  # what the sources below hold, ignored files included


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One of each kind, with rejects and ignored files among the pictures; the number of inputs of each is known."""
    root = tmp_path_factory.mktemp("sources")
    files: dict[str, str | bytes] = {}
    for number in range(16):
        files[f"imgs/{number:02}.jpg"] = photo(number)
        files[f"imgs/{number:02}.txt"] = f"picture {number}"
    files |= {"imgs/03b.jpg": b"none", "imgs/03b.txt": "no picture", "imgs/07b.jpg": photo(70), "imgs/08b.txt": "lost"}
    rows = "".join(f"imgs/{number:02}.jpg,{'row ' * number}\n" for number in range(12))
    files["rows.csv"] = f"image,caption\n{rows}imgs/nowhere.jpg,nothing\n"
    write(root, files)
    members = []
    for number in range(12):
        members += [(f"{number:02}.jpg", photo(number + 20)), (f"{number:02}.txt", b"member")]
        if number % 4 == 1:
            members += [("CREDITS", b"by nobody"), (f"{number:02}b.jpg", photo())]
    write_tar(root / "one.tar", members)
    write_tar(root / "two.tar.gz", members[:6], "w:gz")
    images = [photo(number + 40) for number in range(10)]
    table = pa.table({"image": [*images[:4], b"", *images[5:]], "caption": [f"cell {n}" for n in range(10)]})
    pq.write_table(table, root / "cells.parquet", row_group_size=3)
    return [str(root / name) for name in ("imgs", "rows.csv", "one.tar", "two.tar.gz", "cells.parquet")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where the system has one: on a busy disk thousands of journals would take minutes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def killed(root: Path, moments: list[str], old: dict[str, str] | None = None, **options: object) -> list[list[int]]:
    """What each process took in: of the undisturbed pack, then, for each of the moments, of the kills and the rest.

    `old`: files that are there before.
    """
    words = {"out": str(root / "out.rec"), "proof": "none", **options}
    command = [sys.executable, pack_killed.__file__, json.dumps(words), json.dumps(old or {}), *moments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_same(root: Path, runs: int) -> None:
    """Every pack of `killed` has left the files of the undisturbed one, and nothing else."""
    whole = {path.name: path.read_bytes() for path in (root / "whole").iterdir()}
    assert "out.manifest.json" in whole
    for number in range(runs):
        left = {path.name: path.read_bytes() for path in (root / str(number)).iterdir()}
        assert left.keys() == whole.keys(), number
        assert left == whole, number


def moments(count: int, seed: int) -> list[str]:
    """Moments to be killed at, every third of them twice; the first input is taken at about a tenth."""
    draw = random.Random(seed)
    drawn = [f"{draw.random():.4f}" for _ in range(count)]
    return [f"{moment}+{draw.random() / 2:.4f}" if number % 3 == 2 else moment for number, moment in enumerate(drawn)]


WAYS = {
    "plain": {},
    "shuffle": {"shuffle": True, "seed": 5},
    "shards": {"shard_size": 7},
    "shuffled shards": {"shard_size": 10, "shuffle": True},
    "dedupe": {"dedupe": True},
    "shuffled shards without copies": {"shard_size": 10, "shuffle": True, "dedupe": True},
}


@pytest.mark.parametrize("way", ["plain", "dedupe", "shuffled shards without copies"])
def test_a_pack_that_is_killed_anywhere_goes_on_to_the_same_bytes(folder, sources, way):
    drawn = moments(3, seed=len(way))
    (whole,), *taken = killed(folder, drawn, sources=sources, **WAYS[way])
    assert whole == TAKEN
    check_same(folder, len(drawn))
    for *before, after in taken:
        assert sum(before) + after >= whole
        assert sum(before) + after <= whole + 8 * len(before), "what had been taken in was packed again"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_a_pack_that_is_killed_at_any_of_fifty_moments_goes_on_to_the_same_bytes(folder, sources, way):
    drawn = moments(52, seed=7)[list(WAYS).index(way) :: len(WAYS)]
    killed(folder, drawn, sources=sources, **WAYS[way])
    check_same(folder, len(drawn))


def test_the_last_things_that_a_pack_does_can_be_cut_off_too(folder, sources):
    # What is behind the last input: journals, the manifest, the switch of the files.
    drawn = [f"{0.7 + 0.3 * number / 5:.4f}" for number in range(6)]
    old = {"out.rec": "old", "out.idx": "old", "out-00003.rec": "old"}
    killed(folder, drawn, old, sources=sources[1:2], shard_size=5, overwrite=True)
    check_same(folder, len(drawn))


def test_tokens_go_on_at_their_row(folder, sources):
    rows = np.zeros((41, 77), np.int32)  # of the folder's 18 images, whose lost caption has none, and the csv's 13
    rows[:, :3] = [[49406, 1000 + number, 49407] for number in range(41)]
    np.save(folder / "rows.npy", rows)
    drawn = ["0.3", "0.5", "0.6+0.3"]
    three = [sources[0], sources[1], sources[4]]
    (whole,), *taken = killed(folder, drawn, sources=three, tokens=str(folder / "rows.npy"))
    check_same(folder, len(drawn))
    assert all(after < whole for *_, after in taken)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pack_that_is_killed_from_outside_again_and_again_comes_to_its_end(folder, sources):
    words = ["-c", HALTING, "-1", "pack", *sources, str(folder / "out.rec"), "--proof", "none", "--shard-size", "9"]
    words += ["--shuffle", "--workers", "1"]
    began_s = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    took_s = time.monotonic() - began_s
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    draw = random.Random(1)
    ended = []
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, *words, "--resume"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as one:
            time.sleep(draw.uniform(took_s / 4, took_s))
            one.kill()
            one.communicate()
        ended.append(one.returncode)
    assert ended[0] == -9
    assert set(ended) <= {0, -9}
    subprocess.run([sys.executable, *words, "--resume"], check=True, capture_output=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
