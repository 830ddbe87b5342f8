"""Tests of rule R9 with dispatch modes: recomputation runs no Python code of the program again.

So a mode sees each operator once. Only a mode that is active around the budget also sees
recomputations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rekindle
from tests.pytorch.harsh import WIDTH, deeper, harshest, vector

#: PyTorch itself calls this operator whenever autograd unpacks a saved tensor. It is not counted.
OF_PYTORCH = "detach"

evict_modes = pytest.mark.parametrize("evict", ["saved", "anything"])
Evict = Literal["saved", "anything"]


class Halves(TorchDispatchMode):
    """A dispatch mode that changes and counts results of operators, like emulated low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0].removeprefix("aten::")
        self.seen[name] += name != OF_PYTORCH
        result = func(*args, **(kwargs or {}))
        return result / 2 if name == "sin" else result


class Calls(TorchFunctionMode):
    """A function mode that changes and counts results of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        self.seen[name] += 1
        result = func(*args, **(kwargs or {}))
        return result / 2 if name == "sin" else result


@evict_modes
@pytest.mark.parametrize("mode", [Halves, Calls])
def test_dispatch_mode_inside_budget_sees_each_operator_once(
    mode: Callable[[], Any], evict: Evict
) -> None:
    def program() -> Callable[[], Any]:
        weight = vector(requires_grad=True)

        def step() -> object:
            with mode() as seen:
                deeper(weight * 0.5).sum().backward()
            return weight, dict(seen.seen)

        return step

    harshest(program, evict=evict)


class Lists(TorchDispatchMode):
    """A dispatch mode that lists the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_inside_budget_sees_no_alias_operators() -> None:
    """An alias that Rekindle made would be seen, and would change how autograd treats a leaf."""

    def seen() -> list[str]:
        with Lists() as mode:
            leaf = torch.rand(10, requires_grad=True)
            leaf.mul(2).div(3).sum().backward()
        return mode.seen

    plain = seen()
    with rekindle.budget(None):
        assert seen() == plain


@evict_modes
def test_dispatch_mode_around_budget_acts_on_recomputations(evict: Evict) -> None:
    """The mode also changes recomputed operators, even if it has ended before the backward pass."""

    torch.manual_seed(0)
    weight = vector(requires_grad=True)
    with Halves():
        wanted = deeper(weight * 0.5).sum()
    (gradient,) = torch.autograd.grad(wanted, [weight])
    with Halves(), rekindle.budget(20 * 4 * WIDTH, evict=evict) as run:
        loss = deeper(weight * 0.5).sum()
    assert torch.equal(*torch.autograd.grad(loss, [weight]), gradient)
    assert run.recomputations > 0
    assert _get_current_dispatch_mode_stack() == []


def _policy(context: object, func: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = func in (torch.ops.aten.sin.default, torch.ops.aten.exp.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_policy)


# torch 2.14 warns about any saved-tensor hooks here
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
def test_recomputation_uses_no_cache_of_selective_checkpoint() -> None:
    """A selective checkpoint returns each cached result once. Recomputation must not take any."""

    def program() -> Callable[[], Any]:
        weight = vector(requires_grad=True)

        def block(x: Tensor) -> Tensor:
            return deeper(x * weight, 3)

        def step() -> object:
            x: Any = weight * 0.5
            for _ in range(3):
                x = checkpoint(block, deeper(x, 2), use_reentrant=False, context_fn=_contexts)
            x.sum().backward()
            return weight

        return step

    harshest(program)


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
@evict_modes
@pytest.mark.parametrize("contexts", ["policy", "list"])
def test_operator_under_must_save_policy_runs_once(contexts: str, evict: Evict) -> None:
    """The checkpoint's policy saves the result, so Rekindle must not recompute it."""
    saved = [torch.ops.aten.sin.default, torch.ops.aten.exp.default]
    chosen = _policy if contexts == "policy" else saved

    def program() -> Callable[[], Any]:
        weight = vector(requires_grad=True)

        def step() -> object:
            x: Any = weight * 0.5
            for _ in range(3):
                x = checkpoint(
                    partial(deeper, layers=3),
                    deeper_by_cosines(x),
                    use_reentrant=False,
                    context_fn=partial(create_selective_checkpoint_contexts, chosen),
                )
            x.sum().backward()
            return weight

        return step

    again = harshest(program, evict=evict).again
    assert (again["sin"], again["exp"]) == (0, 0)
    assert again["cos"] > 0


def test_result_under_prefer_save_policy_is_evicted() -> None:
    """The policy PREFER_SAVE is only a preference, so Rekindle may evict the result."""

    def prefers(*args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_SAVE

    def program() -> Callable[[], Any]:
        weight = vector(requires_grad=True)

        def step() -> object:
            x: Any = weight * 0.5
            for _ in range(3):
                x = checkpoint(
                    partial(deeper, layers=3),
                    x,
                    use_reentrant=False,
                    context_fn=partial(create_selective_checkpoint_contexts, prefers),
                )
            x.sum().backward()
            return weight

        return step

    assert harshest(program, evict="anything").again["exp"] > 0


def deeper_by_cosines(x: Tensor) -> Tensor:
    for _ in range(3):
        x = (x.cos() * x).cos()
    return x
