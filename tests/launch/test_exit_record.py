"""How ranks end reaches the launcher, whatever way they end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import plain_environment

from rwkvclip_cli.launch.exit_record import (
    ExitRecord,
    exit_recorded,
    has_begun,
    has_launcher,
    read_exits,
    record_exit,
)

BODY = """
import os, signal, sys
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.launch.exit_record import exit_recorded
with exit_recorded():
    {body}
print("after")
"""


def run_rank(folder: Path, body: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `body` as rank 3 under a launcher that reads records from `folder`."""
    rank = {"RANK": "3", "LOCAL_RANK": "1", "RWKVCLIP_EXIT_DIR": str(folder)} | environ
    return subprocess.run(
        [sys.executable, "-c", BODY.format(body=body)],
        env=plain_environment(rank),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "exit_code", "recorded", "message", "hint"),
    [
        ("raise RwkvClipError('no index', hint='rwkvclip pack', exit_code=3)", 3, 3, "no index", "rwkvclip pack"),
        ("raise SystemExit(7)", 7, 7, "", ""),
        ("raise SystemExit(75)", 0, 75, "", ""),
        ("raise SystemExit('in words')", 1, 1, "in words", ""),
        ("raise KeyboardInterrupt", 130, 130, "interrupted", ""),
        ("[][0]", 1, 1, "IndexError: list index out of range", ""),
    ],
)
def test_every_end_is_recorded(
    tmp_path: Path, body: str, exit_code: int, recorded: int, message: str, hint: str
) -> None:
    done = run_rank(tmp_path, body)
    (record,) = read_exits(tmp_path, 0)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", "")
    assert (record.code, record.message, record.hint, record.rank) == (recorded, message, hint, 3)
    assert ("IndexError" in record.traceback) is message.startswith("IndexError")


@pytest.mark.parametrize("body", ["pass", "raise SystemExit", "raise SystemExit(0)"])
def test_a_good_end_leaves_no_record(tmp_path: Path, body: str) -> None:
    assert run_rank(tmp_path, body).returncode == 0
    assert read_exits(tmp_path, 0) == []


def test_a_rank_says_that_its_attempt_has_begun(tmp_path: Path) -> None:
    assert not has_begun(tmp_path, 0)
    run_rank(tmp_path, "pass", TORCHELASTIC_RESTART_COUNT="2")
    assert [has_begun(tmp_path, attempt) for attempt in range(4)] == [False, False, True, False]


def test_a_folder_that_is_gone_hides_no_fault(tmp_path: Path) -> None:
    done = run_rank(tmp_path / "gone", "raise RwkvClipError('no index', exit_code=3)")
    assert done.returncode == 3


def test_a_launcher_that_is_gone_takes_the_rank_along(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    done = run_rank(tmp_path, "print('alive')", RWKVCLIP_LAUNCH_PID=str(ended.pid))
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_the_first_record_of_a_rank_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKVCLIP_EXIT_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    record_exit(1, "the cause")
    record_exit(1, "its consequence")
    assert [record.message for record in read_exits(tmp_path, 0)] == ["the cause"]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-attempt-0.exit.json"]


def test_without_a_launcher_nothing_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RWKVCLIP_EXIT_DIR", raising=False)
    assert not has_launcher()
    with pytest.raises(SystemExit) as caught, exit_recorded():
        raise SystemExit(75)
    assert caught.value.code == 75
    record_exit(1, "nobody listens")
    assert list(tmp_path.iterdir()) == []


def write(folder: Path, **values: object) -> None:
    record = {
        "code": 1,
        "message": "",
        "hint": "",
        "traceback": "",
        "rank": 0,
        "host": "node0",
        "time_s": 0.0,
        "attempt": 0,
    } | values
    (folder / f"{record['rank']}-{record['attempt']}.exit.json").write_text(json.dumps(record))


def test_records_come_in_order_of_time_from_one_attempt(tmp_path: Path) -> None:
    write(tmp_path, rank=0, time_s=30.0, attempt=1)
    write(tmp_path, rank=1, time_s=20.0, attempt=1)
    write(tmp_path, rank=2, time_s=10.0, attempt=0)
    assert [record.rank for record in read_exits(tmp_path, 1)] == [1, 0]
    assert [record.rank for record in read_exits(tmp_path, 0)] == [2]
    assert read_exits(tmp_path, 1)[0] == ExitRecord(1, "", "", "", 1, "node0", 20.0, 1)
