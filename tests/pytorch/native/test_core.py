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


def test_snapshot_with_several_threads_reads_no_gradients() -> None:
    """Plain PyTorch may free a gradient while another thread reads it: only a total is given."""

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


# -- what it counts -------------------------------------------------------------------------------


def test_the_allocator_agrees() -> None:
    """Judged by the allocator's own events: nothing else that the step allocates is of any size."""
    weight = vector(True)
    deeper(weight, 30).sum().backward()  # PyTorch itself allocates the first time
    weight.grad = None

    def step() -> None:
        with within(TIGHT) as run:
            deeper(weight, 30).sum().backward()
        assert run.recomputations > 20

    step()
    weight.grad = None
    assert allocated(step).peak <= TIGHT + VECTOR // 4


def test_compute_and_recompute_times_are_counted() -> None:
    with within(TIGHT) as run:
        deeper(vector(True), 30).sum().backward()
    assert run.compute_ns > 0
    assert run.recompute_ns > 0
    assert 10 * VECTOR < run.peak <= TIGHT


def test_bookkeeping_is_small_and_flat() -> None:
    """Per recorded operator; over steps nothing is left."""
    weight = vector(True)
    with unlimited() as run:
        others = numbers(run).bookkeeping  # of graphs that other tests left
        loss = deeper(weight, 500).sum()
        assert numbers(run).bookkeeping - others <= 428 * 2_000
        del loss
        deeper(weight, 8).sum().backward()
        gc.collect()
        before = numbers(run).alive
        for _ in range(200):
            weight.grad = None
            deeper(weight, 8).sum().backward()
        assert numbers(run).alive <= before


def test_the_same_events_lead_to_the_same_decisions() -> None:
    """With equal prices the journals of two runs are equal, entry by entry."""

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
        journal()  # signatures are known from then on
        first = journal()
        assert len(first) > 500
        assert journal() == first


class _Garbage:
    """Garbage in a cycle. Its finalizer notes if the core's lock is held, and makes more of it."""

    def __init__(self, core: Any, found: list[bool]) -> None:
        self._itself = self
        self._core, self._found = core, found

    def __del__(self) -> None:
        if gc.get_threshold()[0] == 1:
            self._found.append(self._core.has_lock())
            _Garbage(self._core, self._found)


def _where_garbage_is_collected(core: Any, call: Callable[[], object]) -> list[bool]:
    """Call `call` while nearly each new container collects garbage; tell where that held the lock.

    Lists and tuples that Python keeps to use again are used up first: they collect nothing.
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
def test_finalizers_run_without_the_core_s_lock() -> None:
    """Where the core makes lists and tuples; Python then may collect garbage of the program."""
    weight = vector(True)
    found: dict[str, list[bool]] = {}

    def look(driver: Any, *names: str, handle: bool = True, also: tuple[Any, ...] = ()) -> None:
        arguments = (driver.handle, *also) if handle else ()
        for name in names:
            call = partial(getattr(driver.core, name), *arguments)
            found[name] = _where_garbage_is_collected(driver.core, call)

    with rekindle.budget(TIGHT, learn="wait") as run:
        driver: Any = run._driver
        driver.core.count_again(driver.handle)
        number = driver.core.write_down(driver.handle, False)
        deeper(weight, 30).sum().backward()
        look(driver, "seen", handle=False)
        look(driver, "written_down", also=(number,))
        look(driver, "numbers", "shortfall", "devices_met", "again", "in_flight", "in_place")
        look(driver, "met_in_step", "written_in_step")
        driver.core.write_no_more(driver.handle, number)
        driver.core.open_journal(driver.handle, 1_000)
        deeper(weight, 30).sum().backward()
        look(driver, "journal")
    with rekindle.budget(TIGHT, swap="1GiB") as run:
        look(run._driver, "swapped")
    assert {name for name, locked in found.items() if any(locked)} == set()
    assert {"journal", "numbers", "seen", "written_down"} <= {*filter(found.get, found)}


# -- errors ---------------------------------------------------------------------------------------


def test_out_of_budget_has_one_class_in_threads_and_backward() -> None:
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
    with within(TIGHT):  # nothing stays
        deeper(weight).sum().backward()


def test_recomputation_with_other_results_is_refused() -> None:
    sizes = iter([WIDTH, WIDTH + 1, WIDTH + 2])
    with torch.library._scoped_library("rekindle_native_test", "FRAGMENT") as library:
        library.define("grows(Tensor x) -> Tensor")
        library.impl("grows", lambda x: torch.zeros(next(sizes)), "CompositeExplicitAutograd")
        weight = vector(True)
        with within(TIGHT):
            x = torch.ops.rekindle_native_test.grows(weight.detach())
            loss = (weight.sin().sum() * x[:WIDTH]).square().sum() + deeper(weight, 20).sum()
            del x
            with pytest.raises(rekindle.Unsupported, match="when it ran again"):
                loss.backward()


# -- memory that others write ---------------------------------------------------------------------


def test_memory_of_numpy_s_is_never_read_again() -> None:
    """A buffer that is filled again and again; what was made of it first is kept."""

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
def test_a_forked_process_is_outside() -> None:
    weight = vector(True)
    with within(TIGHT) as run:
        weight.sin()
        child = os.fork()
        if child == 0:
            kept = [vector() for _ in range(100)]  # more than the budget
            os._exit(0 if len(kept) == 100 else 1)
        _, status = os.waitpid(child, 0)
    assert status == 0
    assert run.memory >= 0
