"""Who speaks: rank 0 of several, and whoever is no rank, whatever a cluster calls the node."""

import json
import shlex
import sys

import pytest
from helpers import run_cli

from rwkvclip_cli import console
from rwkvclip_cli.console import RwkvClipError


def be(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    """Make this process the one that the variables describe."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever sets it in between
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


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
    name = "a\x1b]0;mine\x07\r\x9b31m\x7f\tb\nc"
    seen = "a\\x1b]0;mine\\x07\\x0d\\x9b31m\\x7f\tb\nc"
    console.result(name)
    console.warn(name)
    console.show_error(RwkvClipError(name, hint=name))
    assert capsys.readouterr() == (f"{seen}\n", f"warning: {seen}\nrwkvclip: {seen}\n  try: {seen}\n")
    console.result_json({"name": name})
    assert json.loads(capsys.readouterr().out) == {"name": name}
