"""Who speaks: rank 0 of several, and whoever is no rank, whatever a cluster calls the node."""

import errno
import json
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import run_cli
from pack_files import folder_of, write_tar

from rwkvclip_cli import console
from rwkvclip_cli.console import RwkvClipError


def be(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    """Make this process the one that the variables describe."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever sets it in between
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("log", ["a pipe that nobody reads", "/dev/full"])
def test_work_goes_on_where_nobody_reads_its_log(tmp_path: Path, log: str) -> None:
    code = "from rwkvclip_cli import console\nfor n in range(3): console.warn('x' * 9000)\nconsole.result('done')"
    reads, writes = os.pipe()
    os.close(reads)
    full = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full if log == "/dev/full" else writes, check=False
    )
    os.close(writes)
    os.close(full)
    assert done.stdout == b"done\n"
    assert log == "/dev/full" or done.returncode == 0


@pytest.mark.parametrize(("count", "said"), [(0, "0 faults"), (1, "1 fault"), (2, "2 faults"), (1000, "1,000 faults")])
def test_things_are_counted_in_words(count: int, said: str) -> None:
    assert console.counted(count, "fault") == said


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),  # a pod that a training operator has numbered
        ({"LOCAL_RANK": "3"}, True),
    ],
    ids=str,
)
def test_who_speaks(
    environ: dict[str, str], speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, **environ)
    console.result("out")
    console.say("err")
    assert capsys.readouterr() == (("out\n", "err\n") if speaks else ("", ""))


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, "rwkvclip: no index"),
        ({"RANK": "3", "LOCAL_RANK": "3"}, "rwkvclip [rank 3]: no index"),
        ({"RANK": "3"}, "rwkvclip: no index"),
    ],
    ids=str,
)
def test_an_error_is_shown_on_every_rank_and_names_it(
    environ: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be(monkeypatch, **environ)
    console.show_error(RwkvClipError("no index", hint="rwkvclip pack"))
    assert capsys.readouterr() == ("", f"{shown}\n  try: rwkvclip pack\n")


def test_an_error_with_details_is_whole_as_text_and_after_a_way_through_pickle() -> None:
    error = RwkvClipError("all rejected:", hint="ls", details=["  one", "  two"])
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == "all rejected:\n  one\n  two"
        assert (each.message, each.hint, each.details) == ("all rejected:", "ls", ("  one", "  two"))


def test_more_than_was_estimated_leaves_no_time_below_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress(10, "packing", "images") as bar:
        bar.advance(12)
    assert capsys.readouterr().err.startswith("packing: 12 of 12 images, ")


def test_launch_speaks_on_every_node_that_a_cluster_has_numbered() -> None:
    train = ["--", "--output", "run", "--train-data", "pairs.rec"]
    done = run_cli("launch", "--cpus", "2", "--dry-run", *train, env={"RANK": "1", "WORLD_SIZE": "2"})
    assert done.returncode == 0
    assert shlex.split(done.stdout)[-5:] == ["train", *train[1:]]
    assert sys.executable in done.stdout


def test_ranks_that_have_no_local_number_are_ranks_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from rwkvclip_cli.train import distributed

    be(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RWKVCLIP_DEVICE="cpu")
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda **_: None)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: None)
    assert console.is_speaker()
    with distributed.process_group(timeout_s=1):
        assert not console.is_speaker()


def test_escape_sequences_of_others_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;mine\x07\r\x9b31m\x7f\tb\nc\u2028\u202ed\udcff\ud83d"
    seen = "a\\x1b]0;mine\\x07\\x0d\\x9b31m\\x7f\tb\\x0ac\\u2028\\u202ed\\xff\\ud83d"
    console.result(console.page([name, "next"]))
    console.warn(name)
    console.say(name, name)
    console.show_error(RwkvClipError(name, hint=name, details=[name]))
    lines = [f"warning: {seen}", seen, seen, f"rwkvclip: {seen}", seen, f"  try: {seen}"]
    assert capsys.readouterr() == (f"{seen}\nnext\n", "\n".join(lines) + "\n")
    console.result_json({"name": name})
    out = capsys.readouterr().out
    assert json.loads(out) == {"name": name}
    assert out.isascii()
    assert len(out.splitlines()) == 3


def test_no_file_name_makes_a_message_longer(tmp_path: Path) -> None:
    """On the command line, in a folder, in a tar; said by pack and by inspect."""
    evil = "a\n  try: rm -rf \x1b[2J"
    folder = folder_of(tmp_path / "imgs", 1)
    (folder / "000.jpg").rename(folder / f"{evil}.jpg")
    (folder / "000.txt").rename(folder / f"{evil}.txt")
    out = str(tmp_path / f"{evil}.rec")
    tar = write_tar(tmp_path / "bad.tar", [(f"{evil}.jpg", b"no picture"), (f"{evil}.txt", b"words")])
    for arguments, code in (
        (["pack", str(folder), out, "--proof", "none", "--workers", "1"], 0),
        (["pack", str(tar), str(tmp_path / "bad.rec"), "--proof", "none", "--workers", "1"], 1),
        (["pack", f"{evil}.csv", str(tmp_path / "bad.rec")], 2),
        (["inspect", out, "--records", "0"], 0),
        (["inspect", f"{evil}.rec"], 2),
    ):
        done = run_cli(*arguments)
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        # The list of sources has an escape of its own for a line end.
        assert any(f"a{end}  try: rm -rf \\x1b[2J" in said for end in ("\\x0a", "\\n")), said
        assert "\x1b" not in said
        assert not any(line.startswith("  try: rm") for line in said.splitlines()), said


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "df -h {folder}"),
        (errno.EDQUOT, "quota -s"),
        (errno.EROFS, "findmnt --target {folder}"),
        (errno.EACCES, "ls -ld {folder}"),
        (errno.EPERM, "ls -ld {folder}"),
        (errno.ENOENT, "ls -ld {folder}"),
        (errno.EIO, "dmesg"),
        (errno.EFBIG, "df -T {folder}"),
    ],
    ids=lambda value: errno.errorcode.get(value, ""),
)
def test_the_hint_fits_what_keeps_the_system_from_writing(tmp_path: Path, number: int, hint: str) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    error = OSError(number, "Why Not")
    for place in (folder, folder / ".out.rec.partial", folder / ".out.rec.partial" / "unshuffled"):
        told = console.cannot_write("out.rec", error, place, "; so it is")
        assert told.message == "cannot write out.rec: Why Not; so it is"
        assert told.hint == hint.format(folder=f"'{folder}'")


def test_where_there_is_room_but_for_another_file_the_hint_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = SimpleNamespace(f_bavail=1000, f_files=10, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: left)
    assert console.write_hint(OSError(errno.ENOSPC, ""), tmp_path) == f"df -i {tmp_path}"


def test_a_library_that_does_not_say_what_it_was_has_most_often_filled_the_disk(tmp_path: Path) -> None:
    assert console.write_hint(RuntimeError("failed writing file"), tmp_path) == f"df -h {tmp_path}"


@pytest.mark.skipif(not os.path.ismount("/sys"), reason="no file system here is closed to every user")
def test_a_folder_that_is_closed_is_not_a_full_disk(tmp_path: Path) -> None:
    done = run_cli("pack", str(folder_of(tmp_path / "imgs", 1)), "/sys/out.rec", "--proof", "none")
    assert done.returncode == 1
    message, hint = done.stderr.splitlines()
    assert message.startswith("rwkvclip: cannot write /sys/.out.rec.lock: ")
    assert hint in ("  try: ls -ld /sys", "  try: findmnt --target /sys")
