"""What the recorded model does not cover: class tokens, stochastic depth, dropout, checkpointing, autocast, shifts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.model import RwkvClip, build_model, preset
from rwkvclip_cli.model.shift import shift_image, shift_text


def small(**changes: Any) -> RwkvClip:
    """A small model with every parameter random, so that no path is silent."""
    torch.manual_seed(0)
    config = preset("tiny") | {"vocab_size": 100, "n_embd": 32, "image_embed_dims": 32, "head_size": 8}
    config |= {"dim_att": 0, "dim_ffn": 0, "input_size": 32, "image_patch_size": 8, "image_num_heads": 4}
    model = build_model(config | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def images(batch: int = 3, height: int = 32, width: int = 32) -> Tensor:
    return torch.randn((batch, 3, height, width), generator=torch.Generator().manual_seed(1))


def tokens(batch: int = 3, length: int = 12) -> Tensor:
    return torch.randint(0, 100, (batch, length), generator=torch.Generator().manual_seed(2))


def test_text_shift_by_hand() -> None:
    # Two heads of two channels: in each, the first looks one token back, the second one token ahead.
    x = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]], dtype=torch.float32)
    expected = [[0, 6, 0, 8], [1, 10, 3, 12], [5, 0, 7, 0]]
    assert shift_text(x, heads=2)[0].tolist() == expected


def test_image_shift_by_hand() -> None:
    # One head of four channels on a grid of 2 x 2 patches, and a class token; all channels of a token are equal.
    x = torch.tensor([1.0, 2, 3, 4, 9]).view(1, 5, 1).expand(1, 5, 4)
    # From the left, the right, above, below; the grid is [1 2; 3 4].
    expected = [[0, 2, 0, 3], [1, 0, 0, 4], [0, 4, 1, 0], [3, 0, 2, 0], [9, 9, 9, 9]]
    assert shift_image(x, heads=1, grid=(2, 2))[0].tolist() == expected


@pytest.mark.parametrize("shift", [lambda x: shift_text(x, 2), lambda x: shift_image(x, 2, (2, 3))])
def test_shift_gradients(shift: Any) -> None:
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(shift, x.requires_grad_())


def test_single_tokens_and_single_patches() -> None:
    model = small(input_size=8)
    image, text, _ = model(images(height=8, width=8), tokens(length=1))
    assert image.shape == text.shape == (3, 32)
    assert image.isfinite().all()
    assert text.isfinite().all()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 40), (7, 65), (1, 1)])
def test_images_of_any_size(height: int, width: int) -> None:
    assert small().encode_image(images(height=height, width=width)).shape == (3, 32)


def test_padding_is_black_and_at_the_bottom_right() -> None:
    model, ragged = small(), images(height=27, width=30)
    padded = torch.zeros(3, 3, 32, 32)
    padded[:, :, :27, :30] = ragged
    assert torch.equal(model.encode_image(ragged), model.encode_image(padded))


def test_an_input_size_between_patches_has_a_grid_of_whole_patches() -> None:
    assert small(input_size=30).image_model.pos_embed.shape == (1, 16, 32)


def test_a_pair_does_not_depend_on_its_batch() -> None:
    model = small().eval()
    image, text, _ = model(images(), tokens())
    alone_image, alone_text, _ = model(images()[1:2], tokens()[1:2])
    torch.testing.assert_close(alone_image, image[1:2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(alone_text, text[1:2], rtol=1e-4, atol=1e-6)


def test_class_token_without_being_the_output() -> None:
    # It takes part in the blocks, and the embedding is the mean over the patches alone.
    model = small(image_with_cls_token=True)
    seen: list[Tensor] = []
    model.image_model.layers[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    embedding = model.encode_image(images())
    assert seen[0].shape == (3, 17, 32)
    expected = model.image_model.ln1(seen[0])[:, :16].mean(1)
    torch.testing.assert_close(embedding, expected)


def test_class_token_reads_all_and_its_neighbours_hear_it() -> None:
    model = small(image_with_cls_token=True, image_output_cls_token=True)
    model.encode_image(images()).sum().backward()
    assert model.image_model.cls_token.grad.any()
    assert model.image_model.pos_embed.grad.abs().sum(-1).all()


def test_texts_beyond_the_context_are_refused() -> None:
    with pytest.raises(UsageError, match="texts of 78 tokens; this model's ctx_len is 77") as caught:
        small().encode_text(tokens(length=78))
    assert "--context-length" in caught.value.hint


class TestStochasticDepth:
    RATE = 0.4  # of the last of the two layers; the first drops nothing

    def dropping(self, **changes: Any) -> RwkvClip:
        return small(drop_path_rate=self.RATE, **changes).train()

    def uniform(self, attention: list[float], channels: list[float]) -> Tensor:
        return torch.tensor([[[0.0] * len(attention)] * 2, [attention, channels]])

    def test_rates_lie_on_a_line(self) -> None:
        model = small(drop_path_rate=0.3, image_depth=4)
        assert model.image_model.drop_path_rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
        assert [layer.drop_path for layer in model.image_model.layers] == model.image_model.drop_path_rates

    def test_a_dropped_branch_adds_nothing_and_a_kept_one_is_rescaled(self) -> None:
        model, given = self.dropping(), images(4)
        # A value equal to the rate keeps the branch, one below drops it.
        draws = self.uniform([0.4, 0.39, 0.9, 0.0], [0.4, 0.9, 0.1, 0.2])
        before: list[Tensor] = []
        changes: list[Tensor] = []
        last = model.image_model.layers[1]
        last.register_forward_pre_hook(lambda _module, inputs: before.append(inputs[0]))
        for mix in (last.att, last.ffn):
            mix.register_forward_hook(lambda _module, _inputs, output: changes.append(output))
        after: list[Tensor] = []
        last.register_forward_hook(lambda _module, _inputs, output: after.append(output))
        model.encode_image(given, drop_path_uniform=draws)
        kept_attention = torch.tensor([1.0, 0, 1, 0]).view(-1, 1, 1) / (1 - self.RATE)
        kept_channels = torch.tensor([1.0, 1, 0, 0]).view(-1, 1, 1) / (1 - self.RATE)
        torch.testing.assert_close(after[0], before[0] + changes[0] * kept_attention + changes[1] * kept_channels)
        assert torch.equal(after[0][3], before[0][3])

    def test_given_draws_decide_everything(self) -> None:
        model, given = self.dropping(), images()
        draws = self.uniform([0.1, 0.5, 0.9], [0.5, 0.2, 0.7])
        state = torch.get_rng_state()
        first = model(given, tokens(), drop_path_uniform=draws)[0]
        torch.rand(5)
        assert torch.equal(model(given, tokens(), drop_path_uniform=draws)[0], first)
        # Position in the batch is all that counts: the same sample with its own draws gives the same embedding.
        alone = model.encode_image(given[1:2], draws[:, :, 1:2])
        torch.testing.assert_close(alone, first[1:2], rtol=1e-4, atol=1e-6)
        torch.set_rng_state(state)

    def test_draws_come_from_torchs_generator_and_are_used_as_given_ones(self) -> None:
        model, given = self.dropping(), images(64)
        torch.manual_seed(5)
        drawn = model(given, tokens(64))[0]
        torch.manual_seed(5)
        assert torch.equal(model(given, tokens(64), drop_path_uniform=torch.rand(2, 2, 64))[0], drawn)

    @pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.4, False)])
    def test_nothing_is_drawn_where_nothing_can_drop(self, rate: float, training: bool) -> None:
        model = small(drop_path_rate=rate).train(training)
        state = torch.get_rng_state()
        free = model(images(), tokens())[0]
        assert torch.equal(torch.get_rng_state(), state)
        ignored = model(images(), tokens(), drop_path_uniform=torch.zeros(2, 2, 3))[0]
        assert torch.equal(ignored, free)

    def test_kept_share(self) -> None:
        model = self.dropping()
        torch.manual_seed(0)
        given = images(1).expand(2000, -1, -1, -1)
        with torch.no_grad():
            distinct, counts = model.encode_image(given).unique(dim=0, return_counts=True)
        assert len(distinct) == 4  # both branches, either, neither
        keep = 1 - self.RATE
        shares = sorted([keep * keep, keep * self.RATE, keep * self.RATE, self.RATE * self.RATE])
        # Five standard errors of a share near 0.3 of 2000.
        assert (counts / 2000).sort().values.tolist() == pytest.approx(shares, abs=0.05)

    def test_a_wrong_shape_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"must have shape \(2, 2, 3\).*got torch.Size\(\[2, 3\]\)"):
            self.dropping().encode_image(images(), torch.zeros(2, 3))


def test_dropout_acts_on_training_texts_alone() -> None:
    model = small(dropout=0.5)
    model.train()
    assert not torch.equal(model.encode_text(tokens()), model.encode_text(tokens()))
    assert torch.equal(model.encode_image(images()), model.encode_image(images()))
    model.eval()
    assert torch.equal(model.encode_text(tokens()), model.encode_text(tokens()))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_blocks_give_the_same_gradients(dropout: float) -> None:
    found = []
    for with_cp in (False, True):
        model = small(with_cp=with_cp, drop_path_rate=0.4, dropout=dropout).train()
        torch.manual_seed(3)
        image, text, scale = model(images(), tokens())
        (scale * (image * text).sum()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_float32_embeddings_near_the_full_ones(dtype: torch.dtype) -> None:
    model = small()
    full = model(images(), tokens())
    streams: set[torch.dtype] = set()
    for block in (*model.image_model.layers, *model.text_model.blocks):
        block.register_forward_hook(lambda _module, _inputs, output: streams.add(output.dtype))
    with torch.autocast("cpu", dtype=dtype):
        image, text, scale = model(images(), tokens())
    assert image.dtype == text.dtype == scale.dtype == torch.float32
    assert streams == {torch.float32}
    for half, exact in zip((image, text), full, strict=False):
        error = (half - exact).norm() / exact.norm()
        assert 1e-5 < error < 0.03  # it did use the lower type, and not for the sums
    (scale * (image * text).sum()).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_blocks_are_plain_module_lists() -> None:
    # Compiled or checkpointed one by one: a wrapper round each leaves the outputs as they are.
    class Wrapper(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self._orig_mod = block

        def forward(self, *inputs: Any) -> Tensor:
            return self._orig_mod(*inputs)

    model = small()
    expected = model(images(), tokens())
    for blocks in (model.image_model.layers, model.text_model.blocks):
        assert isinstance(blocks, torch.nn.ModuleList)
        for index in range(len(blocks)):
            blocks[index] = Wrapper(blocks[index])
    assert all(torch.equal(a, b) for a, b in zip(model(images(), tokens()), expected, strict=True))


@pytest.mark.gpu
def test_bf16_training_step_on_a_gpu() -> None:
    model = small(drop_path_rate=0.4)
    draws = torch.rand(2, 2, 3)
    expected = model(images(), tokens(), drop_path_uniform=draws)
    model.cuda()
    inputs = (images().cuda(), tokens().cuda())
    for a, b in zip(model(*inputs, drop_path_uniform=draws.cuda()), expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        image, text, scale = model(*inputs, drop_path_uniform=draws.cuda())
    (scale * (image * text).sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_use_kernels_reaches_both_towers_and_every_attention() -> None:
    model = small()
    places = [model.image_model, model.text_model, *(block.att for block in model.image_model.layers)]
    places += [block.att for block in model.text_model.blocks]
    assert len(places) == 2 + 2 + 2
    assert all(place.kernels for place in places)
    model.use_kernels(False)
    assert not any(place.kernels for place in places)


@pytest.mark.gpu
def test_recomputed_fused_blocks_give_the_same_gradients() -> None:
    found = []
    for with_cp in (False, True):
        model = small(with_cp=with_cp, drop_path_rate=0.4).cuda().train()
        draws = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(3)).cuda()
        image, text, _ = model(images().cuda(), tokens().cuda(), drop_path_uniform=draws)
        (image * text).sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
