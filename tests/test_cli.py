"""The command line starts light, knows its commands, and ends with the exit codes that it promises."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import plain_environment, run_cli
from typer.testing import CliRunner

from rwkvclip_cli import cli, config
from rwkvclip_cli.console import UsageError

HEAVY = ("torch", "numpy", "nvidia", "rich", "PIL", "tensorboard")
COMMANDS = [command.name for command in cli.app.registered_commands]


def heavy_modules_after(code: str) -> list[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    report = f"import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        env=plain_environment(None),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_works(name: str) -> None:
    shown = CliRunner().invoke(cli.app, [name, "--help"])
    assert shown.exit_code == 0
    assert f" {name} [OPTIONS]" in shown.output


@pytest.mark.parametrize("name", sorted(config.SECTIONS))
def test_help_names_every_option_of_the_settings_file(name: str) -> None:
    shown = CliRunner().invoke(cli.app, [name, "--help"]).output
    for field in config.option_fields(config.SECTIONS[name]):
        expected = config.option_name(field)
        assert (expected if field.metadata["argument"] else f"--{expected}") in shown.lower().replace("_", "-")


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"from rwkvclip_cli.cli import app\napp({arguments!r}, standalone_mode=False)"
    assert heavy_modules_after(code) == []


def test_help_time_is_reported(record_property: Callable[[str, object], None]) -> None:
    started_s = time.perf_counter()
    assert run_cli("--help").returncode == 0
    record_property("help_s", round(time.perf_counter() - started_s, 3))


def test_launch_never_loads_torch() -> None:
    folder = Path(cli.__file__).parent / "launch"
    modules = [f"rwkvclip_cli.launch.{path.stem}" for path in sorted(folder.glob("*.py"))]
    assert len(modules) > 5
    assert heavy_modules_after(f"import {', '.join(modules)}") == []


def test_parse_reads_the_settings_file_below_the_command_line(tmp_path: Path) -> None:
    settings = tmp_path / "rwkvclip.toml"
    settings.write_text('[train]\noutput = "run"\ntrain-data = "a.rec"\nlr = 0.5\n')
    parsed = cli.parse("train", ["--config", str(settings), "--lr", "0.25", "--batch_size", "8"])
    assert (parsed.output, parsed.train_data, parsed.lr, parsed.batch_size) == ("run", "a.rec", 0.25, 8)


def test_parse_refuses_what_the_command_refuses() -> None:
    with pytest.raises(UsageError, match="--lr must be at least 0"):
        cli.parse("train", ["--output", "run", "--train-data", "a.rec", "--lr", "-1"])


def nobody_reads(*arguments: str, stderr: bool = False) -> subprocess.CompletedProcess[bytes]:
    """A command whose stdout, and stderr too if asked for, is a pipe that nobody reads any more."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "rwkvclip_cli", *arguments]
    done = subprocess.run(
        command, stdout=writes, stderr=writes if stderr else subprocess.PIPE, env=plain_environment(None), check=False
    )
    os.close(writes)
    return done


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "-h"] for name in COMMANDS),
        ["launch", "--cpus", "2", "--dry-run"],
    ],
    ids=" ".join,
)
def test_a_result_that_nobody_reads_ends_quietly(arguments: list[str]) -> None:
    done = nobody_reads(*arguments)
    assert done.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in done.stderr
    if arguments[0] != "launch":
        assert done.stderr == b""


@pytest.mark.parametrize(
    "arguments", [[], ["lunch"], ["pack"], ["pack", "imgs"], ["train", "--lr", "much"]], ids=" ".join
)
def test_wrong_usage_is_that_even_where_nobody_reads_of_it(arguments: list[str]) -> None:
    assert nobody_reads(*arguments, stderr=True).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["pack", "--help"], ["--version"]], ids=" ".join)
def test_a_result_that_a_full_disk_does_not_take_is_an_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "rwkvclip_cli", *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "rwkvclip: cannot write the result to stdout: No space left on device\n  try: df -h\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_broken_pipe_that_is_a_bug_keeps_its_traceback() -> None:
    code = (
        "from rwkvclip_cli import cli\n@cli.app.command()\ndef bug():\n    raise BrokenPipeError(32, 'a socket')\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "bug"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("BrokenPipeError: [Errno 32] a socket\n")


def test_wrong_usage_shows_what_was_typed_without_obeying_it() -> None:
    done = run_cli("\x1b[2Jpack")
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: rwkvclip [OPTIONS] COMMAND ")
    assert "\\x1b[2Jpack" in done.stderr
    assert "\x1b" not in done.stderr


def test_unknown_command_is_wrong_usage() -> None:
    done = run_cli("lunch")
    assert done.returncode == 2
    assert "lunch" in done.stderr


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    name = tmp_path / "b\u00e4r \u732b.rec"
    done = run_cli("train", "--output", tmp_path / "run", "--train-data", name, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2, done.stderr
    assert "b\\xe4r \\u732b.rec" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "fault", "hint"),
    [
        (["imgs"], "no OUT.rec is given, to which imgs would be packed", "rwkvclip pack imgs OUT.rec"),
        (["out.rec"], "nothing to pack: no source given", "rwkvclip pack FOLDER out.rec"),
    ],
    ids=str,
)
def test_pack_names_the_argument_that_is_missing(given: list[str], fault: str, hint: str) -> None:
    done = run_cli("pack", *given)
    assert (done.returncode, done.stderr) == (2, f"rwkvclip: {fault}\n  try: {hint}\n")


def test_pack_without_arguments_is_wrong_usage() -> None:
    done = run_cli("pack")
    assert done.returncode == 2
    assert "Missing argument 'out'" in done.stderr


def test_pack_takes_its_arguments_from_the_settings_file_too(tmp_path: Path) -> None:
    (tmp_path / "rwkvclip.toml").write_text('[pack]\nsources = ["imgs"]\n')
    done = run_cli("pack", "out.rec", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "rwkvclip: imgs: no such folder or file\n  try: ls .\n")


@pytest.mark.parametrize("given", [["--output", "x"], ["--gpus", "2", "--train_data=a.rec", "--", "--output", "x"]])
def test_an_option_of_train_before_the_dashes_is_told_where_to_go(given: list[str]) -> None:
    done = run_cli("launch", *given)
    name = "--output" if given[0] == "--output" else "--train-data"
    assert done.returncode == 2
    assert f"{name} is an option of train, and train's options follow --" in done.stderr
    assert "rwkvclip launch -- --" in done.stderr
    assert "No such option: --outptu" in run_cli("launch", "--outptu", "x").stderr


LONG_NAME, LONG_PATH = "n" * 300, "/".join(["d" * 98] * 51)
PATHS = [
    (name, field)
    for name, options in config.SECTIONS.items()
    for field in config.option_fields(options)
    if field.metadata["path"]
]


@pytest.mark.parametrize(
    "path", [LONG_NAME, f"missing/{LONG_NAME}.rec", LONG_PATH, f"{LONG_PATH}/a.rec", "a\0b"], ids=len
)
@pytest.mark.parametrize(("name", "field"), PATHS, ids=lambda value: getattr(value, "name", value))
def test_a_path_that_no_file_can_have_is_wrong_usage(name: str, field: Any, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        config.check_value(field, (path,) if typing.get_origin(field.type) is tuple else path)
    assert re.search(
        "a name of 3[0-9]{2} bytes; names have at most 255|File name too long|no NUL", caught.value.message
    )
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("name", "field"), PATHS, ids=lambda value: getattr(value, "name", value))
def test_an_empty_path_is_wrong_usage_and_not_as_if_none_were_given(name: str, field: Any) -> None:
    with pytest.raises(UsageError, match=r"is empty|is missing") as caught:
        config.check_value(field, ("",) if typing.get_origin(field.type) is tuple else "")
    assert caught.value.hint.endswith(" PATH")


def test_every_option_that_is_called_a_path_is_checked_as_one() -> None:
    words = re.compile(r"(?i)\b(folder|file|path|data|tars)\b")
    paths = {(name, field.name) for name, field in PATHS}
    for name, options in config.SECTIONS.items():
        for field in config.option_fields(options):
            is_text = field.type in (str, str | None, tuple[str, ...]) and not field.metadata["choices"]
            if is_text and words.search(field.metadata["help"].split(";")[0].split(".")[0]):
                assert (name, field.name) in paths, f"{name} --{field.name}"


@pytest.mark.parametrize("path", [LONG_NAME, LONG_PATH], ids=["a long name", "a long path"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["pack", ".", "{}.rec"],
        ["pack", "{}", "o.rec"],
        ["pack", ".", "o.rec", "--config", "{}"],
        ["inspect", "{}.manifest.json"],
        ["inspect", "a.rec", "--export", "{}/b"],
        ["inspect", "a.rec", "--salvage", "{}.rec"],
        ["train", "--output", "run", "--train-data", "a.rec", "--resume", "{}"],
        ["launch", "--cpus", "1", "--", "--output", "{}", "--train-data", "a.rec"],
        ["launch", "--cpus", "1", "--", "--output", "run", "--train-data", "a.rec", "--config", "{}"],
        ["eval", "{}", "--data", "a.rec"],
        ["bench", "--model-config", "{}"],
        ["nccl-check", "--config", "{}"],
        ["demo", "{}"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[-2:]),
)
def test_every_command_ends_with_one_message_for_such_a_path(arguments: list[str], path: str, tmp_path: Path) -> None:
    done = run_cli(*(each.replace("{}", path) for each in arguments), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rwkvclip: ")
    assert len(done.stderr.splitlines()) <= 2
    assert len(done.stderr) < 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("letters", [235, 245, 251])
def test_a_name_that_leaves_no_room_for_the_files_beside_it_is_wrong_usage(letters: int, tmp_path: Path) -> None:
    (tmp_path / "imgs").mkdir()
    done = run_cli("pack", "imgs", "n" * letters + ".rec", cwd=tmp_path)
    if letters == 235:
        assert (done.returncode, done.stderr.splitlines()[0]) == (1, "rwkvclip: nothing to pack: no image in imgs")
    else:
        assert done.returncode == 2
        assert "n... is too long a name, for a pack also writes " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["imgs"]
