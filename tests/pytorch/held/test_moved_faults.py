"""Tests of moved state in programs with threads, errors and freed values."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.swap._host_store import Copies
from tests.pytorch.bits import differing, everything
from tests.pytorch.cores import fixed_prices
from tests.pytorch.held.test_moved_state import LARGEST, WIDTH, Task, moving
from tests.pytorch.swap.test_swap_faults import failing
from tests.pytorch.tracker import Tracker


def in_thread(act: Callable[[], object]) -> None:
    """Run `act` in another thread, and raise its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_process_ends_normally_after_error_in_backward() -> None:
    """Autograd still refers to saved values then, which the process frees after Python's end."""
    program = """
import torch, rekindle
from torch import nn

def fail(weight):
    raise ValueError("in a hook")

model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
model[3][0].weight.register_post_accumulate_grad_hook(fail)
swap = rekindle.policies.Swap(only=True)
with rekindle.budget(6 * 4 * 64 * 64, evict="anything", swap=swap):
    model(torch.randn(64, 64)).sum().backward()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "ValueError: in a hook" in done.stderr


@pytest.mark.parametrize("budget", [13_000, 14_500, 16_000])
def test_copy_for_undo_out_of_budget_leaves_weights(budget: int, tmp_path: Path) -> None:
    """What is recomputed from a weight, before the weight is copied, takes the weight's room."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=3)
    batch, target = torch.randn(1, 8, 32), torch.randn(1, 8, 32)
    before = everything(model.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch), target)
        loss.backward()
        return loss

    with fixed_prices(), pytest.raises(rekindle.OutOfBudget), moving(tmp_path, budget):
        optimizer.step(closure)
    assert differing(everything(model.state_dict()), before) == []


def test_value_freed_during_copy_of_another_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector or another thread may free it. The store is not full for that."""
    with moving(tmp_path, 8 * LARGEST) as run, rekindle.never_recompute():
        run._driver.core.disable_for_tests(run._driver.handle, "ahead")
        values = [torch.randn(WIDTH, WIDTH) for _ in range(7)]
        write = Copies.write

        def freeing(copies: Copies, *args: Any) -> bool:
            del values[1:]
            return write(copies, *args)

        monkeypatch.setattr(Copies, "write", freeing)
        values.append(torch.zeros(4 * WIDTH, WIDTH))  # needs the room of three values
        more = [torch.full((WIDTH, WIDTH), float(i)) for i in range(20)]
        assert run.peak <= run.budget
        run._driver.engine.check()
    assert all(bool((each == i).all()) for i, each in enumerate(more))


def test_step_of_one_thread_exceeds_budget_alone(tmp_path: Path) -> None:
    def too_much() -> Tensor:
        return torch.zeros(8 * WIDTH, WIDTH)

    with moving(tmp_path, 4 * LARGEST) as run:
        driver = run._driver

        def stepped() -> None:
            with pytest.raises(rekindle.OutOfBudget):
                too_much()
            driver.stepping(True, undone=False)
            driver.stepping(False)

        driver.stepping(True, undone=False)
        in_thread(stepped)
        too_much()
        driver.stepping(False)
        with pytest.raises(rekindle.OutOfBudget):
            too_much()


@pytest.mark.parametrize("name", ["write", "read", "wait", "release"])
def test_interrupt_during_copy_loses_no_weight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, original = Task(), getattr(Copies, name)
    wanted = everything(task.model.state_dict())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def passes() -> None:
        for _ in range(3):
            task.model.zero_grad()
            task.model(task.batch).sum().backward()

    def interrupted(copies: Copies, *args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return original(copies, *args)

    try:
        with moving(tmp_path, 4 * LARGEST) as run:
            task.model(task.batch)
            monkeypatch.setattr(Copies, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                passes()
            monkeypatch.undo()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            run._driver.engine.check()
            got = everything(task.model.state_dict())
    finally:
        signal.signal(signal.SIGINT, before)
    assert differing(got, wanted) == []


def test_outdated_copy_that_cannot_be_written_again_keeps_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value stays in memory, and counts. So there is an error, and nothing is lost."""
    tensors = [torch.full((WIDTH, WIDTH), float(i)) for i in range(12)]
    with Tracker(resized=True) as tracker, moving(tmp_path, 6 * LARGEST):
        for tensor in tensors:
            tensor.add_(1)
            torch.autograd.graph.increment_version(tensor)
        monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC))
        with pytest.raises(rekindle.OutOfBudget, match="No space left on device"):
            torch.stack(tensors[:5])
        assert tracker.peak <= 6 * LARGEST
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors))
