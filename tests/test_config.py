"""Options that exclude each other: refused together, and the command line wins over the settings file."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers import run_cli

from rwkvclip_cli import cli, config
from rwkvclip_cli.config import LaunchConfig, NcclCheckConfig, Options, PackConfig, TrainConfig, option_fields, retype
from rwkvclip_cli.console import UsageError


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (LaunchConfig, {"gpus": 2, "cpus": 3}, "--gpus 2 and --cpus 3 exclude each other"),
        (NcclCheckConfig, {"gpus": 2, "cpus": 3}, "--gpus 2 and --cpus 3 exclude each other"),
        (
            TrainConfig,
            {"output": "run", "train_data": "a.rec", "model": "tiny", "model_config": "m.json"},
            "--model-config m.json and --model tiny exclude each other",
        ),
    ],
)
def test_rivals_are_wrong_usage(options: type[Options], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        options(**values)
    assert caught.value.message == message


def test_every_exclusion_names_fields_and_values_that_there_are() -> None:
    for options in config.SECTIONS.values():
        fields = {field.name: field for field in option_fields(options)}
        for field in fields.values():
            for rival in field.metadata["excludes"]:
                name, equals, value = rival.partition("=")
                assert name in fields
                assert not equals or value in fields[name].metadata["choices"]


@pytest.mark.parametrize(
    ("name", "settings", "typed", "expected"),
    [
        ("launch", "gpus = 8", ["--cpus", "2"], {"gpus": None, "cpus": 2}),
        ("launch", "cpus = 2", ["--nproc_per_node", "8"], {"gpus": 8, "cpus": None}),
        ("launch", "gpus = 8", ["--gpus", "4"], {"gpus": 4, "cpus": None}),
        ("launch", "gpus = 8\nnodes = 2", [], {"gpus": 8, "nodes": 2}),
        ("nccl-check", "gpus = 8", ["--backend", "gloo"], {"backend": "gloo", "gpus": None}),
        ("nccl-check", "gpus = 8", ["--backend", "gloo", "--cpus", "2"], {"backend": "gloo", "gpus": None, "cpus": 2}),
        ("nccl-check", 'backend = "gloo"\ncpus = 2', ["--gpus", "2"], {"backend": "nccl", "gpus": 2, "cpus": None}),
        ("nccl-check", 'backend = "gloo"\ncpus = 2', ["--backend", "nccl"], {"backend": "nccl", "cpus": None}),
        ("nccl-check", 'backend = "gloo"', ["--cpus", "2"], {"backend": "gloo", "cpus": 2}),
        ("train", 'model-config = "m.json"', ["--model", "tiny"], {"model": "tiny", "model_config": None}),
        # What is typed wins even where it is the default.
        ("train", 'model-config = "m.json"', ["--model", "rwkv-clip-b32"], {"model_config": None}),
        ("train", 'model = "tiny"', ["--model-config", "m.json"], {"model": "rwkv-clip-b32", "model_config": "m.json"}),
    ],
)
def test_what_is_typed_removes_its_rival_from_the_file(
    name: str, settings: str, typed: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "own.toml"
    needed = 'output = "run"\ntrain-data = "a.rec"\n' if name == "train" else ""
    file.write_text(f"[{name}]\n{needed}{settings}\n")
    made = cli.parse(name, ["--config", str(file), *typed])
    assert {field: getattr(made, field) for field in expected} == expected


def test_rivals_that_are_both_typed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[launch]\ngpus = 8\n")
    with pytest.raises(UsageError, match="--gpus 4 and --cpus 2 exclude each other"):
        cli.parse("launch", ["--config", str(file), "--gpus", "4", "--cpus", "2"])


def test_rivals_in_the_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[launch]\nnproc_per_node = 8\ncpus = 2\n")
    with pytest.raises(UsageError) as caught:
        config.read_config(file)
    assert caught.value.message == f"{file}: [launch] gpus and cpus exclude each other"


def test_launch_on_cpus_beside_a_file_for_gpus(tmp_path: Path) -> None:
    (tmp_path / "rwkvclip.toml").write_text('[launch]\ngpus = 8\n[train]\noutput = "run"\ntrain-data = "a.rec"\n')
    done = run_cli("launch", "--cpus", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "RWKVCLIP_DEVICE=cpu " in done.stdout
    assert "--nproc-per-node 2 " in done.stdout


@pytest.mark.parametrize(
    ("settings", "typed", "expected"),
    [
        ("", [], None),
        ("", ["--compile"], True),
        ("", ["--no-compile"], False),
        ("compile = true", [], True),
        ("compile = false", [], False),
        ("compile = true", ["--no-compile"], False),
        ("compile = false", ["--compile"], True),
    ],
)
def test_a_switch_has_a_word_for_on_and_for_off(
    settings: str, typed: list[str], expected: bool | None, tmp_path: Path
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f"[bench]\n{settings}\n")
    assert cli.parse("bench", ["--config", str(file), *typed]).compile is expected


def test_a_switch_of_the_file_is_true_or_false(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[train]\ncompile = "yes"\n')
    with pytest.raises(UsageError, match=r"compile must be true or false; got 'yes'"):
        config.read_config(file)


def test_a_command_is_typed_again_with_arguments_and_repeated_options() -> None:
    options = PackConfig(sources=("my imgs", "b.tar"), out="o.rec", caption_key=("raw", "made"), workers=3)
    line = retype("pack", options, resume=True)
    assert line == "rwkvclip pack 'my imgs' b.tar o.rec --caption-key raw --caption-key made --workers 3 --resume"
    assert cli.parse("pack", line.replace("'my imgs'", "my-imgs").split()[2:]).caption_key == ("raw", "made")


def test_a_retyped_command_means_the_same_though_a_file_is_called_as_an_option_is() -> None:
    options = PackConfig(sources=("imgs", "-x.csv"), out="-o.rec", proof="none")
    command = shlex.split(retype("pack", options, resume=True))
    assert command == ["rwkvclip", "pack", "--proof", "none", "--resume", "--", "imgs", "-x.csv", "-o.rec"]
    assert cli.parse("pack", command[2:]) == dataclasses.replace(options, resume=True)
