"""The layers of both towers: WKV6 attention over tokens, then a mix over channels, each on a residual stream.

    >>> block = Block(Geometry(width=64, heads=2, hidden=224, layers=2, norm_eps=64e-5), layer=0, kind="text")

Legend: B batch, T tokens, C channels of the stream, H heads, N = C / H channels of a head, F hidden channels.
Source: Gu et al., "RWKV-CLIP" (arXiv 2406.06973); WKV6 attention is Peng et al., "Eagle and Finch" (arXiv 2404.05892).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rwkvclip_cli.model.shift import Shift
from rwkvclip_cli.model.wkv6 import wkv6

Kind = Literal["image", "text"]

MIX_RANK = 32
"""Inner width of the token-dependent part of each of the five mixes."""
DECAY_RANK = 64
"""Inner width of the token-dependent part of the decay."""
MIXES = "wkvrg"
"""What the five mixes feed, in the order of the slices of `time_maa_w1` and `time_maa_w2`."""

# The order in which the published modules register their matrices; optimizer states saved by position depend on it.
_MATRIX_ORDER: dict[Kind, tuple[str, ...]] = {
    "image": ("key", "value", "receptance", "gate", "output"),
    "text": ("receptance", "key", "value", "output", "gate"),
}


@dataclass(frozen=True)
class Geometry:
    """The sizes that all blocks of a tower share."""

    width: int
    heads: int
    hidden: int
    layers: int
    norm_eps: float
    """Epsilon of the norm over each head's output."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type of matrix products on x here: autocast's where it is on, else x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The norm, its sums in float32 at least."""
    if x.dtype != norm.weight.dtype:
        x = x.to(norm.weight.dtype)
    return functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class TimeMix(nn.Module):
    """Attention over tokens. Shapes: (B, T, C) -> (B, T, C)."""

    receptance: nn.Linear
    key: nn.Linear
    value: nn.Linear
    gate: nn.Linear
    output: nn.Linear

    def __init__(self, geometry: Geometry, layer: int, kind: Kind) -> None:
        super().__init__()
        width = geometry.width
        self.heads = geometry.heads
        self.kernels = True
        ratio = 1.0 - layer / geometry.layers
        depth = layer / (geometry.layers - 1)
        mix = 1.0 - channel_ramp(width) ** ratio
        half_mix = 1.0 - channel_ramp(width) ** (0.5 * ratio)
        self.time_maa_x = _vector(mix)
        self.time_maa_w = _vector(mix)
        self.time_maa_k = _vector(mix)
        self.time_maa_v = _vector(mix - 0.3 * depth)
        self.time_maa_r = _vector(half_mix)
        self.time_maa_g = _vector(half_mix)
        self.time_maa_w1 = nn.Parameter(torch.zeros(width, MIX_RANK * len(MIXES)))
        self.time_maa_w2 = nn.Parameter(torch.zeros(len(MIXES), MIX_RANK, width))
        self.time_decay = _vector(decay_schedule(width, depth))
        self.time_decay_w1 = nn.Parameter(torch.zeros(width, DECAY_RANK))
        self.time_decay_w2 = nn.Parameter(torch.zeros(DECAY_RANK, width))
        self.time_faaaa = nn.Parameter(bonus_schedule(width, depth).float().view(geometry.heads, -1))
        for name in _MATRIX_ORDER[kind]:
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.ln_x = nn.GroupNorm(geometry.heads, width, eps=geometry.norm_eps)

    def forward(self, x: Tensor, shift: Shift) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        x_w, x_kvrg = self._mixed(x, shift)
        matrices = (self.key, self.value, self.receptance, self.gate)
        weights = torch.stack([matrix.weight for matrix in matrices])
        k, v, r, g = torch.bmm(x_kvrg, weights.to(x.dtype).transpose(1, 2)).unbind(0)
        # The decay is an exponent of an exponent: its sum stays in the parameter's float32.
        w = self.time_decay + (torch.tanh(x_w @ self.time_decay_w1) @ self.time_decay_w2).view(x.shape)
        if r.dtype == torch.float16:
            # The result has the type of r, and a sum over many tokens can leave float16's range.
            r = r.float()
        r, k, v, w = (x.view(heads) for x in (r, k, v, w))
        y = wkv6(r, k, v, w, self.time_faaaa, kernels=self.kernels)
        y = functional.group_norm(
            y.reshape(-1, width).to(self.ln_x.weight.dtype),
            self.heads,
            self.ln_x.weight,
            self.ln_x.bias,
            self.ln_x.eps,
        )
        mixed: Tensor = self.output(y.to(x.dtype) * functional.silu(g))
        return mixed.view(x.shape)

    def _mixed(self, x: Tensor, shift: Shift) -> tuple[Tensor, Tensor]:
        """x between itself and its neighbours, five ways: (BT, C) for the decay, (4, BT, C) for k, v, r, g."""
        width = x.shape[-1]
        delta = (shift(x) - x).view(-1, width)
        x = x.reshape(-1, width)
        inner = torch.tanh(torch.addcmul(x, delta, self.time_maa_x.view(width).to(x.dtype)) @ self.time_maa_w1)
        inner = inner.view(-1, len(MIXES), MIX_RANK).transpose(0, 1)
        fixed = torch.cat((self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g))
        share = torch.baddbmm(fixed, inner, self.time_maa_w2)
        x_w, x_kvrg = torch.addcmul(x, delta, share.to(x.dtype)).split((1, 4))
        return x_w.squeeze(0), x_kvrg


class ChannelMix(nn.Module):
    """A gated two-layer network on each token and its neighbours. Shapes: (B, T, C) -> (B, T, C).

    The towers disagree on what the mix means: the share of the token itself (image) or of the neighbours (text).
    """

    def __init__(self, geometry: Geometry, layer: int, kind: Kind) -> None:
        super().__init__()
        width = geometry.width
        own_share = channel_ramp(width) ** (1.0 - layer / geometry.layers)
        self.kind = kind
        if kind == "image":
            self.spatial_mix_k, self.spatial_mix_r = _vector(own_share), _vector(own_share)
        else:
            self.time_maa_k, self.time_maa_r = _vector(1.0 - own_share), _vector(1.0 - own_share)
        self.key = nn.Linear(width, geometry.hidden, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(geometry.hidden, width, bias=False)

    def forward(self, x: Tensor, shift: Shift) -> Tensor:
        neighbours = shift(x)
        if self.kind == "image":
            x_k = torch.lerp(neighbours, x, self.spatial_mix_k.to(x.dtype))
            x_r = torch.lerp(neighbours, x, self.spatial_mix_r.to(x.dtype))
        else:
            x_k = torch.lerp(x, neighbours, self.time_maa_k.to(x.dtype))
            x_r = torch.lerp(x, neighbours, self.time_maa_r.to(x.dtype))
        mixed: Tensor = torch.sigmoid(self.receptance(x_r)) * self.value(torch.relu(self.key(x_k)).square())
        return mixed


class Block(nn.Module):
    """One layer: both mixes on a residual stream, which keeps the type of x (float32 under autocast)."""

    def __init__(
        self, geometry: Geometry, layer: int, kind: Kind, drop_path: float = 0.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(geometry.width)
        self.ln2 = nn.LayerNorm(geometry.width)
        self.ln0 = nn.LayerNorm(geometry.width) if layer == 0 else None
        self.att = TimeMix(geometry, layer, kind)
        self.ffn = ChannelMix(geometry, layer, kind)
        self.drop_path = drop_path
        self.dropout = dropout

    def forward(self, x: Tensor, shift: Shift, drop_path_uniform: Tensor | None = None) -> Tensor:
        """x (B, T, C) through the layer; `drop_path_uniform` (2, B) decides which branches each sample keeps."""
        if self.ln0 is not None:
            x = layer_norm(x, self.ln0)
        dtype = compute_dtype(x)
        for branch, (norm, mix) in enumerate(((self.ln1, self.att), (self.ln2, self.ffn))):
            change = mix(layer_norm(x, norm).to(dtype), shift)
            if drop_path_uniform is not None and self.drop_path > 0:
                keep = (drop_path_uniform[branch] >= self.drop_path).to(x.dtype) / (1.0 - self.drop_path)
                change = change * keep.view(-1, 1, 1)
            x = functional.dropout(x + change, self.dropout, self.training) if self.dropout else x + change
        return x


def channel_ramp(width: int) -> Tensor:
    """0, 1/C, 2/C, ... below 1: where a channel stands among all (float64)."""
    return torch.arange(width, dtype=torch.float64) / width


def decay_schedule(width: int, depth: float) -> Tensor:
    """Raw decays from -6 (slow, first channel) to -1, bent more in deeper layers; depth runs from 0 to 1."""
    place = torch.arange(width, dtype=torch.float64) / (width - 1)
    return -6.0 + 5.0 * place ** (0.7 + 1.3 * depth)


def bonus_schedule(width: int, depth: float) -> Tensor:
    """The bonus of a token for itself: falls over the channels, more in deeper layers, with a zigzag of period 3."""
    channel = torch.arange(width, dtype=torch.float64)
    zigzag = ((channel + 1) % 3 - 1) * 0.1
    return depth * (1.0 - channel / (width - 1)) + zigzag


def _vector(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.float().view(1, 1, -1))
