"""Tests of `evict="anything"` with `swap=`: weights, gradients and optimizer state move to a file.

They come back before anything reads or writes them, so all results equal those of plain PyTorch.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

import rekindle
from rekindle import Run
from tests.helpers import others_slow
from tests.pytorch.bits import differing, everything, threads_set
from tests.pytorch.cores import evicting_before_every_operator
from tests.pytorch.held.placeholders import empty, is_empty
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.online.write_routes import ROUTES
from tests.pytorch.swap.test_swap_faults import failing
from tests.pytorch.sweep import _everything
from tests.pytorch.sweep.optimizers import Training, entries
from tests.pytorch.test_models import left_by, plainly, train

WIDTH, LAYERS = 128, 12
LARGEST = 4 * WIDTH * WIDTH  #: bytes of a weight
TIGHT = 9 * LARGEST  #: a budget of 0.19 of the weights, gradients and state of Adam


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threads_set(1):
        yield


def moving(tmp_path: Path, budget: int = TIGHT, **options: Any) -> rekindle.budget:
    options = {"swap": "1GiB", **options}
    return rekindle.budget(budget, evict="anything", swap_directory=tmp_path, **options)


class Task:
    """A network of layers of equal size, its optimizer, and a batch."""

    def __init__(self, kind: Callable[..., Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(20)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.optimizer = kind(self.model.parameters(), **options)
        self.batch = torch.randn(8, WIDTH)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()
        return loss.detach()

    def left(self) -> dict[str, Any]:
        return everything((self.model, self.optimizer))


def after(steps: int) -> dict[str, Any]:
    """Return weights, gradients and state after some steps in plain PyTorch."""
    task = Task()
    for _ in range(steps):
        task.step()
    return task.left()


def stepped(task: Task, kept: list[dict[str, Any]]) -> list[int]:
    """Return after which numbers of steps the weights were those of `task`."""
    now = everything(task.model.state_dict())
    return [number for number, each in enumerate(kept) if not differing(now, each)]


def weights_after_each_step(steps: int) -> list[dict[str, Any]]:
    task, kept = Task(), []
    for _ in range(steps + 1):
        kept.append(everything(task.model.state_dict()))
        task.step()
    return kept


def host_bytes(run: Run) -> tuple[int, int]:
    """Return the bytes swapped out and in."""
    host = run._driver.engine.host
    assert host is not None
    return host.swapped_out, host.swapped_in


# -- how small a budget can be ---------------------------------------------------------------------


def test_training_fits_in_tenth_of_its_memory_with_moved_state(tmp_path: Path) -> None:
    class Deep(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * LAYERS)])
            self.optimizer = torch.optim.AdamW(self.model.parameters())

    def losses(task: Task) -> list[Tensor]:
        return [task.step() for _ in range(2)]

    plain, task = Deep(), Deep()
    with rekindle.budget(None) as measured:
        wanted = losses(plain)
    with moving(tmp_path, measured.peak // 10) as run:
        got = losses(task)
        assert empty(task.model.parameters()) > LAYERS
    assert run.peak <= measured.peak // 10
    assert differing(everything((got, task.left())), everything((wanted, plain.left()))) == []
    run._driver.engine.check()


def test_step_of_optimizer_has_room_of_last_backward_node(tmp_path: Path) -> None:
    """What the last node has unpacked leaves the memory for the step, once the node has run."""
    batch = torch.randn(1_024, 64)  # 256 KiB, which the first layer saves
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 512), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with moving(tmp_path, 3 * (1 << 20) + 32_000) as run:
        for _ in range(2):
            optimizer.zero_grad()
            (model[2](model[1](model[0](batch)[:64]))).sum().backward()
            optimizer.step()
    assert run.peak <= run.budget


def test_result_is_written_over_gradient_that_had_moved(tmp_path: Path) -> None:
    """To recompute what GELU saved, its gradient has to move. It comes back, and is overwritten."""

    def trained(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(1_024, 128, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return everything(model)

    def model() -> nn.Module:
        torch.manual_seed(20)
        return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))

    wanted = trained(model())
    hidden = 4 * 1_024 * 256
    with moving(tmp_path, 2 * hidden + (400 << 10)) as run:
        got = trained(model())
    assert run.peak <= run.budget < 3 * hidden
    assert differing(got, wanted) == []


def test_training_without_swap_needs_weights_and_state_at_once() -> None:
    task = Task()
    with rekindle.budget(TIGHT, evict="anything"), pytest.raises(rekindle.OutOfBudget):
        task.step()


def test_unchanged_weights_are_written_to_file_only_once(tmp_path: Path) -> None:
    task = Task()
    with torch.no_grad():
        wanted = task.model(task.batch)
    with moving(tmp_path, 4 * LARGEST) as run, torch.no_grad():
        for _ in range(5):
            assert torch.equal(task.model(task.batch), wanted)
        out, back = host_bytes(run)
    weights = LAYERS * (LARGEST + 4 * WIDTH)
    assert out < 1.5 * weights
    assert back > 2 * weights


def test_state_that_fits_is_not_moved(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path, 100 * LARGEST) as run:
        task.step()
        assert run.evictions == 0
    assert host_bytes(run) == (0, 0)


# -- equal results ---------------------------------------------------------------------------------


def optimizers() -> list[Training]:
    """Return each optimizer of PyTorch with some of its options, in each implementation."""
    return [case for cases in entries().values() for case in cases(2)]  # type: ignore[misc]


@pytest.mark.parametrize("case", others_slow(optimizers()), ids=str)
def test_optimizer_with_all_state_moved_matches_pytorch(case: Training, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        try:
            wanted = everything(case.trained()())
        except Exception as error:
            pytest.skip(f"plain PyTorch refuses this: {error}")
        step = case.trained()
        with evicting_before_every_operator(), moving(tmp_path, 1 << 30) as run:
            got = everything(step())
    assert differing(got, wanted) == []
    assert host_bytes(run)[0] > 0
    run._driver.engine.check()


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_lists_of_optimizer_run_in_parts_within_budget(
    kind: Callable[..., Optimizer], options: dict[str, bool], tmp_path: Path
) -> None:
    plain, task = (Task(kind, lr=0.01, **options) for _ in range(2))
    wanted = [plain.step() for _ in range(3)]
    with moving(tmp_path) as run:
        got = [task.step() for _ in range(3)]
    assert run.peak <= TIGHT
    assert differing(everything((got, task.left())), everything((wanted, plain.left()))) == []


def test_list_whose_last_tensor_has_all_bytes_runs_as_a_whole(tmp_path: Path) -> None:
    large = torch.rand(TIGHT // 4 * 2 // 3)
    expected = large * 2
    with moving(tmp_path):
        torch._foreach_mul_([torch.empty(0), torch.empty(0), large], 2)
    assert torch.equal(large, expected)


def test_step_of_unknown_optimizer_with_moved_state_is_equal(tmp_path: Path) -> None:
    class Momentum(torch.optim.SGD):
        """An optimizer that Rekindle does not know, so that its steps are undone if they fail."""

    plain, task = (Task(Momentum, lr=0.1, momentum=0.9) for _ in range(2))
    wanted = [plain.step() for _ in range(2)]
    with moving(tmp_path) as run:
        got = [task.step() for _ in range(2)]
    assert run.peak <= TIGHT
    assert differing(everything((got, task.left())), everything((wanted, plain.left()))) == []


@pytest.mark.parametrize("case", others_slow(ALL_CASES), ids=lambda case: case.name)
def test_sample_model_with_everything_moved_matches_pytorch(case: Case, tmp_path: Path) -> None:
    workload = case.build()
    with evicting_before_every_operator(), moving(tmp_path, 1 << 30) as run:
        losses = train(workload)
    assert differing(left_by(workload, losses), plainly(case).outcome) == []
    assert host_bytes(run)[0] > 0
    run._driver.engine.check()


# -- readers and writers ---------------------------------------------------------------------------


def read_by(tensor: Tensor) -> Iterator[Any]:
    """Read a tensor in many ways."""
    yield tensor.sum().item()
    yield tensor.tolist()
    yield repr(tensor)
    yield tensor.detach().numpy().copy()
    yield torch.utils.dlpack.from_dlpack(tensor.detach()).clone()
    yield bytes(tensor.detach().untyped_storage())


@pytest.mark.parametrize("way", range(6))
def test_moved_weight_is_read_in_any_way_as_in_pytorch(way: int, tmp_path: Path) -> None:
    def read(tensor: Tensor) -> Any:
        return next(value for index, value in enumerate(read_by(tensor)) if index == way)

    torch.manual_seed(20)
    wanted = read(torch.randn(40, 40).requires_grad_())
    torch.manual_seed(20)
    weight = torch.randn(40, 40).requires_grad_()
    with moving(tmp_path, 1 << 30) as run:
        weight.sum()
        _everything.evict_all(run)
        assert is_empty(weight)
        got = read(weight)
    assert np.array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize("name", ROUTES)
def test_source_written_between_two_moves_matches_pytorch(name: str, tmp_path: Path) -> None:
    """The copy in the file is outdated after a write, by whatever route, and is not used again."""

    def program(evict: Callable[[], None]) -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.randn(2_000)
        seen = [(x * 2).sum()]
        evict()
        seen.append((x * 3).sum())  # in memory again, beside its copy
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            ROUTES[name](x)
        evict()
        seen.append((x * 5).sum())
        evict()
        return [*seen, x]

    wanted = everything(program(lambda: None))
    with moving(tmp_path, 1 << 30) as run:
        got = program(lambda: _everything.evict_all(run))
    assert differing(everything(got), wanted) == []


def test_weight_saved_and_loaded_while_moved_has_equal_bits(tmp_path: Path) -> None:
    plain, task = Task(), Task()
    plain.step()
    # `torch.save` keeps in memory what it saves
    with moving(tmp_path, 60 * LARGEST) as run:
        task.step()
        _everything.evict_all(run)
        assert empty(task.model.parameters()) >= LAYERS
        torch.save((task.model.state_dict(), task.optimizer.state_dict()), tmp_path / "saved")
    again = Task()
    model, optimizer = torch.load(tmp_path / "saved")
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    assert (
        differing(everything(again.model.state_dict()), everything(plain.model.state_dict())) == []
    )
    again.step()
    plain.step()
    assert differing(again.left(), plain.left()) == []


def test_result_of_collective_is_not_moved(tmp_path: Path) -> None:
    """A thread of the collective writes the result after the operator has returned."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        name = distributed.group.WORLD.group_name  # type: ignore[union-attr]
        with moving(tmp_path, 1 << 30) as run:
            x = torch.randn(WIDTH, WIDTH)
            summed = torch.ops._c10d_functional.all_reduce(x, "sum", name)
            other = x + 1
            _everything.evict_all(run)
            assert is_empty(other)
            assert not is_empty(summed)
            torch.ops._c10d_functional.wait_tensor(summed)
            _everything.evict_all(run)
            assert not is_empty(summed)
    finally:
        distributed.destroy_process_group()
    assert torch.equal(summed, x)


def test_kept_weight_is_not_moved(tmp_path: Path) -> None:
    task = Task()
    kept, *others = task.model.parameters()
    with moving(tmp_path, 1 << 30) as run:
        task.step()
        run.keep(kept)
        _everything.evict_all(run)
        assert not is_empty(kept)
        assert empty(others) == LAYERS - 1


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [0, 5, 20, 40, 60, 100, 200])
@pytest.mark.filterwarnings("ignore:swapping")
def test_full_disk_leaves_weights_of_before_or_after_step(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, task = weights_after_each_step(3), Task()
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC, after=writes))
    with moving(tmp_path), suppress(rekindle.OutOfBudget):
        for _ in range(3):
            task.step()
    assert len(stepped(task, kept)) == 1


@pytest.mark.parametrize("blocks", [0, 5, 20, 40, 60])
@pytest.mark.filterwarnings("ignore:swapping")
def test_full_host_leaves_weights_of_before_or_after_step(blocks: int, tmp_path: Path) -> None:
    kept, task = weights_after_each_step(2), Task()
    with moving(tmp_path, swap=blocks * LARGEST + 4096), suppress(rekindle.OutOfBudget):
        for _ in range(2):
            task.step()
    assert len(stepped(task, kept)) == 1


def test_budget_too_small_for_largest_weight_changes_no_weight(tmp_path: Path) -> None:
    kept, task = weights_after_each_step(1), Task()
    with moving(tmp_path, 5 * LARGEST), pytest.raises(rekindle.OutOfBudget, match=r"AdamW\.step"):
        task.step()
    assert stepped(task, kept) == [0]


@pytest.mark.parametrize("reads", [0, 3, 17, 30])
@pytest.mark.filterwarnings("ignore:swapping")
def test_lost_weight_raises_each_time_it_is_read(
    reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task()
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO, after=reads))
    with (
        pytest.raises(rekindle.SwapFailed, match=r"reads it again.*load a checkpoint"),
        moving(tmp_path),
    ):
        task.step()
    monkeypatch.undo()
    lost = [each for each in task.model.parameters() if is_empty(each)]
    for each in lost:
        with pytest.raises(RuntimeError, match="evicted by rekindle"):
            each.sum()
    wanted = dict(Task().model.named_parameters())
    for name, each in task.model.named_parameters():
        if not is_empty(each):
            assert torch.equal(each, wanted[name])


@pytest.mark.parametrize("reads", [0, 3, 17, 30])
@pytest.mark.filterwarnings("ignore:swapping")
def test_read_that_fails_once_loses_no_weight(
    reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, task = weights_after_each_step(2), Task()
    # The read of a value that can be recomputed may fail without an error.
    with suppress(rekindle.SwapFailed), moving(tmp_path):  # measures how fast the disk is
        once = failing(os.preadv, errno.EIO, after=reads, times=1)
        monkeypatch.setattr(os, "preadv", once)
        for _ in range(2):
            task.step()
    assert len(stepped(task, kept)) == 1


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["record", "learn"])
def test_recording_while_state_moves_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(rekindle.Unsupported, match=rf"Leave out {option}="):
        moving(tmp_path, **{option: True})


def test_trace_begun_while_state_moves_is_refused(tmp_path: Path) -> None:
    with moving(tmp_path) as run, pytest.raises(rekindle.Unsupported, match="begin_trace"):
        run.begin_trace()
