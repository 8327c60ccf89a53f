"""All files of a pack or none: signals, kills, a second pack, a full disk."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pack_files import files_of, folder_of

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packing.output import SUFFIXES, OutputSet
from rwkvclip_cli.data.packing.pack import pack

# Packs as the command does, but stops to read on after 20 inputs until the test has done what it wants.
SLOW = """
import sys, time
import rwkvclip_cli.data.packing.pack as packing, rwkvclip_cli.data.packing.pool as pool
from rwkvclip_cli.cli import main
read = packing.read_sources
def slowly(*arguments):
    for number, item in enumerate(read(*arguments)):
        if number == 20:
            print("half", flush=True)
            time.sleep(60)
        yield item
packing.read_sources, pool.BATCH_SAMPLES = slowly, 1
sys.argv[0] = "rwkvclip"
main()
"""


@contextlib.contextmanager
def half_packed(source: Path, out: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """A pack in a process of its own that has written about half."""
    command = [sys.executable, "-c", SLOW, "pack", str(source), str(out), "--workers", "1", "--proof", "none", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pack_that_is_told_to_end_leaves_nothing(tmp_path, number, code):
    source = folder_of(tmp_path / "imgs", 30)
    with half_packed(source, tmp_path / "o.rec") as process:
        process.send_signal(number)
        assert process.wait(30) == code
    assert [path.name for path in tmp_path.iterdir()] == ["imgs"]


def test_a_pack_that_is_killed_leaves_nothing_under_the_final_names_and_the_next_cleans_up(tmp_path):
    source, out = folder_of(tmp_path / "imgs", 30), tmp_path / "o.rec"
    with half_packed(source, out) as process:
        workers = children(process.pid)
        assert workers
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    left = [path.name for path in tmp_path.iterdir() if path.name != "imgs"]
    assert left
    assert all(name.startswith(".o.") for name in left)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}/stat").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its pack"
        time.sleep(0.05)
    assert pack(PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none")).count == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["imgs", *(path.name for path in finals(out))])


def finals(out: Path) -> list[Path]:
    return [out.with_name(out.stem + suffix) for suffix in SUFFIXES.values()]


def test_a_second_pack_into_the_same_output_is_refused(tmp_path):
    source, out = folder_of(tmp_path / "imgs", 30), tmp_path / "o.rec"
    with half_packed(source, out):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(RwkvClipError, match=r"o\.rec: another pack is writing it"):
            pack(PackConfig(sources=(str(source),), out=str(out)))
        assert sorted(tmp_path.iterdir()) == before


def test_an_old_output_stays_whole_until_the_new_one_is(tmp_path):
    source, out = folder_of(tmp_path / "imgs", 30), tmp_path / "o.rec"
    pack(PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none"))
    first = files_of(out)
    with half_packed(source, out, "--overwrite") as process:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert files_of(out) == first


def test_an_old_rec_never_stands_beside_a_new_index(tmp_path, monkeypatch):
    out = tmp_path / "o.rec"
    for path in finals(out):
        path.write_text("old")
    replace = os.replace

    def stop_before_rec(source, target):
        if str(target).endswith(".rec"):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_before_rec)
    with OutputSet(str(out), overwrite=True) as output:
        for part in ("rec", "idx"):
            output.partial[part].write_text("new")
        with pytest.raises(RwkvClipError, match="Input/output error"):
            output.commit({})
    assert not out.exists()
    assert not list(tmp_path.glob(".o*"))


@pytest.mark.parametrize("limit", [0, 10_000])
def test_a_full_disk_is_one_clear_error(tmp_path, limit):
    source = folder_of(tmp_path / "imgs", 30)
    command = [sys.executable, "-m", "rwkvclip_cli", "pack", str(source), str(tmp_path / "o.rec"), "--proof", "none"]

    def bound_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    # The limit stands in for the disk: a write beyond it fails as one on a full disk does.
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=bound_files)
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["imgs"]
