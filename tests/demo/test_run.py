"""The demo runs the real commands, fits its own data and says honestly what came out."""

import copy
import json
import random
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import run_cli

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.demo import run as demo
from rwkvclip_cli.demo.run import MODEL, Recipe, commands, run_demo, summary
from rwkvclip_cli.demo.scenes import Figure, Scene, captioned_scenes, describe, write_scenes

LEARNT: dict[str, Any] = {
    "count": 512,
    "distinct_captions": 511,
    "image_to_text": {"recall@1": 0.5, "recall@5": 0.75, "recall@10": 1.0},
    "text_to_image": {"recall@1": 0.25, "recall@5": 0.5, "recall@10": 0.9375},
    "chance": {
        "image_to_text": {"recall@1": 0.001953125, "recall@5": 0.01, "recall@10": 0.02},
        "text_to_image": {"recall@1": 0.0, "recall@5": 0.008, "recall@10": 0.018},
    },
}


def use_results(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> None:
    """Let the commands do nothing and the evaluation find `found`."""
    monkeypatch.setattr(demo, "_run", lambda arguments, folder, keep: json.dumps(found))


def test_commands_on_a_machine_without_gpus() -> None:
    lines = [shlex.join(arguments) for arguments in commands(Recipe(), 0)]
    assert lines == [
        "pack scenes/train train.rec --context-length 24",
        "pack scenes/held-out held-out.rec --context-length 24",
        "nccl-check --backend gloo --cpus 2",
        "launch --cpus 2 -- --output run --train-data train.rec --model-config model.json"
        " --batch-size 64 --epochs 5 --lr 0.005 --precision fp32 --seed 0",
        "eval run --data held-out.rec --json",
    ]


@pytest.mark.parametrize(("gpus", "batch_size"), [(1, 128), (8, 16), (3, 42), (256, 1)])
def test_gpus_share_one_global_batch_and_use_bf16(gpus: int, batch_size: int) -> None:
    _, _, check, launch, _ = commands(Recipe(), gpus)
    assert check == ["nccl-check", "--gpus", str(gpus)]
    assert launch[:4] == ["launch", "--gpus", str(gpus), "--"]
    options = dict(zip(launch[4::2], launch[5::2], strict=True))
    assert (options["--batch-size"], options["--precision"]) == (str(batch_size), "bf16")


def test_the_model_reads_what_is_packed() -> None:
    from rwkvclip_cli.model.presets import ModelArguments

    arguments = ModelArguments.read(MODEL)
    assert arguments.ctx_len == demo.CONTEXT_LENGTH
    packed = {words[words.index("--context-length") + 1] for words in commands(Recipe(), 0) if words[0] == "pack"}
    assert packed == {str(demo.CONTEXT_LENGTH)}


def test_no_caption_is_cut() -> None:
    tokenizer = Tokenizer()
    captions = [text for _, texts in captioned_scenes(1500, seed=0, held_out=False) for text in texts]
    # The words of the most tokens together, which a sample may miss.
    wordy = (Figure("cross", "red", "small"), Figure("boat", "blue", "large"))
    for layout, figures, number in (("stacked", wordy, 2), ("beside", wordy, 2), ("group", wordy[:1], 4)):
        scene = Scene(layout, figures, number, "orange", "striped")
        captions += [text for seed in range(300) for text in describe(scene, random.Random(seed))]
    longest = max(captions, key=lambda text: len(tokenizer.encode(text)))
    assert len(tokenizer.encode(longest)) + 2 <= demo.CONTEXT_LENGTH, longest  # with start and end


def test_the_summary_is_what_eval_prints_and_a_verdict() -> None:
    assert summary(LEARNT).splitlines() == [
        "512 pairs, 511 distinct captions",
        "                               R@1     R@5    R@10",
        "image -> text               50.00%  75.00% 100.00%",
        "text -> image               25.00%  50.00%  93.75%",
        "image -> text  shuffled      0.20%   1.00%   2.00%",
        "text -> image  shuffled      0.00%   0.80%   1.80%",
        "recall@1 is 256 and 128 times chance, which is 1 in 512; no scene of these pairs was in training",
    ]


def test_folder_stays_or_goes_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_results(monkeypatch, LEARNT)
    recipe = Recipe(train_scenes=4, held_out_scenes=3)
    assert run_demo(tmp_path / "kept", True, recipe) == LEARNT
    shown = capsys.readouterr()
    assert shown.out == summary(LEARNT) + "\n"
    assert f"everything is in {tmp_path / 'kept'}" in shown.err
    files = {path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*")}
    assert {"model.json", "scenes/train/00003.txt", "scenes/held-out/00002.jpg"} <= files
    assert not {"scenes/train/00004.txt", "scenes/held-out/00003.txt"} & files
    run_demo(tmp_path / "gone", False, recipe)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("direction", ["image_to_text", "text_to_image"])
def test_a_model_that_learnt_too_little_fails_the_demo(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = copy.deepcopy(LEARNT)
    found[direction]["recall@1"] = 19.9 / 512
    use_results(monkeypatch, found)
    name = direction.replace("_", " ")
    with pytest.raises(RwkvClipError, match=f"recall@1 {name} is 19.9 times chance, where it should be 20 at least"):
        run_demo(tmp_path / "run", False, Recipe(train_scenes=1, held_out_scenes=1))
    assert summary(found) in capsys.readouterr().out
    found[direction]["recall@1"] = 20 / 512
    use_results(monkeypatch, found)
    run_demo(tmp_path / "run", False, Recipe(train_scenes=1, held_out_scenes=1))


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = run_cli("demo", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"rwkvclip: {tmp_path} is there already and not an empty folder; the demo needs one of its own",
        f"  try: rwkvclip demo {tmp_path}-2",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(UsageError, match="not an empty folder"):
        run_demo(tmp_path / "thesis.txt", True)


@pytest.mark.parametrize("keep", [True, False])
def test_a_failing_step_ends_the_demo_with_its_code(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "commands", lambda recipe, gpus: [["pack", "scenes/none", "none.rec"], ["never"]])
    folder = tmp_path / "run"
    with pytest.raises(RwkvClipError) as caught:
        run_demo(folder, keep, Recipe(train_scenes=1, held_out_scenes=1))
    direct = run_cli("pack", "scenes/none", "none.rec", cwd=tmp_path).returncode
    assert caught.value.exit_code == direct != 0
    assert caught.value.message == f"the demo's pack ended with exit code {direct}"
    again = f"cd {folder} && rwkvclip pack scenes/none none.rec"
    assert caught.value.hint == (again if keep else "rwkvclip demo FOLDER   (keeps what it made)")
    assert folder.exists() == keep
    said = capfd.readouterr().err
    assert "\n$ rwkvclip pack scenes/none none.rec\n" in said
    assert "scenes/none" in said.split("none.rec\n", 1)[1]
    assert "never" not in said


def test_a_killed_step_counts_as_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], -9)

    monkeypatch.setattr(subprocess, "run", killed)
    with pytest.raises(RwkvClipError, match="ended with exit code 137"):
        run_demo(tmp_path / "run", False, Recipe(train_scenes=1, held_out_scenes=1))


def test_settings_of_the_users_folder_do_not_reach_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rwkvclip.toml").write_text("[pack]\ncaptions = 1\n")
    monkeypatch.chdir(tmp_path)
    write_scenes(Path("run/scenes"), 2, seed=0, held_out=False)
    demo._run(["pack", "scenes", "train.rec"], Path("run"), keep=True)
    assert json.loads(Path("run/train.manifest.json").read_text())["captions"] == 3


def test_every_step_runs_for_real(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All commands on little data: too little to learn from, which the demo has to notice."""
    folder = tmp_path / "run"
    recipe = Recipe(train_scenes=64, held_out_scenes=32, global_batch=32, epochs=1)
    with pytest.raises(RwkvClipError, match="learnt too little"):
        run_demo(folder, True, recipe)
    shown = capfd.readouterr()
    assert shown.out.startswith("32 pairs, 32 distinct captions\n")
    assert [line.split()[2] for line in shown.err.splitlines() if line.startswith("$ rwkvclip ")] == [
        "pack",
        "pack",
        "nccl-check",
        "launch",
        "eval",
    ]
    assert "64 records" in shown.err
    steps = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 2


def check_the_demo() -> None:
    done = run_cli("demo", timeout_s=560)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "512 pairs, 512 distinct captions"
    recall = {line.rsplit(maxsplit=3)[0]: float(line.split("%")[0].split()[-1]) for line in lines[2:4]}
    assert set(recall) == {"image -> text", "text -> image"}
    assert all(value >= 10 for value in recall.values()), recall


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo() -> None:
    check_the_demo()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_the_whole_demo_on_gpus() -> None:
    check_the_demo()


def test_a_folder_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RwkvClipError, match=r"cannot write .*/file/demo: Not a directory"):
        run_demo(tmp_path / "file" / "demo", keep=True)
