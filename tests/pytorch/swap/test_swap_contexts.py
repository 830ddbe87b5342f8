"""Tests of swapping beyond a single budget: graphs that outlive it, threads, forks, cleanup."""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import others_slow
from tests.pytorch.harsh import deeper, vector
from tests.pytorch.swap.test_swap import (
    VECTOR,
    check,
    gradient,
    store_of,
    swapped,
    swapping,
    ways_out,
)


def test_backward_after_budget_with_swap_matches_pytorch(tmp_path: Path) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    with swapping(tmp_path) as run:
        loss = deeper(weight, 20).sum()
    assert swapped(run).out > 0
    (got,) = torch.autograd.grad(loss, weight)
    assert torch.equal(got, wanted)
    check(run)


def test_two_backward_passes_in_thread_with_swap_match_pytorch(tmp_path: Path) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    with swapping(tmp_path) as run:
        loss = deeper(weight, 20).sum()
        (once,) = torch.autograd.grad(loss, weight, retain_graph=True)
        more = swapped(run).out
        found: list[Tensor] = []
        other = threading.Thread(
            target=lambda: found.extend(torch.autograd.grad(loss, weight, retain_graph=True))
        )
        other.start()
        other.join()
        found += torch.autograd.grad(loss, weight)
    assert all(torch.equal(got, wanted) for got in (once, *found))
    # the graph keeps its host copies, so the second pass makes none
    assert swapped(run).out <= more + 2 * VECTOR
    check(run)


def test_graph_of_earlier_swap_budget_works_after_later_one(tmp_path: Path) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    with swapping(tmp_path):
        loss = deeper(weight, 20).sum()
    with swapping(tmp_path) as run:
        got = gradient(weight)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.autograd.grad(loss, weight)[0], wanted)
    check(run)


def test_budget_garbage_collected_in_swap_does_not_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that copies may run Python's garbage collector, which then frees an old budget.

    The program waits for that thread, so freeing the budget must not wait for the program.
    """
    weight = vector(True)
    wanted = gradient(weight)
    with swapping(tmp_path) as run:
        loss = deeper(weight, 20).sum()
    gc.disable()
    try:
        cycle: list[object] = [run, loss]
        cycle.append(cycle)
        del run, loss, cycle
        write, collected = os.pwrite, list[int]()

        def collecting(*arguments: Any) -> int:
            if not collected:
                collected.append(gc.collect())
            return write(*arguments)

        monkeypatch.setattr(os, "pwrite", collecting)
        with swapping(tmp_path) as run:
            assert torch.equal(gradient(weight), wanted)
        assert collected
        check(run)
    finally:
        gc.enable()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing says which files are open")
def test_ended_swap_budget_leaves_no_file_or_thread(tmp_path: Path) -> None:
    """No file or thread is left even after an exception, and after the graph was deleted."""

    class Bang(Exception):
        pass

    def fail() -> None:
        with swapping(tmp_path):
            deeper(weight, 20).sum()
            raise Bang

    weight = vector(True)
    gradient(weight)
    gc.collect()
    before, threads = _open_files(), threading.active_count()
    for _ in range(3):
        with swapping(tmp_path) as run:
            gradient(weight)
            assert swapped(run).out > 0
            loss = deeper(weight, 20).sum()
        assert store_of(run).used > 0
        del loss
        assert run.memory <= 3 * VECTOR
        assert store_of(run).used == 0
        check(run)
        del run
        with pytest.raises(Bang):
            fail()
        gc.collect()  # a traceback is a reference cycle; threads end without being joined
        deadline = time.monotonic() + 10
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.001)
        assert _open_files() == before
        assert threading.active_count() <= threads
    assert list(tmp_path.iterdir()) == []


def test_value_being_copied_as_budget_ends_dies_with_its_tensor(tmp_path: Path) -> None:
    """A copy in progress, made ahead of an eviction, holds the memory that it reads."""
    with swapping(tmp_path, 3 * VECTOR, evict="anything") as run:
        values = [vector(), vector()]
        assert ways_out(run)
    check(run)
    del values
    assert run.memory == 0


@pytest.mark.parametrize("when", others_slow(["being written", "written", "just about to be done"]))
def test_forked_child_recomputes_swapped_values(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child does not have the threads that copy, so it recomputes swapped values.

    A lock that such a thread held at the time of the fork stays locked in the child.
    """
    write = os.pwrite

    def slow(*arguments: Any) -> int:
        time.sleep(0.1)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    weight = vector(True)
    wanted = gradient(weight)
    with swapping(tmp_path) as run:
        loss = deeper(weight, 20).sum()
        assert swapped(run).out > 0
        last = ways_out(run)[-1]
        assert not last.ended()
        condition = last._future._condition
        while when == "written" and not last.ended():
            time.sleep(0.01)
        if when == "just about to be done":
            thread = threading.Thread(target=condition.acquire)
            thread.start()
            thread.join()
        child = os.fork()
        if not child:
            good = False
            try:
                faulthandler.dump_traceback_later(60, exit=True)  # the lock is never released
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    (got,) = torch.autograd.grad(loss, weight)
                reported = any("before a fork" in str(each.message) for each in seen)
                good = reported and torch.equal(got, wanted)
            finally:  # otherwise the child would run the remaining tests
                os._exit(not good)
        assert os.waitpid(child, 0)[1] == 0
        if when == "just about to be done":
            condition._lock._release_save()  # releases the lock, whichever thread holds it
        (got,) = torch.autograd.grad(loss, weight)
    assert torch.equal(got, wanted)
    check(run)
