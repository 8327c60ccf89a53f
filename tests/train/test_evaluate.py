"""Recall by hand, ties included, and a checkpoint measured through the command."""

import json
from pathlib import Path

import pytest
import torch
from helpers import run_cli, write_model_config, write_packed
from safetensors.torch import save_file
from shard_files import split_set

from rwkvclip_cli.model import build_model, read_model_config
from rwkvclip_cli.train.evaluate import Retrieval, recall_at_k, retrieval_metrics

# Rows are queries; the right column of row i is column i.
SCORES = torch.tensor(
    [
        [0.9, 0.1, 0.2, 0.3],  # first
        [0.8, 0.3, 0.5, 0.1],  # third
        [0.4, 0.4, 0.4, 0.4],  # a tie of all four
        [0.7, 0.2, 0.7, 0.7],  # a tie of three
    ]
)


def test_recall_by_hand() -> None:
    found = recall_at_k(SCORES, torch.arange(4), (1, 2, 3, 4))
    assert found[1] == pytest.approx((1 + 0 + 1 / 4 + 1 / 3) / 4)
    assert found[2] == pytest.approx((1 + 0 + 2 / 4 + 2 / 3) / 4)
    assert found[3] == pytest.approx((1 + 1 + 3 / 4 + 1) / 4)
    assert found[4] == 1.0


def test_fewer_candidates_than_k() -> None:
    assert recall_at_k(torch.tensor([[0.1, 0.2]]), torch.tensor([0]), (5,)) == {5: 1.0}


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_both_directions_against_a_sorted_matrix(chunk_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    image = torch.randn(7, 5, generator=generator)
    text = image + torch.randn(7, 5, generator=generator)
    found = dict(retrieval_metrics(image, text, ks=(1, 2), chunk_size=chunk_size))
    cosine = torch.nn.functional.cosine_similarity(image[:, None], text[None], dim=-1)
    for direction, scores in (("image_to_text", cosine), ("text_to_image", cosine.T)):
        order = scores.argsort(dim=1, descending=True)
        for k in (1, 2):
            hits = sum(i in order[i, :k].tolist() for i in range(7))
            assert found[f"{direction}/recall@{k}"] == pytest.approx(hits / 7)
    assert 0 < found["image_to_text/recall@1"] < 1


def test_shuffled_targets_pair_the_same_rows_in_both_directions() -> None:
    image, order = torch.eye(6), torch.tensor([3, 0, 5, 1, 4, 2])
    text = torch.eye(6)[order.argsort()]  # image i belongs to text order[i]
    assert set(dict(retrieval_metrics(image, text, order.unsqueeze(0))).values()) == {1.0}
    half = torch.stack([order, torch.arange(6)])
    # Image 4's own text is its pair in both pairings; the other five are right in the first alone.
    assert dict(retrieval_metrics(image, text, half))["image_to_text/recall@1"] == pytest.approx((6 + 1) / 12)


def test_a_model_that_collapsed_scores_chance() -> None:
    same = torch.ones(20, 4)
    found = dict(retrieval_metrics(same, same))
    assert found["image_to_text/recall@1"] == pytest.approx(1 / 20)
    assert found["text_to_image/recall@10"] == pytest.approx(10 / 20)


def test_the_command_measures_what_the_functions_do(tmp_path: Path) -> None:
    """Every path from file to number, against embeddings computed here; batches divide neither records nor shards."""
    from rwkvclip_cli.data.loader import LoaderSpec, eval_batches
    from rwkvclip_cli.data.packed import open_packed

    rec = write_packed(tmp_path / "pairs.rec", 23)
    shards = split_set(rec, 5, tmp_path / "shards.rec")
    config = write_model_config(tmp_path / "model.json")
    torch.manual_seed(0)
    model = build_model(read_model_config(config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_file({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    done = run_cli(
        "eval", tmp_path / "w.safetensors", "--data", shards, "--model-config", config, "--batch-size", "10",
        "--caption-slot", "1", "--json", "--precision", "fp32", "--chunk-size", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    with torch.inference_mode():
        (batch,) = eval_batches(open_packed(rec), LoaderSpec(23, 16), caption_slot=1)
        image, text, _ = model.eval()(batch.images, batch.tokens)
    assert document["count"] == document["distinct_captions"] == 23
    assert Retrieval.read(document).document() == document
    for name, value in retrieval_metrics(image, text):
        direction, metric = name.split("/")
        assert document[direction][metric] == pytest.approx(value, abs=1e-9)
    assert set(document["chance"]["image_to_text"]) == {"recall@1", "recall@5", "recall@10"}


def test_mistakes_are_named(tmp_path: Path) -> None:
    rec = write_packed(tmp_path / "pairs.rec", 3)
    missing = run_cli("eval", tmp_path / "nothing", "--data", rec)
    assert missing.returncode == 2
    assert "no checkpoint there" in missing.stderr
    save_file({"weight": torch.ones(2)}, tmp_path / "w.safetensors")
    unknown = run_cli("eval", tmp_path / "w.safetensors", "--data", rec)
    assert unknown.returncode == 2
    assert "weights alone do not say which model" in unknown.stderr
    wrong = run_cli("eval", tmp_path / "w.safetensors", "--data", rec, "--model", "tiny")
    assert wrong.returncode == 1
    assert "Traceback" not in wrong.stderr
