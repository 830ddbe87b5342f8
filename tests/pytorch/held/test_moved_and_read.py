"""Tests of code that takes the memory of moved tensors, and of the report of what stays."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.online import _handed_out
from tests.pytorch.bits import differing, everything
from tests.pytorch.held.placeholders import empty, is_empty
from tests.pytorch.held.test_moved_state import LARGEST, LAYERS, WIDTH, Task, moving
from tests.pytorch.sweep import _everything

FEW = 4 * LARGEST  #: a budget of a third of the weights


def weights_in_turn(read: Callable[[Tensor], Any], tmp_path: Path) -> None:
    """Read each weight of a model within a budget that has room for few of them."""
    wanted = [read(each) for each in Task().model.parameters()]
    task = Task()
    with moving(tmp_path, FEW) as run, torch.no_grad():
        task.model(task.batch)
        got = [read(each) for each in task.model.parameters()]
        assert run.peak <= FEW
        assert empty(task.model.parameters()) >= LAYERS // 2
    assert differing(everything(got), everything(wanted)) == []


def test_weight_that_had_an_array_stays(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path, FEW), torch.no_grad():
        task.model(task.batch)
        weight = next(task.model.parameters())
        view = weight.detach().numpy()[1:]
        view[:] = 3
        for _ in range(2):
            task.model(task.batch)
            assert not is_empty(weight)
        del view
        task.model(task.batch)
        assert not is_empty(weight)
        assert bool((weight[1:] == 3).all())


@pytest.mark.parametrize(
    "export",
    [
        np.from_dlpack,
        torch.from_dlpack,
        torch.utils.dlpack.to_dlpack,
        lambda tensor: tensor.__dlpack__(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.share_memory_(),
    ],
    ids=[
        "np.from_dlpack",
        "torch.from_dlpack",
        "to_dlpack",
        "__dlpack__",
        "numpy",
        "share_memory_",
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_exported_tensor_stays_and_is_named(
    export: Callable[[Tensor], Any], inside: bool, tmp_path: Path
) -> None:
    """Other code may read its memory at any time, also if it got it before the budget."""
    tensor, others = torch.randn(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    wanted = tensor.clone()
    exported = None if inside else export(tensor)
    with moving(tmp_path, 1 << 20) as run:
        tensor.sum()
        exported = export(tensor) if inside else exported
        others.sum()
        _everything.evict_all(run)
        assert is_empty(others)
        assert not is_empty(tensor)
        (name,) = run.report().staying
    assert name.startswith("inputs: ")
    assert "NumPy, DLPack" in name or "other processes share it" in name
    if isinstance(exported, Tensor | np.ndarray):
        assert np.array_equal(np.asarray(exported), wanted.numpy())
    del exported


def test_freed_export_is_forgotten() -> None:
    before = len(_handed_out.exported())
    tensor = torch.randn(WIDTH)
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    assert len(_handed_out.exported()) == before + 1
    del tensor, capsule
    gc.collect()
    assert len(_handed_out.exported()) == before


def test_weight_with_array_and_address_stays(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path, FEW), torch.no_grad():
        weight = next(task.model.parameters())
        array = weight.detach().numpy()
        assert weight.data_ptr() == array.ctypes.data
        del array
        task.model(task.batch)
        assert not is_empty(weight)


def test_model_larger_than_budget_is_saved(tmp_path: Path) -> None:
    plain, task = Task(), Task()
    plain.step()
    with moving(tmp_path) as run:
        task.step()
        torch.save((task.model.state_dict(), task.optimizer.state_dict()), tmp_path / "moved")
        assert run.peak <= run.budget
        assert empty(task.model.parameters()) >= LAYERS // 3
    wanted = (plain.model.state_dict(), plain.optimizer.state_dict())
    assert differing(everything(torch.load(tmp_path / "moved")), everything(wanted)) == []


def test_file_of_moved_tensors_equals_that_of_pytorch(tmp_path: Path) -> None:
    """Views share a storage in the file; tensors of other dtypes do not clash."""

    def made() -> dict[str, Tensor]:
        torch.manual_seed(5)
        base = torch.randn(64, 64)
        numbers = [torch.randn(64, 64).to(dtype) for dtype in (torch.half, torch.double)]
        return {"base": base, "row": base[3], "half": numbers[0], "double": numbers[1]}

    def saved(value: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()

    wanted = saved(made())
    with moving(tmp_path, 5 * 64 * 64 * 8) as run:
        value = made()
        weights = [torch.randn(64, 64) for _ in range(12)]
        assert any(is_empty(value[name]) for name in ("base", "half", "double"))
        assert saved(value) == wanted
        assert run.peak <= run.budget
        del weights


def test_deep_copies_in_turn_leave_originals_free_to_move(tmp_path: Path) -> None:
    weights_in_turn(lambda weight: copy.deepcopy(weight.detach()).square().sum(), tmp_path)


def test_copied_module_equals_original_below_both_sizes(tmp_path: Path) -> None:
    plain = copy.deepcopy(Task().model)
    with moving(tmp_path, FEW) as run:
        task = Task()
        copied = copy.deepcopy(task.model)
        assert run.peak <= FEW
    assert differing(everything(copied.state_dict()), everything(plain.state_dict())) == []


@pytest.mark.parametrize("way", ["numpy", "data_ptr", "keep"])
def test_report_names_what_cannot_move_and_why(way: str, tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path) as run:
        task.step()
        weight = task.model[0].weight
        kept: list[Any] = []
        match way:
            case "numpy":
                kept.append(weight.detach().numpy())
            case "data_ptr":
                kept.append(weight.data_ptr())
            case _:
                run.keep(weight)
        inside = run.report()
    for report in (inside, run.report()):
        why = {"numpy": "NumPy", "data_ptr": "data_ptr()", "keep": "run.keep"}[way]
        ((name, nbytes),) = report.staying.items()
        assert name.startswith("0.weight: ")
        assert why in name
        assert nbytes == LARGEST
        assert name in report.text()
        assert "stays in memory" in report.to_html()


def test_report_tells_kinds_of_what_moved(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path) as run:
        for _ in range(3):
            task.step()
    report = run.report()
    rows = {row.kind: row for row in report.moved}
    assert report.swapped is not None
    assert sum(row.out for row in report.moved) == report.swapped.out
    assert sum(row.back for row in report.moved) == report.swapped.back
    for kind in ("parameters", "gradients", "optimizer state"):
        assert rows[kind].out >= LAYERS // 2 * LARGEST
        assert rows[kind].times_back * LARGEST >= rows[kind].back > 0
        assert kind in report.text()
    assert rekindle.report.Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("export", ["address", "array"])
def test_memory_exported_before_the_first_operator_stays(export: str, tmp_path: Path) -> None:
    """No operator of the budget has read the tensor when its address leaves PyTorch."""
    x = torch.full((1 << 18,), 3.0)
    with moving(tmp_path, 8 << 20) as run, torch.no_grad():
        array = np.from_dlpack(x) if export == "array" else None
        address = x.data_ptr()
        x.sum()
        run.release()
        assert not is_empty(x)
        assert ctypes.c_float.from_address(address).value == 3.0
        assert array is None or float(array.sum()) == 3.0 * len(array)


def test_memory_with_known_address_stays_after_a_write(tmp_path: Path) -> None:
    w = torch.ones(1 << 18)
    with moving(tmp_path, 16 << 20) as run:
        doubled = w * 2
        address = w.data_ptr()
        w.add_(1)
        run.release()
        assert not is_empty(w)
        assert ctypes.c_float.from_address(address).value == 2.0
        assert doubled[0].item() == 2.0


def test_memory_that_a_function_reads_stays_until_it_ends(tmp_path: Path) -> None:
    """An operator inside makes the weight a candidate for eviction, which it was not before."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = x @ w
            filled = [torch.ones(1 << 18) for _ in range(8)]
            assert not is_empty(w)
            del filled
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    w, x = torch.ones(512, 512), torch.ones(4, 512, requires_grad=True)
    with moving(tmp_path, 4 << 20) as run:
        assert Reads.apply(x, w)[0, 0].item() == 512.0
        assert (x.detach() @ w)[0, 0].item() == 512.0
        run.release()
        assert is_empty(w)


COLLECTED = """
import gc, sys, torch, rekindle
class Cycle:
    def __init__(self): self.me, self.tensor = self, torch.ones(3)
    def __del__(self): self.tensor.tolist()
weights = [torch.randn(1 << 16) for _ in range(8)]
gc.set_threshold(10)
with rekindle.budget("1MiB", evict="anything", swap="1GiB", swap_directory=sys.argv[1]):
    for number in range(120):
        Cycle()
        weights[number % 8].mul_(1.0)
print("ended")
"""


def test_finalizers_that_read_tensors_do_not_stop_copies(tmp_path: Path) -> None:
    """The garbage collector may call them in the thread that copies, or in the middle of a copy.

    Python prints their errors: in that thread, nothing can bring an evicted tensor back.
    """
    command = [sys.executable, "-c", COLLECTED, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout == "ended\n"
    assert "please report this" not in ran.stderr
