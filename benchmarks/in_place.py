"""Measure the memory saved by backward operators that write their result over incoming gradients.

    scripts/bench in_place [--only NAME ...] [--steps 2]

The programs are three language models. Their attention is written out with softmax and dropout, or
is `nn.MultiheadAttention`, or scaled dot product attention. The last two use PyTorch's math
kernels. Each model trains twice within the same budgets: once with results written over gradients
(`in place`), and once with results in newly allocated memory (`new memory`). Budgets are fractions
of the activation memory in the second case. A row also says if losses, weights and gradients equal
plain PyTorch's, bit for bit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _common import conditions, write
from tests.pytorch.bits import differing
from tests.pytorch.in_place import taken_over, without
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import rekindle
from rekindle import Run

WORDS, WIDTH, HEADS, LAYERS, ROWS, TIME = 4000, 128, 4, 4, 8, 128
FRACTIONS = (0.8, 0.6, 0.4)


class WrittenOut(nn.Module):
    """Attention as in BERT: scores over the root of the width, softmax, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        weights = F.dropout(torch.softmax(scores, -1), 0.1, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Multihead(nn.Module):
    """`nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Scaled(WrittenOut):
    """As in GPT-2: causal `F.scaled_dot_product_attention`."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention and a feed-forward net, each with dropout and a residual connection."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norms[0](x)), 0.1, self.training)
        wide = F.gelu(self.up(self.norms[1](x)))
        return x + F.dropout(self.down(wide), 0.1, self.training)


class Language(nn.Module):
    """A language model of such blocks."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block(attention()) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.words(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BERT, written out": WrittenOut,
    "BERT, nn.MultiheadAttention": Multihead,
    "GPT-2, scaled dot product": Scaled,
}


@dataclass(frozen=True)
class Trained:
    """The results of a training, and its `Run` (None without a budget)."""

    outcome: dict[str, Any]
    run: Run | None
    constants: int


def train(
    attention: Callable[[], nn.Module], steps: int, context: Any, *, takes_over: bool
) -> Trained:
    """Train a new model within `context`.

    If `takes_over` is true, backward operators may write their results over incoming gradients.
    """
    torch.manual_seed(0)
    model = Language(attention)
    optimizer = torch.optim.AdamW(model.parameters())
    outcome: dict[str, Any] = {}
    with (
        sdpa_kernel(SDPBackend.MATH),
        nullcontext() if takes_over else without(),
        context as run,
    ):
        for number in range(steps):
            loss = model(torch.randint(WORDS, (ROWS, TIME)))
            loss.backward()
            outcome[f"loss {number}"] = loss.detach()
            outcome |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
            del loss
            optimizer.step()
            optimizer.zero_grad()
        constants = run.memory if run is not None else 0
    return Trained(outcome | model.state_dict(), run, constants)


def row(
    attention: Callable[[], nn.Module], steps: int, wanted: dict[str, Any], fraction: float | None,
    budget: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Train twice within one budget, and return the figures of both.

    Backward operators write their results over incoming gradients, or each result gets new memory.
    """
    found: dict[str, Any] = {"fraction": fraction, "budget": budget}
    for takes_over in (False, True):
        limit = rekindle.budget.unlimited() if budget is None else rekindle.budget(budget)
        try:
            trained = train(attention, steps, limit, takes_over=takes_over)
        except rekindle.OutOfBudget:
            found["in place" if takes_over else "new memory"] = None
            continue
        assert trained.run is not None
        found["in place" if takes_over else "new memory"] = {
            "peak": trained.run.peak,
            "recomputed_operators": trained.run.recomputations,
            "recomputed": round(trained.run.recompute_ns / trained.run.compute_ns, 3),
            "taken_over": taken_over(trained.run),
            "same": differing(trained.outcome, wanted) == [],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    results: dict[str, Any] = {**conditions(), "steps": arguments.steps, "models": {}}
    for name in arguments.only:
        attention, steps = MODELS[name], arguments.steps
        wanted = train(attention, steps, nullcontext(), takes_over=True).outcome
        rows = results["models"][name] = [row(attention, steps, wanted, None, None)]
        kept = train(attention, steps, rekindle.budget.unlimited(), takes_over=False)
        assert kept.run is not None
        for fraction in FRACTIONS:
            budget = kept.constants + int(fraction * (kept.run.peak - kept.constants))
            rows.append(row(attention, steps, wanted, fraction, budget))
        for each in rows:
            print(name, each, flush=True)
        write("in_place", results)


if __name__ == "__main__":
    main()
