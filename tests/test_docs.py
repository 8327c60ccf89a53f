"""The README is true: commands parse, programs run, the settings file is read, the outputs are the real ones."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import free_port, plain_environment, run_cli, write_packed

from rwkvclip_cli import cli, config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def commands() -> list[list[str]]:
    return [shlex.split(line) for text in blocks("bash") for line in text.splitlines()]


@pytest.mark.parametrize("words", [words for words in commands() if words[0] == "rwkvclip"], ids=" ".join)
def test_commands_are_spelled_as_the_program_knows_them(words: list[str]) -> None:
    name, arguments = words[1], words[2:]
    if "--" in arguments:
        end = arguments.index("--")
        cli.parse("train", arguments[end + 1 :])
        arguments = arguments[:end]
    cli.parse(name, arguments)


def test_every_command_has_its_place() -> None:
    shown = {words[1] for words in commands() if words[0] == "rwkvclip"}
    assert set(config.SECTIONS) - {"train", "demo"} <= shown
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"`?make ([a-z-]+)`?", README))
    assert {"demo", "test"} <= made <= targets | {"it"}


def test_the_settings_file_is_read(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    (tmp_path / "rwkvclip.toml").write_text(text)
    settings = config.read_config(tmp_path / "rwkvclip.toml")
    assert settings["launch"] == {"gpus": 8}
    assert settings["train"]["train_data"] == "out.rec"


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_programs_run(number: int, tmp_path: Path) -> None:
    write_packed(tmp_path / "out.rec", 40, context_length=77)
    (tmp_path / "program.py").write_text(blocks("python")[number])
    environment = plain_environment({"RWKVCLIP_DEVICE": "cpu", "MASTER_PORT": str(free_port())})
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    if "TrainConfig" in blocks("python")[number]:
        assert (tmp_path / "run" / "metrics.jsonl").is_file()


def output_after(command: str) -> str:
    """The text block that follows a line of a bash block."""
    match = re.search(rf"^{re.escape(command)}\n```\n.*?^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert match, f"the README shows no output of: {command}"
    return match[1]


def test_the_dry_run_prints_what_the_readme_shows(tmp_path: Path) -> None:
    command = "rwkvclip launch --cpus 2 --dry-run -- --output run --train-data out.rec"
    environment = plain_environment(None)
    del environment["OMP_NUM_THREADS"]
    typed = [sys.executable, "-m", "rwkvclip_cli", *shlex.split(command)[1:]]
    done = subprocess.run(typed, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    shown = done.stdout.replace(sys.executable, "python")
    # The README's machine has two cores.
    assert re.sub(r"OMP_NUM_THREADS=\d+", "OMP_NUM_THREADS=1", shown) == output_after(command)


def test_a_missing_endpoint_is_answered_as_the_readme_shows(tmp_path: Path) -> None:
    done = run_cli("launch", "--gpus", "8", "--nodes", "2", cwd=tmp_path)
    assert done.returncode == 2
    shown = re.sub(r"--rdzv-endpoint \S+:29500", "--rdzv-endpoint 10.0.0.1:29500", done.stderr)
    assert shown in [text for kind, text in BLOCKS if kind == "text"]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
