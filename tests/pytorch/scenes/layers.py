"""Sixty layers, each from the shape (batch, 8, WIDTH) to the same shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Does(nn.Module):
    """A layer whose forward pass is `function`, with the weights of `inner` if there are any."""

    def __init__(self, function: Callable[..., Tensor], *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)


def _turned(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a layer that works on (batch, WIDTH, 8), channels first."""
    return lambda: Does(lambda x, inner: inner(x.mT).mT, layer())


def _weightless(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Does(lambda x: function(x))


def _first(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return the first result of a recurrent layer."""
    return lambda: Does(lambda x, inner: inner(x)[0], module())


def _attention(x: Tensor, qkv: nn.Linear) -> Tensor:
    q, k, v = qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
    return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _experts(x: Tensor, router: nn.Linear, *experts: nn.Module) -> Tensor:
    flat = x.flatten(0, 1)
    weight, chosen = router(flat).softmax(-1).topk(1)
    out = torch.zeros_like(flat)
    for number, expert in enumerate(experts):
        rows = (chosen[:, 0] == number).nonzero()[:, 0]
        out = out.index_add(0, rows, expert(flat[rows]) * weight[rows])
    return x + out.view_as(x)


def _unrolled(x: Tensor, cell: nn.Module) -> Tensor:
    state = torch.zeros(x.shape[0], WIDTH)
    states = []
    for part in x.unbind(1):
        state = cell(part, state)
        states.append(state)
    return torch.stack(states, 1)


def _written(x: Tensor) -> Tensor:
    x = x + 0
    x[:, 0] = x[:, 1] * 2
    return x


def _scattered(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1]).flip(0)
    return torch.zeros_like(x).index_copy(1, rows, x) + x


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _conv(**options: int) -> nn.Module:
    return nn.Conv1d(WIDTH, WIDTH, 3, padding=1, **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "perceptron": lambda: nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    ),
    "residual": lambda: Does(lambda x, inner: x + inner(x), _linear()),
    "gated": lambda: Does(lambda x, a, b: F.silu(a(x)) * b(x), _linear(), _linear()),
    "tied": lambda: Does(lambda x, a: F.linear(a(x).tanh(), a.weight.t()), _linear()),
    "bilinear": lambda: Does(lambda x, a: a(x, x), nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(_linear()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(_linear()),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": _turned(lambda: nn.BatchNorm1d(WIDTH)),
    "instance norm": _turned(lambda: nn.InstanceNorm1d(WIDTH, affine=True)),
    "group norm": _turned(lambda: nn.GroupNorm(4, WIDTH)),
    "convolution": _turned(_conv),
    "depthwise": _turned(lambda: _conv(groups=WIDTH)),
    "dilated": _turned(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)),
    "transposed": _turned(lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "image": lambda: Does(lambda x, a: a(x.unsqueeze(1)).mean(1), nn.Conv2d(1, 4, 3, padding=1)),
    "attention": lambda: Does(_attention, nn.Linear(WIDTH, 3 * WIDTH)),
    "multihead": lambda: Does(
        lambda x, a: a(x, x, x, need_weights=False)[0],
        nn.MultiheadAttention(WIDTH, 4, batch_first=True),
    ),
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True),
    "lstm": _first(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru": _first(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "cell by hand": lambda: Does(_unrolled, nn.GRUCell(WIDTH, WIDTH)),
    "rnn cell": lambda: Does(_unrolled, nn.RNNCell(WIDTH, WIDTH)),
    "experts": lambda: Does(_experts, nn.Linear(WIDTH, 3), *(_linear() for _ in range(3))),
    "embedding": lambda: Does(
        lambda x, a: x + a(x.detach().argmax(-1)), nn.Embedding(WIDTH, WIDTH)
    ),
    "embedding bag": lambda: Does(
        lambda x, a: x + a(x.detach()[..., :3].flatten(0, 1).abs().long().clamp(max=9)).view_as(x),
        nn.EmbeddingBag(10, WIDTH),
    ),
    "prelu": lambda: Does(lambda x, a: a(x), nn.PReLU()),
    "checkpointed": lambda: Does(
        lambda x, a: checkpoint(lambda v: a(v).tanh(), x, use_reentrant=False), _linear()
    ),
    "dropout": lambda: nn.Dropout(0.2),
    "alpha dropout": lambda: nn.AlphaDropout(0.2),
    "feature dropout": lambda: Does(lambda x: F.dropout1d(x, 0.2)),
    "relu": nn.ReLU,
    "relu in place": lambda: Does(lambda x: F.relu_(x * 1.0)),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
    "rrelu": nn.RReLU,
    "glu": _weightless(lambda x: F.glu(torch.cat([x, x.flip(-1)], -1))),
    "softmax": _weightless(lambda x: x.softmax(-1) * WIDTH),
    "log softmax": _weightless(lambda x: x.log_softmax(-1) + 3),
    "cumulative": _weightless(lambda x: x.cumsum(1) / 8),
    "sorted": _weightless(lambda x: x.sort(-1).values),
    "top values": _weightless(lambda x: x + x.topk(1, -1).values),
    "pooled": _weightless(lambda x: x - F.avg_pool1d(x, 3, 1, 1)),
    "max pooled": _weightless(lambda x: F.max_pool1d(x, 3, 1, 1)),
    "interpolated": _weightless(
        lambda x: F.interpolate(x, scale_factor=2, mode="linear")[..., ::2].contiguous()
    ),
    "normalized": _weightless(lambda x: F.normalize(x, dim=-1) * 4),
    "product": _weightless(lambda x: (x @ x.mT / 32).softmax(-1) @ x),
    "einsum": _weightless(lambda x: torch.einsum("btd,bsd->bts", x, x).tanh() @ x / 8),
    "written": _weightless(_written),
    "scattered": _weightless(_scattered),
    "split": _weightless(lambda x: torch.cat([p.sin() for p in x.split(3, 1)], 1)),
    "where": _weightless(lambda x: torch.where(x > 0, x, x.exp() - 1)),
    "fourier": _weightless(lambda x: torch.fft.rfft(x, dim=-1).abs().repeat(1, 1, 2)[..., :WIDTH]),
    "rolled": _weightless(lambda x: x.roll(1, 1) * 0.5 + x),
    "expanded": _weightless(lambda x: x * x.mean((0, 1), keepdim=True).expand_as(x) + x),
}
