"""How well a checkpoint retrieves: recall@k both ways over a packed data set, exact, in row chunks.

>>> dict(retrieval_metrics(image, text))["image_to_text/recall@1"]
0.42
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rwkvclip_cli import console
from rwkvclip_cli.config import EvalConfig
from rwkvclip_cli.console import RwkvClipError, UsageError, counted
from rwkvclip_cli.data.loader import LoaderSpec, eval_batches, loader_threads
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.model import build_model, load_reference_state, preset, read_model_config
from rwkvclip_cli.train import checkpoint
from rwkvclip_cli.train.distributed import read_ranks
from rwkvclip_cli.train.precision import autocast, set_matmul_precision

RECALL_AT = (1, 5, 10)
SHUFFLES = 20  # permutations that measured chance is a mean of; one alone would hit about once, give or take one
DIRECTIONS = ("image_to_text", "text_to_image")


def recall_at_k(scores: Tensor, targets: Tensor, ks: tuple[int, ...] = RECALL_AT) -> dict[int, float]:
    """Share of queries whose target is among the k best candidates.

    Candidates that tie with the target share their places: what counts is the chance that the target lands among the
    first k when ties are broken at random. So a model that gives one score to all reaches exactly chance.

    Args:
        scores: (Q, K), higher is better.
        targets: (Q,), int64, each query's right column.

    >>> recall_at_k(torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.5]]), torch.tensor([0, 1]), (1, 2, 3))
    {1: 0.5, 2: 0.5, 3: 1.0}
    """
    counts = _hits(scores, targets, ks)
    return {k: count / len(targets) for k, count in zip(ks, counts.tolist(), strict=True)}


def _hits(scores: Tensor, targets: Tensor, ks: tuple[int, ...]) -> Tensor:
    """Expected hits (len(ks),) float64 among the queries of scores (Q, K)."""
    target_scores = scores.gather(1, targets.unsqueeze(1))
    better = (scores > target_scores).sum(1)
    tied = (scores == target_scores).sum(1)  # the target itself included
    wanted = torch.tensor(ks, device=scores.device).unsqueeze(1)
    chance = ((wanted - better) / tied).clamp(0, 1)  # (len(ks), Q)
    return chance.double().sum(1)


def retrieval_metrics(
    image: Tensor,
    text: Tensor,
    pairings: Tensor | None = None,
    *,
    ks: tuple[int, ...] = RECALL_AT,
    chunk_size: int = 1024,
) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of recall@k in both directions; no more than `chunk_size` rows of scores are held.

    Args:
        image, text: (N, C), any scale; row i of one belongs to row i of the other.
        pairings: (P, N), int64, permutations that pair image i with text pairings[p, i]; the values are means over
            them. None is the identity alone.
    """
    image, text = F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)
    if pairings is None:
        pairings = torch.arange(len(image), device=image.device).unsqueeze(0)
    for direction, queries, candidates, right in (
        (DIRECTIONS[0], image, text, pairings),
        (DIRECTIONS[1], text, image, pairings.argsort(dim=1)),
    ):
        hits = torch.zeros(len(ks), dtype=torch.float64, device=image.device)
        for first in range(0, len(queries), chunk_size):
            rows = slice(first, first + chunk_size)
            scores = queries[rows] @ candidates.T
            for targets in right[:, rows]:
                hits += _hits(scores, targets, ks)
        for k, count in zip(ks, hits.tolist(), strict=True):
            yield f"{direction}/recall@{k}", count / right.numel()


@dataclass(frozen=True)
class Retrieval:
    """What `eval` found: recall@k in 0..1 by direction, beside the same model's on shuffled pairs."""

    count: int
    distinct_captions: int
    recall: dict[str, float]
    chance: dict[str, float]

    def document(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        nested = {"count": self.count, "distinct_captions": self.distinct_captions, **_nest(self.recall)}
        return {**nested, "chance": _nest(self.chance)}

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """The result that `document` was made of."""
        chance = document["chance"]
        return cls(document["count"], document["distinct_captions"], _flat(document), _flat(chance))


def _nest(values: dict[str, float]) -> dict[str, dict[str, float]]:
    nested: dict[str, dict[str, float]] = {direction: {} for direction in DIRECTIONS}
    for name, value in values.items():
        direction, metric = name.split("/")
        nested[direction][metric] = value
    return nested


def _flat(nested: dict[str, Any]) -> dict[str, float]:
    return {f"{way}/{metric}": value for way in DIRECTIONS for metric, value in nested[way].items()}


def evaluate(config: EvalConfig) -> Retrieval:
    """Embed every record of `config.data` with the checkpoint and measure retrieval both ways."""
    packed = open_packed(config.data)
    device = read_ranks().device
    precision = config.precision or ("bf16" if device.type == "cuda" else "fp32")
    set_matmul_precision(precision)
    model, model_config = load_model(config.checkpoint, config.model, config.model_config)
    model = model.to(device).eval()
    spec = LoaderSpec(
        batch_size=min(config.batch_size, packed.count),
        image_size=model_config["input_size"],
        device_id=device.index or 0 if device.type == "cuda" else None,
        threads=loader_threads(config.workers, 1),
        vocab_size=model_config["vocab_size"],
    )
    images, texts, tokens = [], [], []
    with torch.inference_mode(), console.progress(packed.count, "embedding", "pairs") as bar:
        for batch in eval_batches(packed, spec, caption_slot=config.caption_slot):
            with autocast(precision, device):
                image, text, _ = model(batch.images, batch.tokens)
            images.append(image.float())
            texts.append(text.float())
            tokens.append(batch.tokens.cpu().numpy())
            bar.advance(len(batch.records))
    image, text = torch.cat(images), torch.cat(texts)
    if not (torch.isfinite(image).all() and torch.isfinite(text).all()):
        raise RwkvClipError(f"{config.checkpoint}: the model gives embeddings that are not finite numbers")
    # Scores decide between near equals: they are full float32 whatever the model ran in.
    set_matmul_precision("fp32")
    # Shuffled pairs: the same model and scores, so what remains is chance, ties and hubs included.
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.stack([torch.randperm(packed.count, generator=generator) for _ in range(SHUFFLES)]).to(device)
    return Retrieval(
        count=packed.count,
        distinct_captions=len(np.unique(np.concatenate(tokens), axis=0)),
        recall=dict(retrieval_metrics(image, text, chunk_size=config.chunk_size)),
        chance=dict(retrieval_metrics(image, text, shuffled, chunk_size=config.chunk_size)),
    )


def load_model(path: str, model_name: str | None, model_config: str | None) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a checkpoint folder, run folder or weights file, with its arguments.

    Weights alone do not say the model's arguments; then `model_name` or `model_config` has to.
    """
    found = checkpoint.resolve(path)
    if model_config:
        arguments = read_model_config(Path(model_config))
    elif model_name:
        arguments = preset(model_name)
    elif found.is_dir():
        arguments = dict(checkpoint.read_state(found)["model_config"])
    else:
        raise UsageError(
            f"{found}: weights alone do not say which model they are of",
            hint=f"rwkvclip eval {path} --model rwkv-clip-b32 --data ...",
        )
    model = build_model(arguments)
    load_reference_state(model, checkpoint.read_weights(found / checkpoint.MODEL_FILE if found.is_dir() else found))
    return model, arguments


def table(result: Retrieval) -> str:
    """The result as text: a row a direction, chance beside it, in per cent."""
    names = {"image_to_text": "image -> text", "text_to_image": "text -> image"}
    ks = "".join(f"{f'R@{k}':>8}" for k in RECALL_AT)
    lines = [
        f"{counted(result.count, 'pair')}, {counted(result.distinct_captions, 'distinct caption')}",
        f"{'':26}{ks}",
    ]
    for title, values in (("", result.recall), ("  shuffled", result.chance)):
        for direction in DIRECTIONS:
            row = "".join(f"{100 * values[f'{direction}/recall@{k}']:7.2f}%" for k in RECALL_AT)
            lines.append(f"{names[direction] + title:<26}{row}")
    return "\n".join(lines)
