"""Tests of code that takes the memory of moved tensors, and of the report of what stays."""

from __future__ import annotations

import copy
import gc
import io
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
