"""Learning rates by hand, what decays, and updates that leave bad gradients out."""

import math

import pytest
import torch
from helpers import TINY_MODEL
from torch import nn

from rwkvclip_cli.model import build_model
from rwkvclip_cli.train import optim


def test_learning_rate_by_hand() -> None:
    rates = [optim.learning_rate(step, total_steps=6, warmup_steps=2, peak=1.0) for step in range(8)]
    cosine = [0.5 * (1 + math.cos(math.pi * quarter / 4)) for quarter in range(4)]
    assert rates == pytest.approx([0.5, 1.0, *cosine, 0.0, 0.0])


def test_learning_rate_without_and_with_nothing_but_warmup() -> None:
    assert optim.learning_rate(0, total_steps=1, warmup_steps=0, peak=2.0) == 2.0
    assert optim.learning_rate(3, total_steps=4, warmup_steps=4, peak=2.0) == 2.0


def test_what_decays() -> None:
    model = build_model(TINY_MODEL)
    decaying = {name for name, parameter in model.named_parameters() if optim.decays(name, parameter)}
    assert {name.split(".")[-2] + "." + name.split(".")[-1] for name in decaying} == {
        "emb.weight",
        "projection.weight",
        "receptance.weight",
        "key.weight",
        "value.weight",
        "gate.weight",
        "output.weight",
    }
    groups = optim.parameter_groups(model, 0.2)
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len(groups[0]["params"]) == len(decaying)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.logit_scale = nn.Parameter(torch.tensor(4.7))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = Line()
    optimizer = optim.build_optimizer(model, weight_decay=0.2, betas=(0.9, 0.98))
    optim.set_learning_rate(optimizer, 0.1)
    model.weight.grad, model.logit_scale.grad = torch.ones(2, 2), torch.tensor(1.0)
    norm, skipped = optim.guarded_step(optimizer, None, 0.0, model.logit_scale)
    assert (norm.item(), skipped.item()) == (pytest.approx(math.sqrt(5)), 0)
    before = [x.clone() for x in (model.weight, *optimizer.state[model.weight].values())]
    model.weight.grad = torch.tensor([[1.0, bad], [1.0, 1.0]])
    norm, skipped = optim.guarded_step(optimizer, None, 1.0, model.logit_scale)
    assert skipped.item() == 1
    after = [model.weight, *optimizer.state[model.weight].values()]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_gradients_are_clipped_and_the_logit_scale_is_bounded() -> None:
    model = Line()
    optimizer = optim.build_optimizer(model, weight_decay=0.0, betas=(0.9, 0.98))
    model.weight.grad, model.logit_scale.grad = torch.full((2, 2), 3.0), torch.tensor(0.0)
    norm, _ = optim.guarded_step(optimizer, None, 1.5, model.logit_scale)
    assert norm.item() == pytest.approx(6.0)
    assert model.weight.grad.norm().item() == pytest.approx(1.5, rel=1e-5)
    assert model.logit_scale.item() == pytest.approx(math.log(100))
