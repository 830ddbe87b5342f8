"""What operators take inside themselves is learned, and part of the room that is made for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native import why_not
from tests.pytorch import cores
from tests.pytorch.allocations import allocated

# The native core takes memory for somebody else's that came from an allocator which was put there
# after it began, as the counting one is here.
pytestmark = pytest.mark.python_core("the allocator changes under the native one")

SIZE = 100_000  # floats of most vectors here
VECTOR = 4 * SIZE


ALONE = "REKINDLE_TEST_WORKSPACES"


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the CPU the native core counts if it is asked to, for the one in Python as well.

    Not in a process where others go on: what the allocator from before made, and what this one
    makes, are then taken for each other's.
    """
    if request.function is test_in_a_process_of_their_own:
        yield
        return
    if ALONE not in os.environ:
        pytest.skip("runs in a process of its own: test_in_a_process_of_their_own")
    module: Any = native_core()
    if module is None:
        pytest.skip(f"nobody counts: {why_not()}")
    module.count_allocations(True)
    if module.watch() is None:
        pytest.skip("another allocator insists on being the one")
    cores.forget_signatures()
    yield
    module.count_allocations(False)
    cores.forget_signatures()


@torch.library.custom_op("workspaces::curve", mutates_args=(), device_types="cpu")
def _curve(x: Tensor) -> Tensor:
    """Takes four times as much as it makes, and gives it back."""
    workspace = x.new_empty(4 * x.numel())
    y = torch.sin(x)
    del workspace
    return y


_curve.register_fake(torch.empty_like)
_curve.register_autograd(
    lambda ctx, gradient: gradient * _curve(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _curves(weight: Tensor) -> None:
    x = weight
    for _ in range(10):
        x = _curve(x * 0.9)
    x.sum().backward()


@pytest.mark.slow
def test_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {ALONE: "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout or "nobody counts" in done.stdout, done.stdout


def _within(budget: int, step: Callable[[], object]) -> tuple[int, rekindle.Run]:
    """The most that the allocator gave out at once, and the run."""
    runs: list[rekindle.Run] = []

    def run() -> None:
        with rekindle.budget(budget) as run:
            step()
        runs.append(run)

    return allocated(run).peak, runs[0]


def test_there_is_room_for_it_before_it_runs_and_runs_again() -> None:
    weight = torch.rand(SIZE, requires_grad=True)
    budget = 10 * VECTOR
    peak, run = _within(budget, lambda: _curves(weight))
    assert run.recomputations > 0
    assert VECTOR + peak <= budget


def test_the_smallest_budget_has_room_for_it() -> None:
    weight = torch.rand(SIZE, requires_grad=True)
    with rekindle.budget("1GiB"):
        _curve(weight)
    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget(4 * VECTOR):
        _curve(weight)
    assert 5 * VECTOR <= caught.value.needed < 5 * VECTOR + 64  # pieces are a little larger
    assert caught.value.smallest_budget == caught.value.needed + VECTOR
    with rekindle.budget(caught.value.smallest_budget):
        _curve(weight)


def test_a_network_of_convolutions_is_within_its_budget_by_the_allocators_word() -> None:
    def program() -> tuple[Callable[[], None], int]:
        torch.manual_seed(0)

        def block(channels: int) -> nn.Module:
            convolution = nn.Conv2d(channels, 32, 3, padding=1)
            return nn.Sequential(convolution, nn.BatchNorm2d(32), nn.ReLU(inplace=True))

        model = nn.Sequential(block(3), *(block(32) for _ in range(7)))
        batch = torch.rand(8, 3, 32, 32)

        def step() -> None:
            model(batch).square().mean().backward()
            model.zero_grad()

        constants = [*model.parameters(), *model.buffers(), batch]
        return step, sum(each.nbytes for each in constants)

    step, constants = program()
    plain = allocated(step).peak
    step, constants = program()
    budget = constants + plain // 2
    peak, run = _within(budget, step)
    assert run.recomputations > 0
    assert constants + peak <= 1.02 * budget
