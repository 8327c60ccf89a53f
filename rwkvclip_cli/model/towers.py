"""RWKV-CLIP: an image tower and a text tower whose embeddings are compared.

    >>> image_embedding, text_embedding, logit_scale = RwkvClip(arguments)(images, tokens)

Legend: B batch, S image side, T tokens, C channels; module and parameter names are the published checkpoints'.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.model.blocks import Block, Geometry, TimeMix, compute_dtype, layer_norm
from rwkvclip_cli.model.init import init_image_tower, init_text_tower
from rwkvclip_cli.model.presets import ModelArguments
from rwkvclip_cli.model.shift import Shift
from rwkvclip_cli.model.wkv6 import triton_is_there

NORM_EPS = 1e-5
FIRST_TEMPERATURE = 0.07
"""Radford et al., "Learning Transferable Visual Models" (arXiv 2103.00020), section 2.5."""


class PatchEmbed(nn.Module):
    """Cut images into patches, padded with zeros below and to the right, and project each to a token."""

    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Conv2d(3, width, patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """(B, 3, height, width) -> (B, T, C) and the grid (rows, columns) with T = rows * columns, row by row."""
        height, width = images.shape[-2:]
        below, right = -height % self.patch_size, -width % self.patch_size
        if below or right:
            images = functional.pad(images, (0, right, 0, below))
        if images.is_cuda:
            return self._as_product(images), (images.shape[2] // self.patch_size, images.shape[3] // self.patch_size)
        tokens = self.projection(images)
        return tokens.flatten(2).transpose(1, 2), (tokens.shape[2], tokens.shape[3])

    def _as_product(self, images: Tensor) -> Tensor:
        """The convolution as what it is where patches do not overlap: one matrix product."""
        batch, colours, height, width = images.shape
        size, weight = self.patch_size, self.projection.weight
        patches = images.to(compute_dtype(images)).view(batch, colours, height // size, size, width // size, size)
        rows = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, weight[0].numel())
        return functional.linear(rows, weight.flatten(1), self.projection.bias)


class ImageTower(nn.Module):
    """Patches, blocks with a two-dimensional token shift, and the mean over patches (or a class token, the last)."""

    def __init__(self, arguments: ModelArguments) -> None:
        super().__init__()
        width, depth = arguments.image_embed_dims, arguments.image_depth
        side = -(-arguments.input_size // arguments.image_patch_size)
        self.heads = arguments.image_num_heads
        self.grid = (side, side)
        self.output_cls_token = arguments.image_output_cls_token
        self.checkpoint_blocks = arguments.with_cp
        self.kernels = True
        self.drop_path_rates = [arguments.drop_path_rate * layer / (depth - 1) for layer in range(depth)]
        geometry = Geometry(width, self.heads, arguments.image_hidden_rate * width, depth, NORM_EPS)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if arguments.image_with_cls_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, side * side, width))
        self.patch_embed = PatchEmbed(arguments.image_patch_size, width)
        self.layers = nn.ModuleList(
            Block(geometry, layer, "image", drop_path=rate) for layer, rate in enumerate(self.drop_path_rates)
        )
        self.ln1 = nn.LayerNorm(width)
        init_image_tower(self)

    def forward(self, images: Tensor, drop_path_uniform: Tensor | None = None) -> Tensor:
        """(B, 3, height, width) -> (B, C). `drop_path_uniform`: see `RwkvClip.forward`."""
        x, grid = self.patch_embed(images)
        x = x + self._positions(grid)
        if self.cls_token is not None:
            x = torch.cat((x, self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype)), dim=1)
        uniform = self._uniform(x, drop_path_uniform)
        shift = Shift(self.heads, grid)
        for index, layer in enumerate(self.layers):
            draws = None if uniform is None else uniform[index]
            x = _run(self, layer, x, shift, draws)
        x = layer_norm(x, self.ln1)
        return x[:, -1] if self.output_cls_token else x[:, : grid[0] * grid[1]].mean(dim=1)

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """The position embeddings (1, T, C), resampled where the image has another grid than the model was made for."""
        if grid == self.grid:
            return self.pos_embed
        plane = self.pos_embed.transpose(1, 2).unflatten(2, self.grid)
        resized = functional.interpolate(plane, size=grid, mode="bicubic", align_corners=False)
        return resized.flatten(2).transpose(1, 2)

    def _uniform(self, x: Tensor, given: Tensor | None) -> Tensor | None:
        """What decides stochastic depth: the caller's draws or fresh ones, and nothing where nothing can be dropped."""
        if not self.training or max(self.drop_path_rates) == 0:
            return None
        shape = (len(self.layers), 2, x.shape[0])
        if given is None:
            return torch.rand(shape, device=x.device)
        if given.shape != shape:
            raise ValueError(f"drop_path_uniform must have shape {shape} (layers, branches, batch); got {given.shape}")
        return given


class TextTower(nn.Module):
    """Token embeddings, blocks with a one-dimensional token shift, and the mean of all normalised positions."""

    def __init__(self, arguments: ModelArguments) -> None:
        super().__init__()
        width, depth = arguments.n_embd, arguments.n_layer
        self.heads = width // arguments.head_size
        self.context_length = arguments.ctx_len
        self.dropout = arguments.dropout
        self.checkpoint_blocks = arguments.with_cp
        self.kernels = True
        eps = NORM_EPS * arguments.head_size_divisor**2
        geometry = Geometry(width, self.heads, arguments.dim_ffn, depth, eps)
        # A table handed over saves the 31 million normal draws that nn.Embedding would make first.
        self.emb = nn.Embedding(arguments.vocab_size, width, _weight=torch.empty(arguments.vocab_size, width))
        self.blocks = nn.ModuleList(Block(geometry, layer, "text", dropout=arguments.dropout) for layer in range(depth))
        self.ln_out = nn.LayerNorm(width)
        init_text_tower(self, arguments.text_initialization, arguments.precision)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) long -> (B, C); padding counts as any other token."""
        if tokens.shape[-1] > self.context_length:
            raise UsageError(
                f"texts of {tokens.shape[-1]} tokens; this model's ctx_len is {self.context_length}",
                hint="pack the data with a --context-length that the model can read, or raise ctx_len",
            )
        x = self.emb(tokens)
        if self.dropout:
            x = functional.dropout(x, self.dropout, self.training)
        shift = Shift(self.heads)
        for block in self.blocks:
            x = _run(self, block, x, shift, None)
        return functional.normalize(layer_norm(x, self.ln_out), dim=-1).mean(dim=1)


class RwkvClip(nn.Module):
    """Both towers and the logarithm of the scale that turns cosines into logits."""

    def __init__(self, arguments: ModelArguments) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / FIRST_TEMPERATURE)))
        self.text_model = TextTower(arguments)
        self.image_model = ImageTower(arguments)
        self._text_stream: torch.cuda.Stream | None = None

    def forward(
        self, images: Tensor, tokens: Tensor, *, drop_path_uniform: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Embed a batch of pairs: images (B, 3, S, S) float, tokens (B, T) long -> (B, C), (B, C), ().

        The embeddings are not normalised; the scale is exp(logit_scale). `drop_path_uniform` (image layers, 2, B),
        float32 in [0, 1), decides stochastic depth in training: a sample keeps a layer's branch (0 attention,
        1 channel mix) where its value is at least the layer's rate, rescaled by 1 / (1 - rate). Without it the draws
        come from torch's generator, and none are made where no layer drops.
        """
        if self._text_stream is None:
            return self.encode_image(images, drop_path_uniform), self.encode_text(tokens), self.logit_scale.exp()
        # Each tower leaves parts of a GPU idle that the other can use. Backward each runs where it ran forward.
        now = torch.cuda.current_stream(images.device)
        self._text_stream.wait_stream(now)
        with torch.cuda.stream(self._text_stream):
            text = self.encode_text(tokens)
        image = self.encode_image(images, drop_path_uniform)
        now.wait_stream(self._text_stream)
        return image, text, self.logit_scale.exp()

    def use_text_stream(self, stream: "torch.cuda.Stream | None") -> None:
        """Run the text tower on a CUDA stream of its own, beside the image tower; None for one after the other."""
        self._text_stream = stream

    def use_kernels(self, on: bool) -> None:
        """Whether blocks on a GPU may run as kernels that Triton compiles, or as plain PyTorch operations alone."""
        for tower in (self.image_model, self.text_model):
            tower.kernels = on
            for module in tower.modules():
                if isinstance(module, TimeMix):
                    module.kernels = on

    def encode_image(self, images: Tensor, drop_path_uniform: Tensor | None = None) -> Tensor:
        """(B, 3, height, width) float -> (B, C), not normalised."""
        embedding: Tensor = self.image_model(images, drop_path_uniform)
        return embedding

    def encode_text(self, tokens: Tensor) -> Tensor:
        """(B, T) long -> (B, C), not normalised."""
        embedding: Tensor = self.text_model(tokens)
        return embedding


def _run(tower: ImageTower | TextTower, block: nn.Module, x: Tensor, shift: Shift, draws: Tensor | None) -> Tensor:
    """One block of the tower, with kernels where they take it, and recomputed in the backward pass where asked."""
    run: Callable[[Tensor, Shift, Tensor | None], Tensor] = block
    if tower.kernels and x.is_cuda and triton_is_there() and not torch.compiler.is_compiling():
        from rwkvclip_cli.model.fused import fused_block, supported

        if isinstance(block, Block) and supported(block, x):
            # By position, as a block and `checkpoint` take them.
            own, dtype = block, compute_dtype(x)

            def run(x: Tensor, shift: Shift, draws: Tensor | None) -> Tensor:
                return fused_block(own, x, shift, dtype, draws)

    if tower.checkpoint_blocks and tower.training:
        # The state of random numbers, which a CUDA graph cannot read, matters to dropout alone.
        random = bool(getattr(block, "dropout", True))
        result: Tensor = checkpoint(run, x, shift, draws, use_reentrant=False, preserve_rng_state=random)
        return result
    return run(x, shift, draws)
