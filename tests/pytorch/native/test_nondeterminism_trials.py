"""Tests of trials: an operator that may be nondeterministic runs twice in its first call.

If both results have equal bits, the operator may be recomputed later.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.operators import TRIED

WIDTH = 4096
DEPTH = 12
ATOMICS = 8192  # the flag in `_traits.py` of operators that sum by atomics


class Doubtful:
    """An operator that runs twice in its first call, to find out if it may be recomputed.

    Attributes:
        runs: Number of executions.
        drift: Number added to its results at each later execution; 0 gives equal bits.
    """

    def __init__(self, number: int, traits: int) -> None:
        self.runs = 0
        self.drift = 0.0
        name = f"rekindle_tests::doubtful_{number}"

        def run(x: Tensor) -> Tensor:
            self.runs += 1
            return x.sin() + self.drift * self.runs

        self.call: Any = torch.library.custom_op(name, run, mutates_args=())
        self.call.register_fake(torch.empty_like)
        self.call.register_autograd(
            lambda ctx, gradient: gradient * ctx.saved_tensors[0],
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
        )
        native_core().learn_traits(name, traits)
        self.name = name

    def step(self, depth: int = DEPTH) -> Tensor:
        """Return a gradient; each call of the operator saves its result."""
        torch.manual_seed(0)
        weight = torch.rand(WIDTH, requires_grad=True)
        x = weight
        for _ in range(depth):
            x = self.call(x)
        x.sum().backward()
        assert weight.grad is not None
        return weight.grad


_numbers = count()


@pytest.fixture
def made() -> Callable[..., Doubtful]:
    return lambda traits=TRIED: Doubtful(next(_numbers), traits)


def _bytes(results: int) -> int:
    return 4 * WIDTH * results


def test_operator_with_equal_bits_in_two_runs_is_recomputed(made: Callable[..., Doubtful]) -> None:
    doubtful = made()
    wanted = doubtful.step()
    with rekindle.budget(_bytes(8), learn=False) as run:
        got = doubtful.step()
    assert torch.equal(got, wanted)
    assert run.recomputations > 0
    assert "not recomputed" not in str(run.report())


def test_operator_with_other_bits_in_trial_is_not_recomputed(made: Callable[..., Doubtful]) -> None:
    doubtful = made()
    doubtful.drift = 2**-10
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(_bytes(8), learn=False):
        doubtful.step()
    doubtful.runs = 0
    wanted = doubtful.step()
    doubtful.runs = 0
    with rekindle.budget(_bytes(3 * DEPTH), learn=False) as run:
        assert torch.equal(doubtful.step(), wanted)
    assert doubtful.runs == DEPTH  # no operator is tried a second time
    assert run.recomputations == 0
    (reported,) = (each for each in run.report().advice if doubtful.name in each)
    assert "the bits of its results differ when it is recomputed" in reported
    assert f"{DEPTH} calls, {_bytes(DEPTH) >> 10}.0 KiB" in reported


def test_profile_lists_operators_that_are_never_recomputed(made: Callable[..., Doubtful]) -> None:
    doubtful = made()
    doubtful.drift = 2**-10
    assert f"{doubtful.name} is not recomputed" in str(rekindle.profile(doubtful.step, repeats=1))


def test_nondeterminism_trial_runs_once_for_each_signature(made: Callable[..., Doubtful]) -> None:
    doubtful = made()
    for runs in (DEPTH + 1, DEPTH):
        doubtful.runs = 0
        with rekindle.budget(None):
            doubtful.step()
        assert doubtful.runs == runs


def test_nondeterminism_trial_is_repeated_after_setting_changed(
    made: Callable[..., Doubtful],
) -> None:
    doubtful = made()

    def runs() -> int:
        doubtful.runs = 0
        with rekindle.budget(None):
            doubtful.step()
        return doubtful.runs

    assert [runs(), runs()] == [DEPTH + 1, DEPTH]
    torch.use_deterministic_algorithms(True)
    try:
        assert [runs(), runs()] == [DEPTH + 1, DEPTH]
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs() == DEPTH


def test_nondeterminism_trial_is_repeated_for_other_shape(made: Callable[..., Doubtful]) -> None:
    doubtful = made()
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget(None):
        for width in (WIDTH, WIDTH, WIDTH // 2):
            doubtful.call(x[:width]).sum().backward()
    assert doubtful.runs == 3 + 2


def test_sum_by_atomics_needs_three_nondeterminism_trials(made: Callable[..., Doubtful]) -> None:
    """Atomic additions may be in the same order by chance, so one trial is not enough."""
    doubtful = made(TRIED | ATOMICS)
    with rekindle.budget(None):
        doubtful.step()
    assert doubtful.runs == DEPTH + 3


def _called(body: Callable[[Tensor, int], Tensor]) -> tuple[Any, list[int]]:
    """Return an operator that is tried in its first call, and a list with its number of executions.

    The operator computes `body` of its argument and of that number.
    """
    name, runs = f"rekindle_tests::tried_{next(_numbers)}", [0]

    def run(x: Tensor) -> Tensor:
        runs[0] += 1
        return body(x, runs[0])

    call: Any = torch.library.custom_op(name, run, mutates_args=())
    call.register_fake(torch.empty_like)
    call.register_autograd(
        lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None
    )
    native_core().learn_traits(name, TRIED)
    return call, runs


def test_nondeterminism_trial_without_memory_is_postponed() -> None:
    """If the budget has room for one execution only, the trial is made at a later call."""
    call, runs = _called(lambda x, _: x.sin())
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget(_bytes(2), learn=False) as run:
        call(x)
    assert runs == [1]
    assert run.peak == _bytes(2)
    with rekindle.budget(None):
        for _ in range(5):
            call(x)
    assert runs == [1 + 5 + 1]


def test_error_in_second_run_of_trial_does_not_reach_program() -> None:
    def body(x: Tensor, runs: int) -> Tensor:
        if runs == 2:
            raise ValueError("not twice")
        return x.sin()

    call, runs = _called(body)
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget("1MiB") as run:
        for _ in range(3):
            assert torch.equal(call(x), x.sin())
    assert runs == [4]
    assert any("not twice" in each for each in run.report().advice)


def test_operator_that_returns_cached_tensor_is_not_recomputed() -> None:
    """The second run returns the tensor of the first run, so it computed nothing."""
    cache: dict[int, Tensor] = {}
    call, runs = _called(lambda x, _: cache.setdefault(0, x.sin()))
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget("1MiB") as run:
        call(x)
    assert runs == [2]
    assert any(
        "it returns memory that it also keeps for itself" in each for each in run.report().advice
    )


def test_keyboard_interrupt_in_nondeterminism_trial_is_raised() -> None:
    def body(x: Tensor, runs: int) -> Tensor:
        if runs == 2:
            raise KeyboardInterrupt
        return x.sin()

    call, _ = _called(body)
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget("1MiB") as run:
        with pytest.raises(KeyboardInterrupt):
            call(x)
        assert torch.equal(call(x), x.sin())
    run._driver.engine.check()
