"""Tests of plans that swap values to the host, here to a file: equal bits within the budget.

The tests give a bandwidth, which decides what plans copy. Rekindle does not correct a given
bandwidth, so the tests do not depend on the speed of this machine's disk.
"""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rekindle
from rekindle import _facade
from rekindle._planners import Online
from rekindle.policies import Random, Swap
from rekindle.pytorch.planned._planned import ModelPlan
from tests.pytorch.allocations import allocated
from tests.pytorch.harsh import differing, everything
from tests.pytorch.planned.test_plan import ROWS, WIDTH, batch, mlp
from tests.strategies import examples

FAST = Swap(out_bytes_per_s=10**12, in_bytes_per_s=10**12)
SLOW = Swap(out_bytes_per_s=10**3, in_bytes_per_s=10**3)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled"),
]


class Branches(nn.Module):
    """A model with views, an operator of several results, batch norm, dropout and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tail = mlp(lambda: nn.Dropout(0.3), layers=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, cell, x, y = self.lift(x).chunk(4, dim=1)
        cell = torch.sigmoid(gate) * torch.tanh(cell)
        x = self.norm(x) + cell.t().contiguous().t()
        largest, _ = (x * y).max(dim=1)
        return self.tail(x + cell).square().mean() + largest.mean(), cell.sum()


def build() -> Branches:
    torch.manual_seed(20)
    return Branches()


def train(model: nn.Module) -> list[Tensor]:
    """Make three steps: the second runs backward twice, the last uses one result as the loss."""
    torch.manual_seed(21)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses: list[Tensor] = []
    for number in range(3):
        optimizer.zero_grad()
        loss, more = model(batch(number))
        if number < 2:
            loss = loss + more
        loss.backward(retain_graph=number == 1)
        if number == 1:
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.fixture(scope="module")
def expected() -> Any:
    plain = build()
    return everything((train(plain), plain))


def swapping(model: nn.Module, folder: Path, fraction: float = 0.3, **options: Any) -> ModelPlan:
    """Plan `model` with swapping, within a budget between the smallest one and the full peak.

    The budget is the smallest one plus `fraction` of the difference.
    """
    given = {"swap": FAST, "swap_directory": folder, "check": False} | options
    keeps = rekindle.plan(model, (batch(),), budget=1 << 40, **given)
    least = rekindle.plan(model, (batch(),), budget=1, **given).smallest_budget
    assert keeps.peak is not None
    budget = least + int(fraction * (keeps.peak - least))
    return rekindle.plan(model, (batch(),), budget=budget, **given)


def test_planned_model_that_swaps_matches_pytorch(tmp_path: Path, expected: Any) -> None:
    model = build()
    plan = swapping(model, tmp_path)
    planned = plan.apply()
    assert differing(everything((train(planned), model)), expected) == []
    assert plan.plan.swapped_out > 0
    assert "copied to the host" in plan.report()
    assert plan.host is not None
    assert plan.host.transfers.transfer_ns > 0
    assert plan.host.used == 0


def test_plan_for_slow_link_does_not_swap(tmp_path: Path, expected: Any) -> None:
    model = build()
    plan = swapping(model, tmp_path, swap=SLOW)
    planned = plan.apply()
    assert plan.overhead
    assert plan.plan.swapped_out == 0
    assert differing(everything((train(planned), model)), expected) == []


def test_planned_swap_at_measured_bandwidth_matches_pytorch(tmp_path: Path, expected: Any) -> None:
    model = build()
    planned = swapping(model, tmp_path, swap="1GiB").apply()
    assert differing(everything((train(planned), model)), expected) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.filterwarnings("default")  # a warning of the compiler itself
def test_compiled_plan_that_swaps_matches_pytorch(tmp_path: Path) -> None:
    """Compiled segments give the same bits for every budget, also if values are swapped."""
    found: list[Any] = []
    for fraction in (2.0, 0.2):
        model = build()
        plan = swapping(model, tmp_path, fraction, compile=True)
        assert bool(plan.plan.swapped_out) == (fraction < 1)
        found.append(everything((train(plan.apply()), model)))
    assert differing(*found) == []


class Drawn:
    """A planner that draws at random what a plan evicts, by swapping or for recomputation."""

    name = "drawn"

    def __init__(self, seed: int, rate: int, fraction: float, *, only: bool) -> None:
        swap = Swap(None, rate, rate, only)
        self.swap, self.fraction = swap, fraction
        self.online = Online(Random(seed), swap, limit=100)

    def plan(self, problem: Any, budget: int, *, watch: Any = None) -> Any:
        keeps = problem.keep_all_peak
        if budget > keeps:
            budget = problem.floor + int(self.fraction * (keeps - problem.floor))
        while (found := self.online.plan(problem, budget, watch=watch)).schedule is None:
            budget = (budget + keeps + 1) // 2
        return replace(found, budget=budget)


@examples(25)
@given(
    seed=st.integers(0, 1 << 16),
    rate=st.sampled_from([10**8, 10**9, 10**10]),
    fraction=st.floats(0, 0.9),
    only=st.booleans(),
)
def test_planned_model_with_random_swaps_matches_pytorch(
    seed: int,
    rate: int,
    fraction: float,
    only: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    plain = build()
    wanted = everything((train(plain), plain))
    drawn = Drawn(seed, rate, fraction, only=only)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_facade, "_planner", lambda *_: drawn)
        model = build()
        options = {"swap": drawn.swap, "swap_directory": folder, "check": False}
        plan = rekindle.plan(model, (batch(),), budget=1 << 40, **options)
        assert differing(everything((train(plan.apply()), model)), wanted) == []
        assert plan.host is not None
        gc.collect()
        assert plan.host.used == 0


class Deep(nn.Module):
    """A model that computes its loss itself, so that a plan counts all memory of a step."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.model = mlp(layers=layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def deep(folder: Path, **options: Any) -> tuple[Callable[[], None], ModelPlan]:
    """Return a step of a planned model that swaps, and its plan."""
    torch.manual_seed(3)
    model = Deep()
    plan = swapping(model, folder, **options)
    assert plan.plan.swapped_out > 0
    planned, x = plan.apply(), batch()

    def step() -> None:
        model.zero_grad()
        planned(x).backward()

    return step, plan


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_planned_swap_with_late_writes_stays_within_budget(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the host are slow. Memory counts as free only after its copy has ended."""
    plain = os.pwrite

    def late(*arguments: Any) -> int:
        time.sleep(seconds)
        return plain(*arguments)

    step, plan = deep(tmp_path)
    monkeypatch.setattr(os, "pwrite", late)
    step()
    plan.apply().zero_grad()
    constant = batch().nbytes + sum(each.nbytes for each in plan.apply().parameters())
    assert constant + allocated(step).peak <= plan.budget


def _fails_every(every: int, name: str, patch: pytest.MonkeyPatch) -> None:
    """Make each `every`-th call of `os.NAME` fail."""
    plain, count = getattr(os, name), 0

    def failing(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count % every == 0:
            raise OSError(errno.EIO, "the disk is broken")
        return plain(*arguments)

    patch.setattr(os, name, failing)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_planned_swap_on_failing_disk_matches_pytorch_or_raises(tmp_path: Path) -> None:
    step, plan = deep(tmp_path)
    step()
    expected = _gradients(plan.apply())
    outcomes: set[bool] = set()

    @examples(30)
    @given(every=st.integers(1, 60), name=st.sampled_from(["preadv", "pwrite"]))
    def play(every: int, name: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            _fails_every(every, name, patch)
            for _ in range(2):
                failed = ""
                try:
                    step()
                except rekindle.SwapFailed as error:
                    failed = str(error)
                outcomes.add(not failed)
                if failed:
                    assert "could not be read back: [Errno 5] the disk is broken" in failed
                else:
                    assert all(map(torch.equal, _gradients(plan.apply()), expected))
        step()
        assert all(map(torch.equal, _gradients(plan.apply()), expected))
        gc.collect()
        assert plan.host is not None
        assert plan.host.used == 0

    play()
    assert outcomes == {False, True}


def test_planned_forward_without_backward_frees_host_copies(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plan = swapping(Deep(), tmp_path)
    loss = plan.apply()(batch())
    assert plan.host is not None
    assert plan.host.used > 0
    del loss
    gc.collect()
    deadline = time.monotonic() + 30
    while plan.host.used and time.monotonic() < deadline:
        time.sleep(0.001)  # copies in progress are freed after they have ended
    assert plan.host.used == 0


def test_planned_swap_with_two_forward_passes_matches_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Deep()
    (model(batch(0)) * model(batch(1))).backward()
    expected = _gradients(model)
    model.zero_grad()
    planned = swapping(model, tmp_path).apply()
    (planned(batch(0)) * planned(batch(1))).backward()
    assert all(map(torch.equal, _gradients(model), expected))


def test_planned_swap_inside_evict_anything_matches_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Deep()
    model(batch()).backward()
    expected = _gradients(model)
    model.zero_grad()
    planned = swapping(model, tmp_path).apply()
    amount = 40 * ROWS * WIDTH * 4
    with rekindle.budget(amount, evict="anything"):
        planned(batch()).backward()
    assert all(map(torch.equal, _gradients(model), expected))


def test_planned_swap_with_cloning_saved_tensor_hook_is_refused(tmp_path: Path) -> None:
    step, _ = deep(tmp_path)
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    with hooks, pytest.raises(rekindle.SwapFailed, match="saved-tensor hook"):
        step()
    step()


def test_planned_swap_with_full_host_memory_raises_swap_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, plan = deep(tmp_path)
    assert plan.host is not None
    store = plan.host._copies.store
    monkeypatch.setattr(store, "write", lambda home: None)
    with pytest.raises(rekindle.SwapFailed, match="there is no room for it"):
        step()
    monkeypatch.undo()
    step()


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"swap": 2.5}, rekindle.InvalidBudget, r"rekindle\.plan\(model, x, swap=2.5\)"),
        ({"swap": "1 Gigs"}, rekindle.InvalidBudget, "got the unknown unit"),
        ({"swap_directory": "/x"}, rekindle.Unsupported, r"write rekindle\.plan\(model, x, swap="),
        ({"swap": "1GiB", "swap_directory": 5}, rekindle.InvalidArgument, "wanted the path of a"),
        ({"swap": "1GiB", "swap_directory": "/no/x"}, rekindle.Unsupported, "no swap file can be"),
        ({"swap": FAST, "planner": "rotor"}, rekindle.Unsupported, "the default planner only"),
    ],
)
def test_plan_with_wrong_swap_argument_is_refused(
    options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        rekindle.plan(Deep(), (batch(),), budget="1GiB", **options)
