"""A LLaMA whose parts are `autograd.Function`s, written as in libraries of fused kernels.

The functions imitate Triton kernels: they allocate results with `empty_like` and fill them through
their addresses. So PyTorch's dispatcher, and Rekindle, do not see what is computed.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

#: For each style, the parts of the model that are `autograd.Function`s.
STYLES: dict[str, tuple[str, ...]] = {
    "plain operators": (),
    "Liger": ("norm", "rope", "silu"),
    "Liger with FlashAttention": ("norm", "rope", "silu", "attention"),
    "Unsloth": ("norm", "rope", "attention", "mlp"),
    "Megatron": ("norm", "rope", "silu", "attention", "linear"),
}


def filled(value: Tensor) -> Tensor:
    value = value.contiguous()
    made = torch.empty_like(value)
    ctypes.memmove(made.data_ptr(), value.data_ptr(), value.nbytes)
    return made


def _turned(x: Tensor, *, back: bool = False) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([b, -a] if back else [-b, a], -1)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


class RMSNorm(Function):
    """A norm that saves its arguments and the root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        root = filled(torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
        ctx.save_for_backward(x, weight, root)
        return filled(x * root * weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, root = ctx.saved_tensors
        normed, inner = x * root, gradient * weight
        dx = root * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return dx, _flat(gradient * normed).sum(0), None


class Rope(Function):
    """Rotary position embedding that saves its tables of sines and cosines."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return filled(x * cos + _turned(x) * sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return gradient * cos + _turned(gradient * sin, back=True), None, None


class SiLUMul(Function):
    """Product of a SiLU and another factor; saves both factors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return filled(F.silu(a) * b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        silu = a * s
        return gradient * b * (s + silu * (1 - s)), gradient * silu


class MLP(Function):
    """A whole feed-forward block in one function; saves its arguments and both products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        e, f = filled(x @ gate.t()), filled(x @ up.t())
        ctx.save_for_backward(x, gate, up, down, e, f)
        return filled((F.silu(e) * f) @ down.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, gate, up, down, e, f = ctx.saved_tensors
        s = torch.sigmoid(e)
        silu = e * s
        h = silu * f
        dh = gradient @ down
        df = dh * silu
        de = dh * f * (s + silu * (1 - s))
        dx = de @ gate + df @ up
        return (
            dx,
            _flat(de).t() @ _flat(x),
            _flat(df).t() @ _flat(x),
            _flat(gradient).t() @ _flat(h),
        )


class Linear(Function):
    """A linear layer without bias; saves its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return filled(x @ weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, _flat(gradient).t() @ _flat(x)


class Attention(Function):
    """Attention that saves its arguments, its result, and the logarithms of sums."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = map(filled, attention(q, k, v, 0.0, True))
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient, *ctx.saved_tensors, 0.0, True)


FUNCTIONS = (RMSNorm, Rope, SiLUMul, MLP, Linear, Attention)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, parts: tuple[str, ...]) -> None:
        super().__init__()
        inner = 8 * width // 3 // 16 * 16
        self.parts, self.heads = parts, heads
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if "norm" in self.parts:
            return RMSNorm.apply(x, weight, 1e-6)
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        return Linear.apply(x, layer.weight) if "linear" in self.parts else layer(x)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if "rope" in self.parts:
            return Rope.apply(x, cos, sin)
        return x * cos + _turned(x) * sin

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if "attention" in self.parts:
            return Attention.apply(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def mlp(self, x: Tensor) -> Tensor:
        if "mlp" in self.parts:
            return MLP.apply(x, self.gate.weight, self.up.weight, self.down.weight)
        gate, up = self.linear(self.gate, x), self.linear(self.up, x)
        return self.linear(
            self.down, SiLUMul.apply(gate, up) if "silu" in self.parts else F.silu(gate) * up
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, time, width = x.shape
        h = self.norm(x, self.norms[0])
        q, k, v = (
            self.linear(each, h).view(rows, time, self.heads, -1).transpose(1, 2)
            for each in self.projections[:3]
        )
        a = self.attention(self.rope(q, cos, sin), self.rope(k, cos, sin), v)
        x = x + self.linear(self.projections[3], a.transpose(1, 2).reshape(rows, time, width))
        return x + self.mlp(self.norm(x, self.norms[1]))


class Llama(nn.Module):
    """Eight blocks of width 256, for sequences of 256 words of a vocabulary of 512."""

    cos: Tensor
    sin: Tensor

    def __init__(self, style: str, width: int = 256, heads: int = 4, words: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads, STYLES[style]) for _ in range(8))
        self.head = nn.Linear(width, words, bias=False)
        rates = 1e4 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.arange(256)[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x)
