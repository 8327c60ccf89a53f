"""First values of the published sizes, against statistics of the published construction."""

import math
from pathlib import Path

import pytest
import torch

from rwkvclip_cli.model import RwkvClip, build_model, preset
from rwkvclip_cli.model.blocks import bonus_schedule, channel_ramp, decay_schedule

GOLDEN = Path(__file__).parent.parent / "golden"
SCHEDULE_TOLERANCE = 1e-5
STANDARD_ERRORS = 5.0
DRAWN = ("_w1", "_w2", "emb.weight", "projection.weight", "projection.bias")
MATRICES = ("receptance.weight", "key.weight", "value.weight", "gate.weight", "output.weight")


def statistics(size: str) -> list[tuple[str, float, float, float, float]]:
    """(name, mean, standard deviation, least, greatest) of every published parameter, in order."""
    lines = (GOLDEN / f"{size}_init_stats.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return [(row[0], *(float(value) for value in row[3:])) for row in rows]


@pytest.mark.parametrize("size", ["b32", "b16"])
def test_statistics_of_every_parameter(size: str) -> None:
    torch.manual_seed(2)
    parameters = dict(build_model(preset(f"rwkv-clip-{size}")).named_parameters())
    rows = statistics(size)
    assert list(parameters) == [row[0] for row in rows]
    drawn = 0
    for name, mean, std, least, greatest in rows:
        values = parameters[name].detach().double()
        got_mean, got_std = values.mean().item(), values.std(correction=0).item()
        got_least, got_greatest = values.min().item(), values.max().item()
        if name.endswith(DRAWN + MATRICES) and std > 0:
            drawn += 1
            count = values.numel()
            # The difference of two samples' means, or standard deviations, has sqrt(2) times one sample's error.
            assert abs(got_mean - mean) < STANDARD_ERRORS * std * math.sqrt(2 / count), name
            assert abs(got_std - std) < STANDARD_ERRORS * std / math.sqrt(count), name
            if name.startswith("text_model") and name.endswith(MATRICES):
                # Orthogonal: about normal, so the extremes are where a million normal draws have theirs.
                assert 3.5 * std < -got_least < 6.5 * std, name
                assert 3.5 * std < got_greatest < 6.5 * std, name
            else:
                # Uniform: the bounds are sqrt(3) standard deviations away, and many draws come close to them.
                bound = max(abs(least), abs(greatest))
                assert got_least == pytest.approx(-bound, rel=2e-2), name
                assert got_greatest == pytest.approx(bound, rel=2e-2), name
        else:
            found = (got_mean, got_std, got_least, got_greatest)
            expected = (mean, std, least, greatest)
            assert found == pytest.approx(expected, abs=SCHEDULE_TOLERANCE), name
    # Text: the embedding, and of each of 6 layers 5 matrices and 2 low-rank ones that are not zero.
    # Image: the projection's two, and of each of 12 layers 8 matrices and 4 low-rank ones.
    assert drawn == 1 + 6 * 7 + 2 + 12 * 12


@pytest.fixture
def small() -> RwkvClip:
    torch.manual_seed(0)
    return build_model(preset("tiny") | {"vocab_size": 100})


def test_text_matrices_are_orthogonal_with_their_gains(small: RwkvClip) -> None:
    block = small.text_model.blocks[0]
    for weight, gain in ((block.att.value.weight, 1.0), (block.att.key.weight, 0.1), (block.att.gate.weight, 0.1)):
        torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(64), atol=1e-6, rtol=1e-5)
    hidden = block.ffn.key.weight  # (224, 64): columns of length 0.5 sqrt(3.5)
    torch.testing.assert_close(hidden.T @ hidden, 0.25 * 3.5 * torch.eye(64), atol=1e-5, rtol=1e-5)


def test_fresh_text_blocks_change_nothing(small: RwkvClip) -> None:
    # The matrices that write to the stream start at zero, so only the norms act on the embeddings.
    tokens = torch.randint(0, 100, (2, 9))
    x = small.text_model.ln_out(small.text_model.blocks[0].ln0(small.text_model.emb(tokens)))
    expected = torch.nn.functional.normalize(x, dim=-1).mean(1)
    torch.testing.assert_close(small.encode_text(tokens), expected)


def test_the_text_tower_starts_on_its_training_types_grid() -> None:
    torch.manual_seed(0)
    rounded = build_model(preset("tiny") | {"vocab_size": 100, "precision": "bf16"}).text_model
    exact = build_model(preset("tiny") | {"vocab_size": 100, "precision": "fp32"}).text_model
    for name, value in rounded.named_parameters():
        assert torch.equal(value, value.bfloat16().float()), name
    for name in ("time_decay", "time_faaaa"):
        value = getattr(exact.blocks[1].att, name)
        assert torch.equal(value, value.bfloat16().float())
    assert not torch.equal(exact.emb.weight, exact.emb.weight.bfloat16().float())


def test_without_rwkv_initialisation_pytorchs_defaults_stay() -> None:
    torch.manual_seed(0)
    text = build_model(preset("tiny") | {"vocab_size": 1000, "text_initialization": False}).text_model
    assert text.emb.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert text.blocks[0].att.output.weight.any()
    assert text.blocks[0].att.ln_x.weight.eq(1).all()


def test_seeds_decide_every_value() -> None:
    def build(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build_model(preset("tiny") | {"vocab_size": 100}).state_dict()

    first, again, other = build(1), build(1), build(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["text_model.emb.weight"], other["text_model.emb.weight"])


def test_schedules_by_hand() -> None:
    assert channel_ramp(4).tolist() == [0.0, 0.25, 0.5, 0.75]
    # First layer: exponent 0.7; last layer: 2.
    assert decay_schedule(3, 0.0).tolist() == pytest.approx([-6.0, -6 + 5 * 0.5**0.7, -1.0])
    assert decay_schedule(3, 1.0).tolist() == pytest.approx([-6.0, -4.75, -1.0])
    assert bonus_schedule(4, 0.0).tolist() == pytest.approx([0.0, 0.1, -0.1, 0.0])
    assert bonus_schedule(3, 1.0).tolist() == pytest.approx([1.0, 0.6, -0.1])
