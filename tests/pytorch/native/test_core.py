"""Tests of the native core's counts, of its errors in threads, and of leaks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.pytorch import cores
from tests.pytorch.allocations import allocated
from tests.pytorch.harsh import WIDTH, deeper, vector

VECTOR = 4 * WIDTH
TIGHT = 14 * VECTOR


def within(amount: str | int) -> rekindle.budget:
    return rekindle.budget(amount)


def unlimited() -> rekindle.budget:
    return rekindle.budget.unlimited()


def numbers(run: Any) -> Any:
    return run._driver.engine.now()


def test_memory_snapshot_in_several_threads_reads_no_gradients() -> None:
    """A thread takes the snapshot while others run. PyTorch may free a gradient meanwhile.

    So the snapshot has only the total of memory, and no categories.
    """

    def train() -> None:
        layer = nn.Linear(32, 32)
        for _ in range(40):
            layer.zero_grad()
            layer(torch.rand(64, 32)).tanh().square().mean().backward()

    with unlimited() as run:
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            run._driver.snapshot()
        for thread in threads:
            thread.join()
        assert run._driver.snapshot().memory == run.memory
    assert run.report().at_peak.categories == {}


# -- memory and time -------------------------------------------------------------------------------


def test_memory_that_allocator_reports_stays_within_budget() -> None:
    """Measure memory by the allocator's events in the profiler.

    They include small allocations that Rekindle does not count, for which the test leaves room.
    """
    weight = vector(True)
    deeper(weight, 30).sum().backward()  # PyTorch itself allocates memory on first use
    weight.grad = None

    def step() -> None:
        with within(TIGHT) as run:
            deeper(weight, 30).sum().backward()
        assert run.recomputations > 20

    step()
    weight.grad = None
    assert allocated(step).peak <= TIGHT + VECTOR // 4


def test_run_measures_compute_and_recompute_times() -> None:
    with within(TIGHT) as run:
        deeper(vector(True), 30).sum().backward()
    assert run.compute_ns > 0
    assert run.recompute_ns > 0
    assert 10 * VECTOR < run.peak <= TIGHT


def test_bookkeeping_is_small_per_operator_and_ends_with_step() -> None:
    """The core's records take at most 2,000 bytes for each operator, and end with the step."""
    weight = vector(True)
    with unlimited() as run:
        others = numbers(run).bookkeeping  # bytes of records that other tests left behind
        loss = deeper(weight, 500).sum()
        assert numbers(run).bookkeeping - others <= 450 * 2_000
        del loss
        deeper(weight, 8).sum().backward()
        gc.collect()
        before = numbers(run).alive
        for _ in range(200):
            weight.grad = None
            deeper(weight, 8).sum().backward()
        assert numbers(run).alive <= before


def test_two_runs_with_same_costs_have_equal_engine_journals() -> None:
    """If operators have fixed costs, the journals (event logs) of two runs are equal."""

    def journal() -> list[Any]:
        torch.manual_seed(20)
        weight = vector(True)
        with within(TIGHT) as run:
            driver: Any = run._driver
            driver.core.open_journal(driver.handle, 100_000)
            deeper(nn.functional.dropout(weight, 0.1), 30).sum().backward()
            found = driver.core.journal(driver.handle)
        assert run.recomputations > 0
        return found

    with cores.fixed_prices():
        journal()  # the first call of an operator is recorded in another way than later ones
        first = journal()
        assert len(first) > 500
        assert journal() == first


class _Garbage:
    """An object in a reference cycle. Its finalizer notes if the core's lock is held.

    The finalizer makes another such object, so that each garbage collection finds one.
    """

    def __init__(self, core: Any, found: list[bool]) -> None:
        self._itself = self
        self._core, self._found = core, found

    def __del__(self) -> None:
        if gc.get_threshold()[0] == 1:
            self._found.append(self._core.has_lock())
            _Garbage(self._core, self._found)


def _where_garbage_is_collected(core: Any, call: Callable[[], object]) -> list[bool]:
    """Call `call`, while nearly each new list or tuple of Python triggers a garbage collection.

    Python's stock of unused lists and tuples is used up first, because taking one from it triggers
    no collection.

    Returns:
        For each finalizer that ran: True if the core's lock was held.
    """
    kept: list[Any] = [[[] for _ in range(100)]]
    kept += [[(0,) * n for _ in range(2_100)] for n in range(2, 14)]
    found: list[bool] = []
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    try:
        _Garbage(core, found)
        for _ in range(5):
            kept.append((call(), []))
    finally:
        gc.set_threshold(*thresholds)
    return found


@pytest.mark.slow
def test_python_finalizers_run_without_lock_of_core() -> None:
    """Creating lists and tuples in the core may run finalizers of the program."""
    weight = vector(True)
    found: dict[str, list[bool]] = {}

    def look(driver: Any, *names: str, handle: bool = True, also: tuple[Any, ...] = ()) -> None:
        arguments = (driver.handle, *also) if handle else ()
        for name in names:
            call = partial(getattr(driver.core, name), *arguments)
            found[name] = _where_garbage_is_collected(driver.core, call)

    with rekindle.budget(TIGHT, learn="wait") as run:
        driver: Any = run._driver
        driver.core.list_recomputed_ops(driver.handle)
        number = driver.core.begin_recording(driver.handle, False)
        deeper(weight, 30).sum().backward()
        look(driver, "signatures_seen", handle=False)
        look(driver, "recording", also=(number,))
        look(
            driver, "numbers", "backoff", "devices_used", "recomputed_ops", "in_flight", "in_place"
        )
        look(driver, "op_ids_of_step", "recording_of_step")
        driver.core.end_recording(driver.handle, number)
        driver.core.open_journal(driver.handle, 1_000)
        deeper(weight, 30).sum().backward()
        look(driver, "journal")
    with rekindle.budget(TIGHT, swap="1GiB") as run:
        look(run._driver, "swapped")
    assert {name for name, locked in found.items() if any(locked)} == set()
    assert {"journal", "numbers", "signatures_seen", "recording"} <= {*filter(found.get, found)}


# -- errors ---------------------------------------------------------------------------------------


def test_out_of_budget_raised_in_thread_has_the_public_class() -> None:
    caught: list[BaseException] = []

    def hoard() -> None:
        weight = vector(True)
        with within(TIGHT):
            try:
                kept = [weight.sin() for _ in range(30)]
                del kept
            except rekindle.OutOfBudget as error:
                caught.append(error)

    thread = threading.Thread(target=hoard)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert isinstance(caught[0], MemoryError)

    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return sum([gradient.repeat(30).view(30, -1)], gradient).sum(0)

    weight = vector(True)
    with within(TIGHT), pytest.raises(rekindle.OutOfBudget) as raised:
        Wide.apply(weight).sum().backward()
    assert raised.value.needed == 30 * VECTOR
    with within(TIGHT):  # the failed backward pass left no memory in use
        deeper(weight).sum().backward()


def test_recomputation_with_result_of_other_size_raises() -> None:
    more: list[int] = []
    with torch.library._scoped_library("rekindle_native_test", "FRAGMENT") as library:
        library.define("grows(Tensor x) -> Tensor")
        library.impl("grows", lambda x: torch.zeros(WIDTH + len(more)), "CPU")
        weight = vector(True)
        with within(TIGHT):
            x = torch.ops.rekindle_native_test.grows(weight.detach())
            loss = (weight.sin().sum() * x[:WIDTH]).square().sum() + deeper(weight, 20).sum()
            del x
            more.append(1)  # after the trial, which compares two runs
            with pytest.raises(rekindle.Unsupported, match="when it was recomputed"):
                loss.backward()


# -- memory that code outside of PyTorch writes ---------------------------------------------------


def test_numpy_buffer_is_copied_before_recomputation_needs_it() -> None:
    """The program refills a buffer. Results of its old contents are recomputed from a copy."""

    def gradient() -> Tensor:
        torch.manual_seed(20)
        buffer = np.zeros((20, 50), dtype=np.float32)
        weight = torch.rand(20, 50, requires_grad=True)
        loss = torch.zeros(())
        for number in range(5):
            buffer[:] = number
            x = torch.from_numpy(buffer) * 2
            loss = loss + (x * weight).sin().square().sum()
            del x
        loss = loss + deeper(weight, 6).sum()
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    wanted = gradient()
    with within(20 * VECTOR) as run:
        assert torch.equal(gradient(), wanted)
    assert run.recomputations > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_is_not_limited_by_budget() -> None:
    weight = vector(True)
    with within(TIGHT) as run:
        weight.sin()
        child = os.fork()
        if child == 0:
            kept = [vector() for _ in range(100)]  # more memory than the budget has
            os._exit(0 if len(kept) == 100 else 1)
        _, status = os.waitpid(child, 0)
    assert status == 0
    assert run.memory >= 0
