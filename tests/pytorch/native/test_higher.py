"""Tests of higher-order operators that Rekindle does not know."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

import rekindle
from rekindle.pytorch.native import _higher
from rekindle.pytorch.operators import FUNCTIONAL, _regions
from tests.pytorch import cores
from tests.pytorch.cores import evicting_before_every_operator

_numbers = count()


def unknown(dense: Callable[..., Any]) -> HigherOrderOperator:
    """Return a higher-order operator of a new name that runs `dense`."""

    class Unknown(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__(f"unknown_{next(_numbers)}")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    operator = Unknown()
    operator.py_impl(DispatchKey.CompositeExplicitAutograd)(dense)
    operator.fallthrough(DispatchKey.AutogradCPU)
    return operator


def pick(number: int, branches: tuple[Callable[..., Any], ...], operands: tuple[Any, ...]) -> Any:
    return branches[number](*operands)


def overwrite(*, pages: dict[str, list[Tensor]]) -> None:
    """Write zeros to memory as a kernel does that PyTorch does not see."""
    for page in pages["written"]:
        ctypes.memset(page.data_ptr(), 0, page.nbytes)


@pytest.mark.parametrize("budget", [None, "40KB"])
@pytest.mark.parametrize("inside", [False, True])
def test_unknown_higher_order_operator_matches_pytorch(budget: str | None, inside: bool) -> None:
    """The operator is defined before the budget or inside it."""
    torch.manual_seed(0)
    x = torch.rand(1000, requires_grad=True)

    def step(operator: HigherOrderOperator) -> tuple[Tensor, ...]:
        y = x.sin().exp()
        y = operator(1, (torch.cos, lambda x: x.tanh() * x.sigmoid()), (y,))
        loss = y.sin().exp().sum()
        return loss, *torch.autograd.grad(loss, x)

    operator = unknown(pick)
    wanted = step(operator)
    since = cores.count_drivers()
    with evicting_before_every_operator(), rekindle.budget(budget) as run:
        got = step(unknown(pick) if inside else operator)
    again = cores.ran_again(since)
    assert all(map(torch.equal, got, wanted))
    if budget is not None:
        assert "sin" in again
        assert {"tanh", "sigmoid"}.isdisjoint(again)
    assert "higher-order operator" in str(run.report())


def test_kernel_at_key_of_core_may_be_registered_in_budget() -> None:
    """Newer versions of PyTorch register kernels for fake tensors at the key that the core uses."""
    with rekindle.budget(None):
        operator = unknown(pick)
        (key,) = _higher._key
        assert operator.py_impl(key)(pick) is pick  # refused if a kernel is there already
        x = torch.rand(4)
        assert torch.equal(operator(0, (torch.sin,), (x,)), x.sin())


def test_switch_of_pytorch_is_known_to_write_nothing() -> None:
    """Newer versions of PyTorch define it."""
    assert {"cond", "switch", "while_loop"} <= FUNCTIONAL


def test_argument_that_unknown_operator_writes_is_seen() -> None:
    """Values that need the old contents are recomputed before."""
    operator = unknown(overwrite)
    torch.manual_seed(0)
    weight = torch.rand(1000, requires_grad=True)

    def step(source: Tensor) -> tuple[Tensor, ...]:
        derived = source.sin()
        saved = (weight * derived).exp()
        operator(pages={"written": [source, derived]})
        after = weight * (source + derived).cos()
        loss = (saved * after).sum()
        return loss, source, derived, *torch.autograd.grad(loss, weight)

    source = torch.rand(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_higher, "FUNCTIONAL", {operator.name()})
        with evicting_before_every_operator(), rekindle.budget("80KB"):
            unprotected = step(source.clone())
    wanted = step(source.clone())
    assert not all(map(torch.equal, unprotected, wanted))
    with evicting_before_every_operator(), rekindle.budget("80KB"):
        got = step(source.clone())
    assert all(map(torch.equal, got, wanted))


def test_region_with_unknown_operator_writes_its_arguments() -> None:
    """A compiled region that calls such an operator runs once, and may write what it is given."""
    graph = fx.Graph()
    read, given = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    part = graph.get_attr("part")
    made = graph.call_function(unknown(pick), (0, (part,)), {"operands": {"x": [given]}})
    graph.output((made, graph.call_function(torch.ops.aten.sin.default, (read,))))
    module = fx.GraphModule({"part": nn.Identity()}, graph)
    region = _regions.Region(lambda arguments: arguments, module)
    assert region.opaque
    assert region.written == ((1, "primals_2"),)
