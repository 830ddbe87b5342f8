"""Tests of custom operators of every kind: each is recomputed on trial only (R9, runs once).

The first run is watched. An operator that communicates, waits, or writes what it does not declare
is never run again. Any other one runs a second time, in the state of the first run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from tests.pytorch.bits import differing
from tests.pytorch.native import bodies
from tests.pytorch.native.bodies import DEPTH, KEPT, OTHER, RECOMPUTED, WIDTH, Operator

KINDS = [*RECOMPUTED, *KEPT, *OTHER]
NAMES = [kind.__name__ for kind in KINDS]
EVICT = ("saved", "auto", "anything")
VECTOR = 4 * WIDTH


def smallest(operator: Operator, evict: Any) -> tuple[dict[str, Any], Any]:
    """Train within the smallest budget that works, found as the errors advise."""
    budget = 2 * VECTOR
    while True:
        try:
            with rekindle.budget(budget, evict=evict, learn=False) as run:
                return bodies.trained(operator), run
        except rekindle.OutOfBudget as error:
            budget = max(budget + VECTOR, error.smallest_budget)


@pytest.mark.parametrize("evict", EVICT)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_operator_of_any_kind_matches_pytorch(kind: Callable[[], Operator], evict: Any) -> None:
    wanted = bodies.trained(kind())
    operator = kind()
    with rekindle.budget(None, evict=evict, learn=False):
        got = bodies.trained(operator)
    assert differing(got, wanted) == []
    with rekindle.budget(None, evict=evict, learn=False) as run:
        run._driver.core.evict_before_every_op(run._driver.handle, True)
        got = bodies.trained(kind())
        run._driver.engine.check()
    assert differing(got, wanted) == []


@pytest.mark.parametrize("kind", RECOMPUTED, ids=lambda kind: kind.__name__)
def test_operator_without_side_effects_is_recomputed(kind: Callable[[], Operator]) -> None:
    wanted = bodies.trained(kind())
    operator = kind()
    got, run = smallest(operator, "saved")
    assert differing(got, wanted) == []
    again = run._driver.core.recomputed_ops(run._driver.handle)
    assert any(name.startswith("rekindle_bodies::") for name in again)
    assert not any("is not recomputed" in each for each in run.report().advice)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)
def test_operator_with_side_effects_stays_in_memory(kind: Callable[[], Operator]) -> None:
    with rekindle.budget(None, learn=False) as run:
        bodies.trained(kind())
    assert any(
        "rekindle_bodies::operator_" in each and KEPT[kind] in each for each in run.report().advice
    )


def _counted(body: Callable[[Tensor], Tensor], **more: Any) -> tuple[Any, list[int]]:
    """Return an operator, and a list with the number of its runs."""
    runs = [0]

    def counted(x: Tensor) -> Tensor:
        runs[0] += 1
        return body(x)

    return bodies._defined(counted, **more), runs


def test_operator_in_registry_of_effects_runs_once() -> None:
    effects = pytest.importorskip("torch._library.effects")
    operator, runs = _counted(torch.sin)
    operator.register_effect(effects.EffectType.ORDERED)
    with rekindle.budget(None, learn=False) as run:
        bodies.trained(operator)
    assert runs == [2 * DEPTH]
    assert any("registry of effects" in each for each in run.report().advice)


def test_operator_is_tried_once_for_each_number_and_state() -> None:
    runs: list[float] = []
    scaled = bodies._defined(lambda x, p: (runs.append(p), x * p)[1], more=", float p")
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget(None, learn=False):
        for number in (0.5, 0.5, 0.25, 0.5):
            scaled(x, number)
        assert runs == [0.5, 0.5, 0.5, 0.25, 0.25, 0.5]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scaled(x, 0.5)
    assert len(runs) == 8


def test_operator_with_new_number_each_call_is_seldom_tried() -> None:
    """A trial of each call would double the time of a program whose calls never repeat."""
    runs: list[float] = []
    scaled = bodies._defined(lambda x, p: (runs.append(p), x * p)[1], more=", float p")
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget(None, learn=False):
        for number in range(200):
            scaled(x, number / 7)
    assert len(runs) < 300


def test_declared_operator_may_read_other_tensors() -> None:
    table = torch.linspace(0, 1, WIDTH)
    operator: Any = bodies._defined(lambda x: (x * table).sin())
    wanted = bodies.trained(operator)
    with rekindle.budget(None, learn=False) as run:
        bodies.trained(operator)
    assert any("write rekindle.recomputable(" in each for each in run.report().advice)
    rekindle.recomputable(operator._qualname)
    got, run = smallest(operator, "saved")
    assert differing(got, wanted) == []
    assert operator._qualname in run._driver.core.recomputed_ops(run._driver.handle)
    assert not any("is not recomputed" in each for each in run.report().advice)


def test_dispatch_mode_is_not_seen_by_recomputed_subclass() -> None:
    """The program's mode sees the first run of the body, and none of its recomputations."""

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    operator = bodies.subclass()
    with Names() as plain:
        wanted = bodies.trained(operator)
    with Names() as seen:
        got, run = smallest(operator, "saved")
    assert differing(got, wanted) == []
    assert run.recomputations > 0
    assert {*seen.names} == {*plain.names}


def test_default_device_of_program_does_not_reach_recomputation() -> None:
    operator: Any = bodies._defined(lambda x: x * torch.ones(WIDTH))

    def step() -> Tensor:
        weight = torch.rand(WIDTH, requires_grad=True)
        x = weight
        for _ in range(DEPTH):
            x = operator(x).sin()
        with torch.device("meta"):
            (gradient,) = torch.autograd.grad(x.sum(), weight)
        return gradient

    torch.manual_seed(0)
    wanted = step()
    torch.manual_seed(0)
    with rekindle.budget(9 * VECTOR, evict="saved", learn=False) as run:
        got = step()
    assert torch.equal(got, wanted)
    assert operator._qualname in run._driver.core.recomputed_ops(run._driver.handle)


def test_secret_write_by_address_matches_pytorch_or_raises() -> None:
    """No operator shows the write, so a value of the old contents may be lost: then it raises."""

    def body(x: Tensor) -> Tensor:
        ctypes.memset(x.data_ptr(), 0, x.nbytes // 2)
        return x.sin()

    def step(operator: Operator) -> Tensor:
        torch.manual_seed(0)
        weight = torch.rand(WIDTH, requires_grad=True)
        source = torch.rand(WIDTH)
        y = (source * weight).sin()
        for _ in range(DEPTH):
            y = y.sin() * y
        z = operator(source) + operator(y.detach() * 2)
        (y + z).sum().backward()
        assert weight.grad is not None
        return weight.grad

    wanted = step(bodies._defined(body))
    for harsh in (False, True):
        with rekindle.budget(None, evict="saved", learn=False) as run:
            run._driver.core.evict_before_every_op(run._driver.handle, harsh)
            try:
                got = step(bodies._defined(body))
            except RuntimeError as error:
                assert "modified" in str(error) or "memory" in str(error)  # noqa: PT017
            else:
                assert torch.equal(got, wanted)
            run._driver.engine.check()
