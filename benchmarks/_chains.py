"""Rewrite networks of `_workloads.py` as `nn.Sequential`, which `rekindle.sequential` requires.

Only networks whose modules run one after the other can be rewritten. The chain shares modules and
parameters with the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from _common import ROOT as _ROOT  # this import makes `tests` importable
from tests.pytorch.networks import GPT, Encoder, MixtureOfExperts, ResNet50
from torch import Tensor, nn

assert _ROOT


class Link(nn.Module):
    """Wraps a function as a module, and registers the modules or parameters that it uses."""

    def __init__(self, run: Callable[[Any], Any], *parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for number, part in enumerate(parts):
            setattr(self, f"part{number}", part)

    def forward(self, x: Any) -> Any:
        return self.run(x)


def chain(model: nn.Module) -> nn.Sequential:
    """Return `model` as an `nn.Sequential`. Raises `KeyError` if its type is not known here."""
    return nn.Sequential(*_LINKS[type(model)](model)).train(model.training)


def _gpt(model: GPT) -> Iterator[nn.Module]:
    def embed(tokens: Tensor) -> Tensor:
        return model.dropout(model.tokens(tokens) + model.positions[: tokens.shape[1]])

    def half(part: nn.Module) -> nn.Module:
        return Link(lambda x: x + part(x), part)

    yield Link(embed, model.tokens, model.positions)
    for block in model.blocks:
        for part in block:  # type: ignore[union-attr]
            yield half(part)
    yield Link(lambda x: F.linear(model.norm(x), model.tokens.weight), model.norm, model.tokens)


def _encoder(model: Encoder) -> Iterator[nn.Module]:
    def embed(tokens: Tensor) -> Tensor:
        return model.tokens(tokens) + model.positions[: tokens.shape[1]]

    yield Link(embed, model.tokens, model.positions)
    yield from model.layers
    yield model.out


def _resnet(model: ResNet50) -> Iterator[nn.Module]:
    yield from (model.stem, model.blocks, Link(lambda x: x.mean((2, 3))), model.classify)


def _mixture(model: MixtureOfExperts) -> Iterator[nn.Module]:
    def begin(tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = model.embed(tokens)
        return x, x.new_zeros(())

    def layer(number: int) -> nn.Module:
        project, sparse = model.projections[number], model.sparse[number]
        before, between = model.norms[2 * number : 2 * number + 2]

        def run(given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, balance = given
            qkv = project(before(x))
            q, k, v = qkv.view(*x.shape[:2], 3, model.heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attended.transpose(1, 2).reshape(x.shape)
            x = x + sparse(between(x))
            return x, balance + sparse.balance  # type: ignore[operator]

        return Link(run, project, before, between, sparse)

    yield Link(begin, model.embed)
    for number in range(len(model.projections)):
        yield layer(number)
    yield Link(lambda given: (model.out(given[0]), given[1] + 0), model.out)


_LINKS: dict[type[nn.Module], Callable[[Any], Iterator[nn.Module]]] = {
    GPT: _gpt,
    Encoder: _encoder,
    ResNet50: _resnet,
    MixtureOfExperts: _mixture,
}
