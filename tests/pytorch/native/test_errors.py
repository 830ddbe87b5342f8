"""Tests that the program receives its own errors unchanged, even if other code fails too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.native import Driver
from tests.pytorch import cores

NUMBERS = 40_000


# -- interrupts ------------------------------------------------------------------------------------


class Slow:
    """An operator written in Python, which may be interrupted while it runs."""

    calls = 0
    interrupted_at = -1

    @classmethod
    def sin(cls, x: Tensor) -> Tensor:
        cls.calls += 1
        if cls.calls == cls.interrupted_at:
            raise KeyboardInterrupt
        return x.sin()


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    with torch.library._scoped_library("rekindle_errors", "FRAGMENT") as library:
        made = torch.library.custom_op("rekindle_errors::slow", Slow.sin, mutates_args=())
        made.register_fake(torch.empty_like)
        made.register_autograd(
            lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        )
        yield
        del library


@pytest.fixture(autouse=True)
def _never_interrupted() -> None:
    Slow.calls, Slow.interrupted_at = 0, -1


@pytest.mark.parametrize("when", [1, 2, 5])
def test_keyboard_interrupt_in_planned_step_reaches_program(when: int) -> None:
    weight = torch.full((NUMBERS,), 0.01, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(interrupted: int = -1) -> None:
        y = weight
        for _ in range(24):
            y = torch.ops.rekindle_errors.slow(y * 1.01)
        Slow.interrupted_at = Slow.calls + interrupted if interrupted > 0 else -1
        y.sum().backward()  # recomputations run here
        optimizer.step()
        optimizer.zero_grad()

    with rekindle.budget(14 * 4 * NUMBERS, learn="wait", cache=False, evict="saved") as run:
        for _ in range(6):
            step()
        assert run.recomputations > 0
        with pytest.raises(KeyboardInterrupt):
            step(when)
        optimizer.zero_grad()
        step()  # the next step continues


def test_keyboard_interrupt_in_memory_snapshot_reaches_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: Driver) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1_000):
            pass

    with rekindle.budget.unlimited(record=True) as run:
        torch.ones(100)
        monkeypatch.setattr(type(run._driver.peak), "look", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = [torch.rand(1_000 * n, requires_grad=True).sin() for n in range(1, 50)]
        monkeypatch.undo()
        torch.rand(100_000, requires_grad=True).sin()


def test_keyboard_interrupt_in_size_prediction_reaches_program() -> None:
    def fake(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with torch.library._scoped_library("rekindle_sizes", "FRAGMENT"):
        made = torch.library.custom_op("rekindle_sizes::sin", lambda x: x.sin(), mutates_args=(),
                                       schema="(Tensor x) -> Tensor")  # fmt: skip
        made.register_fake(fake)
        with rekindle.budget("1GiB"), pytest.raises(KeyboardInterrupt):
            torch.ops.rekindle_sizes.sin(torch.ones(10))


def test_interrupt_at_end_of_budget_reaches_program() -> None:
    """The interrupt comes after another error, while the end of the budget recomputes values."""
    calls: list[Callable[[], None]] = []

    def fails() -> None:
        raise ValueError("first")

    def interrupts() -> None:
        raise KeyboardInterrupt

    with torch.library._scoped_library("rekindle_back", "FRAGMENT"):

        def sin(x: Tensor) -> Tensor:
            if calls:
                calls.pop(0)()
            return x.sin()

        made = torch.library.custom_op("rekindle_back::sin", sin, mutates_args=(),
                                       schema="(Tensor x) -> Tensor")  # fmt: skip
        made.register_fake(torch.empty_like)
        made.register_autograd(lambda ctx, gradient: gradient, setup_context=_nothing)
        weight = torch.ones(1_000, requires_grad=True)
        within = rekindle.budget("1GiB", evict="anything")
        run = within.__enter__()
        kept = [torch.ops.rekindle_back.sin(weight * n) for n in range(3)]
        cores.evict_all(run._driver)
        assert run.evictions > 0
        calls += [fails, interrupts]
        with pytest.raises(KeyboardInterrupt):
            within.__exit__(None, None, None)
        del kept


def _nothing(**_: object) -> None:
    """Save no tensors for the backward pass of these operators."""


# -- several errors: the first one is raised -------------------------------------------------------


def test_error_at_end_of_budget_does_not_hide_error_of_program() -> None:
    def sin(x: Tensor) -> Tensor:
        if again:
            raise ValueError("cannot run again")
        return x.sin()

    again = False
    with torch.library._scoped_library("rekindle_end", "FRAGMENT"):
        made = torch.library.custom_op("rekindle_end::sin", sin, mutates_args=(),
                                       schema="(Tensor x) -> Tensor")  # fmt: skip
        made.register_fake(torch.empty_like)
        made.register_autograd(lambda ctx, gradient: gradient, setup_context=_nothing)
        weight = torch.ones(1_000, requires_grad=True)
        error = KeyError("of the program")
        within = rekindle.budget("1GiB", evict="anything")
        run = within.__enter__()
        kept = [torch.ops.rekindle_end.sin(weight * n) for n in range(3)]
        cores.evict_all(run._driver)
        again = True
        # `__exit__` raises no error, so that the error of the program propagates
        within.__exit__(KeyError, error, None)
        del kept
    assert any("cannot run again" in note for note in error.__notes__)


# -- calls in which an exception would end the process ---------------------------------------------

NESTED = """
import sys, torch, rekindle
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
parts = [torch.randn(3, 32), torch.randn(5, 32)]
amount = 4000
while True:
    try:
        with rekindle.budget(amount, cache=False):
            nested = model(torch.nested.nested_tensor(parts))
            torch.nested.to_padded_tensor(nested, 0.0).sum().backward()
        break
    except rekindle.OutOfBudget as error:
        amount = error.smallest_budget
    finally:
        model.zero_grad()
print(amount)
"""


def test_reading_size_of_nested_tensor_allocates_no_memory() -> None:
    """Autograd reads the size where an `OutOfBudget` would end the process."""
    command = [sys.executable, "-W", "ignore", "-c", NESTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
