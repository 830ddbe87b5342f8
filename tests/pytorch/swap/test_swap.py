"""Tests of swapping: a budget copies values to the host (here to a file) in place of recomputing.

The bits must be equal, and memory within the budget. With `Swap(only=True)` a value is recomputed
only if the host has no room for it. So the tests do not depend on the speed of this machine's disk.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle import Run
from rekindle.engine import Engine
from rekindle.policies import DEFAULT, Swap
from rekindle.pytorch.swap import Copies, _host_memory
from rekindle.pytorch.swap._file_store import FileStore
from rekindle.report._data import Swapped
from rekindle.schedule import Action, Discard, SwapIn, SwapOut, verify
from rekindle.simulator._replay import drive
from tests.differ.judge import smallest
from tests.helpers import combined, name_of, sampled
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.harsh import WIDTH, deeper, vector
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.test_models import left_by, plainly, train
from tests.pytorch.tracker import Tracker

VECTOR = 4 * WIDTH  # bytes
TIGHT = 14 * VECTOR
ONLY = Swap(only=True)


def swapped(run: Run) -> Swapped:
    found = run.report().swapped
    assert found is not None
    return found


def copies_of(run: Run) -> Copies:
    assert isinstance(run._driver.copies, Copies)
    return run._driver.copies


def store_of(run: Run) -> FileStore:
    """Return the host store of a run."""
    store = copies_of(run).store
    assert isinstance(store, FileStore)
    return store


def ways_out(run: Run) -> list[Any]:
    """Return the swap-out copies that have not been waited for, the oldest first."""
    return [each for each, _, out in copies_of(run)._running.values() if out]


def check(run: Run) -> None:
    """Check the invariants of the engine, and that each copy in progress belongs to a storage."""
    run._driver.engine.check()  # checks its swapper as well
    copies = copies_of(run)
    assert copies._running.keys() <= copies._keys.keys()


def within(case: Case, budget: int, **options: Any) -> tuple[dict[str, Any], Run, Tracker]:
    """Run three steps within `budget`, or within the smallest budget that works.

    A run before that measures the workspaces of the operators.

    Returns:
        The results, the run, and the tracker that measured memory.
    """
    with rekindle.budget.unlimited():
        train(case.build())

    def attempt(budget: int) -> tuple[dict[str, Any], Run, Tracker]:
        workload = case.build()
        with Tracker() as tracker, rekindle.budget(budget, **options) as run:
            losses = train(workload)
        assert tracker.peak <= budget
        assert run.peak <= budget
        return left_by(workload, losses), run, tracker

    return smallest(attempt, budget, most=12)[0]


@pytest.mark.parametrize(
    ("case", "fraction"), sampled(combined(ALL_CASES, (0.5, 0.3)), 4), ids=name_of
)
def test_training_that_swaps_all_values_matches_pytorch(
    case: Case, fraction: float, tmp_path: Path
) -> None:
    plain = plainly(case)
    budget = plain.measured.budget(fraction)
    outcome, run, _ = within(case, budget, swap=ONLY, swap_directory=tmp_path)
    assert differing(outcome, plain.outcome) == []
    assert run.recomputations == 0
    assert swapped(run).out > 0
    assert swapped(run).back > 0
    check(run)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fraction"), combined(ALL_CASES, (0.3, 0.5)), ids=name_of)
def test_training_that_swaps_or_recomputes_matches_pytorch(
    case: Case, fraction: float, tmp_path: Path
) -> None:
    """The disk's bandwidth is measured, and decides if a value is swapped or recomputed."""
    plain = plainly(case)
    budget = plain.measured.budget(fraction)
    outcome, run, _ = within(case, budget, swap="1GiB", swap_directory=tmp_path)
    assert differing(outcome, plain.outcome) == []
    check(run)


# -- values to evict -------------------------------------------------------------------------------


def swapping(tmp_path: Path, budget: int = TIGHT, **options: Any) -> rekindle.budget:
    return rekindle.budget(
        budget, swap=options.pop("swap", ONLY), swap_directory=tmp_path, **options
    )


def gradient(weight: Tensor, depth: int = 20) -> Tensor:
    return torch.autograd.grad(deeper(weight, depth).sum(), weight)[0]


def hoard(weight: Tensor) -> Tensor:
    """Return a loss of twenty saved values that cannot be recomputed."""
    x = weight
    with rekindle.never_recompute():
        for _ in range(20):
            x = x.sin()
    return x.sum()


def test_values_without_recipe_are_swapped_and_restored(tmp_path: Path) -> None:
    weight = vector(True)
    (wanted,) = torch.autograd.grad(hoard(weight), weight)
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(TIGHT):
        hoard(weight)
    with Tracker() as tracker, swapping(tmp_path) as run:
        (got,) = torch.autograd.grad(hoard(weight), weight)
    assert torch.equal(got, wanted)
    assert tracker.peak <= TIGHT
    assert (run.recomputations, run.evictions) == (0, run.evictions)
    assert swapped(run).back >= 6 * VECTOR
    check(run)


class Opaque(torch.autograd.Function):
    """A function that saves a value which a kernel wrote without an operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.tensor(x.detach().numpy() ** 2))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0]


def test_values_saved_by_custom_functions_are_swapped(tmp_path: Path) -> None:
    def slope(weight: Tensor) -> Tensor:
        x = weight
        for _ in range(20):
            x = Opaque.apply(x)
        return torch.autograd.grad(x.sum(), weight)[0]

    weight = vector(True)
    wanted = slope(weight)
    with swapping(tmp_path) as run:
        got = slope(weight)
    assert torch.equal(got, wanted)
    assert swapped(run).out >= 6 * VECTOR
    check(run)


def test_sources_that_only_recomputation_reads_are_swapped(tmp_path: Path) -> None:
    """The program deletes the tensors `rows`, but recomputations still read them."""

    def loss(weight: Tensor) -> Tensor:
        total = weight.sum()
        for seed in range(20):
            rows = torch.tensor(torch.full((WIDTH,), 0.1 * seed).numpy())
            total = total + (weight * rows).sum()
        return total

    weight = vector(True)
    (wanted,) = torch.autograd.grad(loss(weight), weight)
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(TIGHT):
        loss(weight)
    with swapping(tmp_path) as run:
        (got,) = torch.autograd.grad(loss(weight), weight)
    assert torch.equal(got, wanted)
    check(run)


def test_user_held_values_are_not_swapped(tmp_path: Path) -> None:
    weight = vector(True)
    with swapping(tmp_path, 30 * VECTOR) as run:
        rows = [weight.sin() for _ in range(10)]
        addresses = [row.data_ptr() for row in rows]
        deeper(weight, 60).sum().backward()
        assert [row.data_ptr() for row in rows] == addresses
        assert all(torch.equal(row, weight.sin()) for row in rows)
    assert swapped(run).out > 0
    check(run)


def test_values_passed_to_run_keep_are_not_swapped(tmp_path: Path) -> None:
    weight = vector(True)
    with swapping(tmp_path) as run:
        x = weight.sin()
        memory = weakref.ref(x.untyped_storage())
        y = run.keep(x) * 2
        loss = (deeper(y, 20) * x).sum()
        del x, y
        assert memory() is not None
        loss.backward()
    assert swapped(run).out > 0
    check(run)


# -- records, reports and options ------------------------------------------------------------------


def test_recorded_run_with_swaps_passes_verifier(tmp_path: Path) -> None:
    weight = vector(True)
    with swapping(tmp_path, record=True) as run:
        gradient(weight)
    record = run.record
    cost = verify(run.trace, record.schedule, TIGHT)
    kinds = [type(action) for action in record.actions]
    assert kinds.count(SwapOut) == kinds.count(Discard) > 5
    assert kinds.count(SwapIn) > 5
    assert cost.recomputations == run.recomputations == 0
    assert cost.swapped_out == record.swapped_out == swapped(run).out
    assert cost.host_peak == record.host_peak
    assert cost.peak <= record.peak <= TIGHT


@pytest.mark.parametrize("only", [True, False])
def test_simulation_of_recorded_swaps_takes_same_actions(
    only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies before an eviction are disabled, because their times depend on the disk."""
    monkeypatch.setattr(Engine, "ahead", lambda engine: iter(()))
    cores.tune(lambda driver: driver.core.disable_for_tests(driver.handle, "ahead"))
    case = next(case for case in ALL_CASES if case.name == "gpt")
    swap = Swap(out_bytes_per_s=10**9, in_bytes_per_s=10**9, only=only)
    budget = plainly(case).measured.budget(0.5)
    _, run, _ = within(case, budget, swap=swap, swap_directory=tmp_path, record=True)
    trace, record = run.trace, run.record
    assert run.budget is not None
    cost = verify(trace, record.schedule, run.budget)
    assert cost.recomputations == record.recomputations == run.recomputations
    assert (run.recomputations > 0) != only
    engine, decided = Engine(run.budget, DEFAULT, swap=swap), list[Action]()
    for _, actions in drive(trace, engine, None):
        decided += actions
        decided += engine.discards()
    assert _but_discards(decided) == _but_discards(
        record.actions
    )  # a real run discards copies on the host a little later than the simulation
    assert SwapOut in {type(action) for action in decided}


def _but_discards(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Discard)]


def test_report_shows_swapped_bytes(tmp_path: Path) -> None:
    weight = vector(True)
    with swapping(tmp_path) as run:
        gradient(weight)
    report = run.report()
    assert "swapped out" in str(report)
    assert "were hidden" in str(report)
    assert "swapped out" in report.to_html()
    assert type(report).from_json(report.to_json()) == report
    assert report.swapped is not None
    assert report.swapped.transfer_ns > 0
    with rekindle.budget(TIGHT) as run:
        gradient(weight)
    assert run.report().swapped is None
    assert "swapped" not in str(run.report())


def test_budget_with_too_slow_disk_does_not_swap(tmp_path: Path) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    slow = Swap(out_bytes_per_s=1, in_bytes_per_s=1)
    with swapping(tmp_path, swap=slow) as run:
        got = gradient(weight)
    assert torch.equal(got, wanted)
    assert run.recomputations > 0
    assert swapped(run).out == 0


def test_swap_file_is_in_tmpdir_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert _host_memory.default_directory() == str(tmp_path)
    monkeypatch.delenv("TMPDIR")
    assert Path(_host_memory.default_directory()).is_dir()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"swap": "32MiB"}, None, ""),
        ({"swap": "32"}, rekindle.InvalidBudget, r'rekindle.budget\("6GiB", swap="32GiB"\)'),
        ({"swap": "32 foo"}, rekindle.InvalidBudget, r'rekindle.budget\("6GiB", swap="6GiB"\)'),
        ({"swap": 0}, rekindle.InvalidBudget, r"more than 0 bytes"),
        ({"swap_directory": "x"}, rekindle.Unsupported, 'swap="32GiB", swap_directory='),
    ],
)
def test_swap_options_of_budget_are_accepted_or_refused(
    options: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    if error is None:
        rekindle.budget(TIGHT, **options)
    else:
        with pytest.raises(error, match=message):
            rekindle.budget(TIGHT, **options)


def test_swap_in_missing_directory_is_refused(tmp_path: Path) -> None:
    missing = swapping(tmp_path / "nowhere")
    with pytest.raises(rekindle.Unsupported, match="no swap file can be made"), missing:
        pass
    with swapping(tmp_path):  # the failed attempt left nothing behind
        gradient(vector(True))


@pytest.mark.slow
def test_many_steps_with_swap_leave_no_python_objects(tmp_path: Path) -> None:
    weight = vector(True)
    with swapping(tmp_path) as run:
        for number in range(200):
            gradient(weight)
            if number == 20:
                gc.collect()
                before = len(gc.get_objects())
        assert run.memory <= 3 * VECTOR
        gc.collect()
        assert len(gc.get_objects()) < before + 1_000
        assert store_of(run).used == 0
    check(run)


@pytest.mark.slow
def test_swapping_with_learned_plans_matches_pytorch(tmp_path: Path) -> None:
    wanted = gradient(weight := vector(True), 40)
    with swapping(tmp_path, learn="wait") as run:
        optimizer = torch.optim.SGD([vector(True)], lr=0.1)
        for _ in range(5):
            assert torch.equal(gradient(weight, 40), wanted)
            optimizer.step()
    assert swapped(run).out > 0
    check(run)


@pytest.mark.parametrize("limit", [2 * 4096, 20 * 4096, 200 * 4096])
def test_values_are_recomputed_once_host_memory_is_full(tmp_path: Path, limit: int) -> None:
    """The budget for copies on the host is small. Values that do not fit there are recomputed."""
    weight = vector(True)
    wanted = gradient(weight, 40)
    swap = Swap(host=limit, only=True)
    with Tracker() as tracker, swapping(tmp_path, swap=swap) as run:
        for _ in range(3):
            assert torch.equal(gradient(weight, 40), wanted)
    assert tracker.peak <= TIGHT
    assert 0 < swapped(run).host_peak <= limit
    assert (run.recomputations > 0) == (limit < 200 * 4096)
    check(run)
