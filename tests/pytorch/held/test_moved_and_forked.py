"""Tests of a process that forks while weights and state are in a file.

With `evict="anything"` and `swap=`, the child reads right values, or gets an error that says what
to do. The parent's file stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rekindle
from tests.pytorch.bits import differing, everything, threads_set
from tests.pytorch.held.placeholders import empty, is_empty
from tests.pytorch.native.test_forks import forked
from tests.pytorch.sweep import _everything

WIDTH, LAYERS = 128, 6

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def moving(tmp_path: Path, budget: int = 9 * 4 * WIDTH * WIDTH) -> rekindle.budget:
    return rekindle.budget(budget, evict="anything", swap="1GiB", swap_directory=tmp_path)


class Task:
    """A network, its optimizer, and a batch. It makes steps."""

    def __init__(self) -> None:
        torch.manual_seed(20)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(8, WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def after(steps: int) -> Task:
    task = Task()
    for _ in range(steps):
        task.step()
    return task


def weights(task: Task) -> dict[str, Any]:
    return everything(task.model.state_dict())


def said_by(child: Callable[[], object], tmp_path: Path) -> str:
    """Fork, run `child`, and return what it returned or raised, as text."""
    path = tmp_path / "said"

    def saying() -> int:
        with threads_set(1):
            try:
                said = str(child())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            path.write_text(said)
            return 0

    assert forked(saying) == 0
    return path.read_text()


def weights_read_by_python(task: Task) -> list[Any]:
    return [each.tolist() for each in task.model.parameters()]


def weights_saved(task: Task, path: Path) -> dict[str, Any]:
    torch.save(task.model.state_dict(), path)
    return everything(torch.load(path))


@pytest.mark.parametrize("saves", [False, True])
def test_forked_child_reads_moved_weights_as_at_the_fork(saves: bool, tmp_path: Path) -> None:
    plain, task = after(2), Task()
    wanted, lists = weights(plain), weights_read_by_python(plain)

    def read() -> bool:
        if saves:
            return differing(weights_saved(task, tmp_path / "weights"), wanted) == []
        # afterwards the values are in memory, also for operators
        return weights_read_by_python(task) == lists and bool(task.model[0].weight.sum().item())

    with moving(tmp_path) as run:
        for _ in range(2):
            task.step()
        _everything.evict_all(run)
        assert empty(task.model.parameters()) >= LAYERS
        assert said_by(read, tmp_path) == "True"
        task.step()
    assert differing(weights(task), weights(after(3))) == []


def test_forked_child_that_reads_a_weight_evicts_no_other(tmp_path: Path) -> None:
    """A budget in the child would evict what is in memory, for the weight that is read."""
    task = Task()

    def read() -> list[bool]:
        task.model[0].weight.tolist()
        return [is_empty(each) for each in here]

    with moving(tmp_path, 7 * 4 * WIDTH * WIDTH) as run:
        task.step()
        _everything.evict_all(run)
        here = list(task.model.parameters())[4:]
        for each in here:
            each.sum()
        assert empty(here) == 0
        assert run.memory > run.budget / 2  # type: ignore[operator]
        assert said_by(read, tmp_path) == str([False] * len(here))


@pytest.mark.parametrize("operator", [torch.sum, torch.zero_, lambda weight: weight @ weight])
def test_operator_of_child_on_moved_weight_names_the_fork(
    operator: Callable[[Tensor], object], tmp_path: Path
) -> None:
    task = Task()
    with moving(tmp_path) as run:
        task.step()
        _everything.evict_all(run)
        weight = task.model[0].weight.detach()
        said = said_by(lambda: operator(weight), tmp_path)
        assert "before this process was forked" in said
        assert "run.keep(tensor)" in said
        wanted = task.model[0].weight.sum()
        assert torch.equal(task.model[0].weight.sum(), wanted)


def test_weight_that_parent_wrote_meanwhile_raises_in_child(tmp_path: Path) -> None:
    """The child reads the file later than the parent has written other values there."""
    task = Task()
    ready, goes_on = os.pipe(), os.pipe()

    def read_late() -> list[Any]:
        os.write(ready[1], b"1")
        os.read(goes_on[0], 1)
        return weights_read_by_python(task)

    with moving(tmp_path) as run:
        for _ in range(2):
            task.step()
        _everything.evict_all(run)
        path = tmp_path / "said"
        pid = os.fork()
        if pid == 0:
            try:
                path.write_text(str(read_late()))
            except BaseException as error:
                path.write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        os.read(ready[0], 1)
        for _ in range(2):
            task.step()
        _everything.evict_all(run)
        os.write(goes_on[1], b"1")
        os.waitpid(pid, 0)
    said = path.read_text()
    assert "SwapFailed" in said
    assert "the parent process has written" in said
    assert "run.keep(tensor)" in said
    assert "load a checkpoint" not in said
    assert differing(weights(task), weights(after(4))) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_data_loader_read_dataset_that_had_moved(tmp_path: Path) -> None:
    data, task = torch.randn(64, WIDTH), Task()
    wanted = data.clone()
    loader = DataLoader(TensorDataset(data), batch_size=16, num_workers=2)
    with moving(tmp_path) as run:
        data.sum()  # the budget counts the data from here on
        for _ in range(2):
            task.step()
            _everything.evict_all(run)
            assert is_empty(data)
            read = [batch for (batch,) in loader]
            assert torch.equal(torch.cat(read), wanted)
        assert run.peak <= run.budget  # type: ignore[operator]


def test_fork_brings_only_part_of_data_into_memory(tmp_path: Path) -> None:
    """What does not fit into half of the budget stays in the file; the child gets an error."""
    data = [torch.randn(WIDTH, WIDTH) for _ in range(12)]
    wanted = [each.sum().item() for each in data]

    def read() -> list[bool]:
        return [
            is_empty(each) or each.sum().item() == want
            for each, want in zip(data, wanted, strict=True)
        ]

    with moving(tmp_path) as run:
        for each in data:
            each.sum()
        _everything.evict_all(run)
        assert said_by(read, tmp_path) == str([True] * len(data))
        assert 2 <= len(data) - empty(data) <= 5
        assert run.peak <= run.budget  # type: ignore[operator]
