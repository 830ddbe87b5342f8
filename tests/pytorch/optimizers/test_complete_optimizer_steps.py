"""Tests that an optimizer's step runs completely or not at all, even if `OutOfBudget` is raised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

import rekindle
from rekindle.pytorch.optimizers import _optimizer_steps
from tests.helpers import combined
from tests.pytorch.bits import differing

WIDTH = 16
MODES = ["saved", "anything"]
Evict = Literal["saved", "anything"]


class Mine(optim.Optimizer):
    """A custom optimizer that writes each weight twice, and needs more memory than SGD."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["mean"] = state.get("mean", torch.zeros_like(weight)) * 0.9 + weight.grad
                state["moved"] = state.get("moved", 0) + 1
                weight.mul_(1 - group["lr"])
                weight.sub_(state["mean"].sign() * group["lr"])


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.RMSprop, {"foreach": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"foreach": True}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adadelta, {}),
    (optim.Adadelta, {"foreach": True}),
    (optim.Adamax, {}),
    (optim.Adamax, {"foreach": True}),
    (optim.NAdam, {}),
    (optim.NAdam, {"foreach": True}),
    (optim.RAdam, {}),
    (optim.RAdam, {"foreach": True}),
    (optim.Rprop, {}),
    (optim.Rprop, {"foreach": True}),
    (optim.ASGD, {}),
    (optim.ASGD, {"foreach": True}),
    (optim.Adafactor, {}),
    (optim.Muon, {}),
    (optim.LBFGS, {"max_iter": 3}),
    (optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    (optim.SparseAdam, {}),
    (Mine, {}),
]


class Program:
    """A model trained by a given optimizer."""

    def __init__(self, kind: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.sparse = kind is optim.SparseAdam
        bias = kind is not optim.Muon  # an optimizer that accepts matrices only
        layers = [nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3)]
        self.model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 1, bias=bias))
        if self.sparse:
            self.model = nn.ModuleList(
                nn.Embedding(20, width, sparse=True) for width in (WIDTH, 3 * WIDTH)
            )
        self.optimizer = kind(self.model.parameters(), **({"lr": 0.01} | options))
        self.batches = [torch.randn(8, WIDTH) for _ in range(4)]

    def backward(self, number: int) -> Tensor:
        self.optimizer.zero_grad()
        if self.sparse:
            at = torch.arange(4 + 3 * number)
            loss = sum(embedding(at).square().sum() for embedding in self.model)
        else:
            loss = self.model(self.batches[number]).square().mean()
        loss.backward()
        return loss.detach()

    def closure(self, number: int) -> tuple[Any, ...]:
        wants_one = isinstance(self.optimizer, optim.LBFGS)
        return (lambda: self.backward(number),) if wants_one else ()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                **self.model.state_dict(),
                **{f"state {k}": v for k, v in _flat(self.optimizer.state_dict()).items()},
                "steps": getattr(self.optimizer, "steps", 0),
            }
        )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, (list, tuple)):
        value = list(enumerate(value))
    else:
        return {name: value}
    return {k: v for key, item in value for k, v in _flat(item, f"{name}.{key}").items()}


def _nothing_is_left_behind() -> None:
    assert _get_current_dispatch_mode_stack() == []
    assert not _optimizer_steps.hooks._global_optimizer_pre_hooks


@pytest.mark.parametrize(
    ("kind", "options", "evict"),
    [(*optimizer, evict) for optimizer, evict in combined(KINDS, MODES)],
    ids=str,
)
def test_optimizer_step_that_raises_out_of_budget_keeps_weights(
    kind: Any, options: dict[str, Any], evict: Evict
) -> None:
    """Each of four steps is tried within larger and larger budgets, until it fits.

    A step that raises changes nothing. A step that fits gives the bits of plain PyTorch.
    """
    plain, ours = Program(kind, **options), Program(kind, **options)
    failures = 0
    for number in range(4):
        plain.backward(number)
        plain.optimizer.step(*plain.closure(number))
        ours.backward(number)
        before = ours.state()
        with rekindle.budget("1GiB") as run:
            for each in [*ours.model.parameters(), *ours.batches]:
                each.sum()  # a tensor counts from the first operator that reads it
            budget = run.memory
        while True:
            try:
                with rekindle.budget(budget, evict=evict) as run:
                    ours.optimizer.step(*ours.closure(number))
                break
            except rekindle.OutOfBudget as error:
                failures += 1
                assert differing(ours.state(), before) == []
                budget += max(100, (error.smallest_budget - budget) // 2)
            _nothing_is_left_behind()
        # Within an optimizer's step, the workspace of its operators evicts no values.
        assert run.peak <= budget + (kind is optim.SparseAdam) * 2048
        assert differing(ours.state(), plain.state()) == []
    assert failures > 10


@pytest.mark.parametrize("evict", MODES)
@pytest.mark.parametrize("kind", [optim.SGD, optim.LBFGS, Mine])
def test_optimizer_step_repeated_with_more_memory_succeeds(kind: Any, evict: Evict) -> None:
    """The step fails while the program holds a large tensor. It succeeds after that is deleted."""
    plain, ours = Program(kind), Program(kind)
    plain.backward(0)
    plain.optimizer.step(*plain.closure(0))
    with rekindle.budget(200_000, evict=evict) as run:
        ours.backward(0)
        before = ours.state()
        hoard = torch.frombuffer(bytearray(200_000 - run.memory - 300), dtype=torch.uint8)
        hoard[0]  # a tensor counts from the first operator that reads it
        failed = False
        try:
            ours.optimizer.step(*ours.closure(0))
        except rekindle.OutOfBudget:
            failed = True
        del hoard
        assert failed == (kind is not optim.SGD)  # a step of SGD needs no memory
        if failed:
            assert differing(ours.state(), before) == []
            ours.optimizer.step(*ours.closure(0))
        run._driver.engine.check()
    assert differing(ours.state(), plain.state()) == []


@pytest.mark.parametrize("evict", MODES)
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.Adagrad])
def test_optimizer_step_with_closure_updates_all_or_nothing(kind: Any, evict: Evict) -> None:
    """The step first calls the closure, and then needs memory to update the weights.

    `OutOfBudget` in either part leaves weights and state unchanged.
    """
    options = {"momentum": 0.9} if kind is optim.SGD else {}
    plain, ours = Program(kind, **options), Program(kind, **options)
    operators: set[str] = set()
    for number in range(3):
        plain.optimizer.step(lambda number=number: plain.backward(number))
        before = ours.state()
        budget = 1_000
        while True:
            try:
                with rekindle.budget(budget, evict=evict):
                    ours.optimizer.step(lambda number=number: ours.backward(number))
                break
            except rekindle.OutOfBudget as error:
                operators.add(error.operator)
                budget = error.smallest_budget
                assert differing(ours.state(), before) == []
        assert differing(ours.state(), plain.state()) == []
    assert f"{kind.__name__}.step()" in operators or kind is optim.Adagrad


@pytest.mark.parametrize("evict", MODES)
def test_optimizer_step_hooks_run_before_memory_is_checked(evict: Evict) -> None:
    """The hook allocates memory, so the step may lack it, and then changes nothing."""
    plain, ours = Program(optim.AdamW), Program(optim.AdamW)
    kept: list[Tensor] = []
    ours.optimizer.register_step_pre_hook(lambda *_: kept.append(torch.ones(500)))
    plain.backward(0)
    plain.optimizer.step()
    ours.backward(0)
    before = ours.state()
    budget, failures = 8_000, 0
    while True:
        try:
            with rekindle.budget(budget, evict=evict) as run:
                ours.optimizer.step()
            break
        except rekindle.OutOfBudget:
            failures += 1
            budget += 200
            kept.clear()
            assert differing(ours.state(), before) == []
            assert len(ours.optimizer._optimizer_step_pre_hooks) == 1
    assert failures > 5
    assert run.peak <= budget
    assert len(ours.optimizer._optimizer_step_pre_hooks) == 1
    assert differing(ours.state(), plain.state()) == []


class Through(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_failed_optimizer_step_leaves_dispatch_modes_in_order() -> None:
    ours = Program(Mine)
    ours.backward(0)
    before = ours.state()
    with rekindle.budget(8_000):
        mode = _get_current_dispatch_mode()
        with Through(), pytest.raises(rekindle.OutOfBudget):
            ours.optimizer.step()
        assert _get_current_dispatch_mode() is mode
    assert differing(ours.state(), before) == []
    _nothing_is_left_behind()


def test_optimizer_step_with_growing_memory_error_names_remedy() -> None:
    """Rekindle can undo only the first step of a custom optimizer, for which it makes copies.

    A later step that needs more memory than the first one raises an error with advice.
    """
    ours = Program(Mine)
    takes = 0
    plain = Mine.step

    def step(self: Any) -> None:
        plain(self)
        torch.zeros(takes)

    Greedy = type("Greedy", (Mine,), {"step": step})
    ours.optimizer = Greedy(ours.model.parameters(), lr=0.1)
    ours.backward(0)
    with rekindle.budget(40_000):
        for _ in range(3):
            ours.optimizer.step()
        takes = 20_000
        with pytest.raises(rekindle.OutOfBudget) as caught:
            ours.optimizer.step()
    assert "Greedy.step() needed more memory" in caught.value.__notes__[0]
