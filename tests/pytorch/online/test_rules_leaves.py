"""Tests that leaves which a custom function saves are the same objects when it reads them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

import rekindle
from rekindle.pytorch.online import leaves
from tests.pytorch.harsh import deeper, harshest, vector

evict_modes = pytest.mark.parametrize("evict", ["saved", "anything"])
Evict = Literal["saved", "anything"]


class Accumulating(torch.autograd.Function):
    """A function that adds to `weight.main_grad` itself, as Megatron's fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, None, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, nothing, weight = ctx.saved_tensors
        assert nothing is None
        weight.main_grad += gradients[0] * x
        weight.uses.append(weight.grad is None)
        return gradients[0] * weight, None


@evict_modes
@pytest.mark.parametrize("trained", [True, False])
def test_saved_parameter_unpacks_with_its_attributes(trained: bool, evict: Evict) -> None:
    def program() -> Callable[[], Any]:
        weights: Any = [nn.Parameter(vector(), requires_grad=trained) for _ in range(3)]
        start = vector(requires_grad=True)
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
            weight.uses = []

        def step() -> object:
            x = start
            for weight in weights:
                x = deeper(Accumulating.apply(x, weight), 3)
            x.sum().backward()
            return start, [(weight.main_grad, weight.uses) for weight in weights]

        return step

    harshest(program, evict=evict)


class Saving(torch.autograd.Function):
    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0] * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Saving.seen[:] = ctx.saved_tensors
        return gradients[0], *[None] * (len(Saving.seen) - 1)


class Weight(nn.Parameter):
    pass


def _saved(*tensors: Tensor) -> list[Any]:
    Saving.apply(*tensors).sum().backward()
    found = Saving.seen.copy()
    Saving.seen.clear()
    return found


def test_saved_leaf_unpacks_to_same_object_after_budget() -> None:
    gc.collect()
    others = leaves._owners
    with_attribute: Any = vector()
    with_attribute.title = "a batch"
    tensors: tuple[Any, ...] = (
        vector(requires_grad=True),
        nn.Parameter(vector()),
        nn.Parameter(vector(), requires_grad=False),
        Weight(vector()),
        Weight(vector(), requires_grad=False),
        with_attribute,
    )
    with rekindle.budget("1MiB"):
        assert all(map(lambda a, b: a is b, _saved(*tensors), tensors))
        later = Saving.apply(*tensors).sum()
    later.backward()
    assert all(map(lambda a, b: a is b, Saving.seen, tensors))
    del later
    Saving.seen.clear()
    gc.collect()
    assert leaves._owners == others
    assert ("saved_tensors" in vars(BackwardCFunction)) == (others > 0)


def test_leaf_unpacks_as_changed_by_saved_tensor_hooks_of_user() -> None:
    weight = vector(requires_grad=True)
    twice = torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x)
    with rekindle.budget("1MiB"), twice:
        (found,) = _saved(weight)
    assert torch.equal(found, weight * 2)


def test_view_made_under_no_grad_unpacks_with_equal_contents() -> None:
    """The view is a leaf that requires a gradient, but no autograd node accumulates one for it."""
    weight = vector(requires_grad=True)

    def step() -> None:
        x = weight * 1
        with torch.no_grad():
            part = x[:1]
        assert part.requires_grad
        assert part.is_leaf
        found = _saved(x, part, weight)
        assert torch.equal(found[1], part)
        assert found[2] is weight

    with rekindle.budget("1MiB") as run:
        step()
        # Rekindle returns leaves as the same objects while a graph that saved them exists
        unreachable = Saving.apply(weight * 1, weight)
    step()
    assert run.evictions == 0
    del unreachable
