"""Tests of threads: a thread that starts inside a budget counts its memory in that budget."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_in_any_mode_without_ignore_compile_internals,
)
from torch.utils.flop_counter import FlopCounterMode

import rekindle
from rekindle.pytorch.native import is_seen
from tests.pytorch.bits import differing
from tests.pytorch.tracker import measure

MODES = ["saved", "anything"]
Evict = Literal["saved", "anything"]


class Program:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(8) for part in (nn.Linear(32, 32), nn.GELU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.01)
        self.batch = torch.randn(64, 32)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def steps(self) -> None:
        for _ in range(4):
            self.step()

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in state.items()}
        return found


def in_a_thread(work: Callable[[], object]) -> list[BaseException]:
    """Run `work` in a thread to its end. Return a list with its error, empty if it raised none."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised


@pytest.mark.parametrize("evict", MODES)
def test_thread_started_inside_budget_trains_within_it(evict: Evict) -> None:
    plain, ours = Program(), Program()
    budget = measure(plain.steps).budget(0.5)
    with rekindle.budget(budget, evict=evict) as run:
        assert in_a_thread(ours.steps) == []
    assert run.recomputations > 10
    assert budget // 2 < run.peak <= budget
    assert differing(ours.state(), plain.state()) == []
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("evict", MODES)
def test_too_small_budget_raises_out_of_budget_in_thread(evict: Evict) -> None:
    ours = Program()
    before = {name: value.clone() for name, value in ours.state().items()}
    with rekindle.budget(40_000, evict=evict):
        (error,) = in_a_thread(ours.steps)
    assert isinstance(error, rekindle.OutOfBudget)
    assert differing(ours.state(), before) == []


@pytest.mark.parametrize("evict", MODES)
def test_several_threads_train_within_one_budget(evict: Evict) -> None:
    """Each thread trains its own model; together they stay within the budget."""
    programs = [Program() for _ in range(3)]
    alone = Program()
    alone.steps()
    with rekindle.budget(3 * 300_000, evict=evict) as run:
        threads = [threading.Thread(target=each.steps) for each in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        run._driver.engine.check()
    assert run.peak <= 3 * 300_000
    for program in programs:
        assert differing(program.state(), alone.state()) == []


def test_thread_started_before_budget_is_not_limited_by_it() -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(60)
        torch.ones(100_000).exp()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with rekindle.budget(1_000) as run:
        go.set()
        assert done.wait(60)
    thread.join()
    assert run.peak == 0


@pytest.mark.parametrize("evict", MODES)
def test_thread_started_by_thread_of_budget_is_inside_budget(evict: Evict) -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(is_seen())

    def twice() -> None:
        look()
        assert in_a_thread(look) == []

    with rekindle.budget("1GiB", evict=evict):
        assert in_a_thread(twice) == []
        with ThreadPoolExecutor(1) as pool:
            pool.submit(look).result()
    assert in_a_thread(look) == []
    assert seen == [True, True, True, False]


@pytest.mark.parametrize("evict", MODES)
def test_thread_that_outlives_budget_is_not_limited_afterwards(evict: Evict) -> None:
    """The thread does not keep the budget alive. Autograd can read what the thread saved before."""
    plain, ours = Program(), Program()
    plain.steps()
    losses: list[Tensor] = []
    with ThreadPoolExecutor(1) as pool:
        with rekindle.budget("1GiB", evict=evict) as run:
            pool.submit(ours.step).result()
            pool.submit(lambda: losses.append(ours.model(ours.batch).square().mean())).result()
        before = run.memory
        driver = weakref.ref(run._driver)
        ours.optimizer.zero_grad()
        pool.submit(losses.pop().backward).result()
        pool.submit(ours.optimizer.step).result()
        pool.submit(ours.step).result()
        hoard = pool.submit(lambda: torch.ones(100_000).exp()).result()
        assert run.memory <= before
        del run, hoard
        gc.collect()
        assert driver() is None
        pool.submit(ours.step).result()
    assert differing(ours.state(), plain.state()) == []


def test_thread_of_ended_budget_is_not_limited_by_next_budget() -> None:
    with ThreadPoolExecutor(1) as pool:
        with rekindle.budget("1GiB"):
            pool.submit(lambda: torch.ones(10).exp()).result()
        with rekindle.budget(1_000) as run:
            hoard = pool.submit(lambda: torch.ones(100_000).exp()).result()
            assert run.peak == 0
            pool.submit(lambda: torch.ones(10, requires_grad=True).exp().sum().backward()).result()
            assert run.peak == 0
        del hoard


@torch.library.custom_op("test_threads::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Return twice `x`, computed in a new thread."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x * 2), daemon=True)
    thread.start()
    thread.join(20)
    assert found, "the thread waits for the operator, and the operator for the thread"
    return found[0]


@pytest.mark.parametrize("evict", MODES)
def test_operator_that_waits_for_thread_does_not_deadlock(evict: Evict) -> None:
    with rekindle.budget("1GiB", evict=evict):
        assert twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_own_swap_threads_of_rekindle_are_outside_of_budget() -> None:
    plain, ours = Program(), Program()
    budget = measure(plain.steps).budget(0.5)
    swap = rekindle.policies.Swap(host=1 << 30, only=True)
    with rekindle.budget(budget, swap=swap) as run:
        ours.steps()
    assert run.report().swapped is not None
    assert differing(ours.state(), plain.state()) == []


def test_threading_thread_class_is_restored_after_error() -> None:
    before = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), rekindle.budget("1GiB"):
        _ = 1 / 0
    assert (threading.Thread.start, threading.Thread._bootstrap_inner) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("evict", MODES)
def test_ended_dispatch_mode_is_inactive_despite_running_thread(evict: Evict) -> None:
    """If PyTorch's flag of an active mode stayed set, torch.compile would compile at every call."""
    go_on, began = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        go_on.wait(10)

    with rekindle.budget("1GiB", evict=evict):
        with FlopCounterMode(display=False):
            assert is_in_any_mode_without_ignore_compile_internals()
            thread = threading.Thread(target=run)
            thread.start()
            assert began.wait(10)
        go_on.set()
        thread.join()
        assert not is_in_any_mode_without_ignore_compile_internals()


@pytest.mark.parametrize("works", [False, True])
def test_report_with_second_thread_lists_memory_by_category(works: bool) -> None:
    """The report has categories, because the other thread does not train.

    The other thread prepares batches if `works`. Otherwise it only waits, like a progress bar.
    """
    over = threading.Event()

    def beside() -> None:
        while works and not over.is_set():
            torch.ones(2_000).exp()
        over.wait(60)

    program = Program()
    with rekindle.budget(None) as run:
        thread = threading.Thread(target=beside)
        thread.start()
        program.steps()
        over.set()
        thread.join(60)
    table = run.report().at_peak.categories
    weights = sum(each.nbytes for each in program.model.parameters())
    assert table["parameters"] == weights
    assert table["saved for backward"] > 0
    assert sum(table.values()) == run.report().at_peak.memory > 0.9 * run.peak


def test_out_of_budget_with_second_thread_lists_categories() -> None:
    over, program = threading.Event(), Program()
    with rekindle.budget(60_000) as _:
        thread = threading.Thread(target=over.wait, args=(60,))
        thread.start()
        with pytest.raises(rekindle.OutOfBudget) as caught:
            program.steps()
        over.set()
        thread.join(60)
    assert caught.value.held["parameters"] > 0
    assert "parameters" in str(caught.value)


def test_report_after_training_in_thread_lists_no_categories() -> None:
    """While Rekindle reads gradients, the thread that trains may free them. So it reads none."""
    inside, outside = Program(), Program()
    with rekindle.budget(None) as run:
        assert in_a_thread(inside.steps) == []
        outside.steps()
        assert run._driver.snapshot().categories == {}
    assert run.report().at_peak.categories == {}
    with rekindle.budget(None) as run:
        outside.steps()
    assert run.report().at_peak.categories["parameters"] > 0
