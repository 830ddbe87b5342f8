"""Tests of the functions that ask for the memory of an accelerator. `torch.cuda` is simulated."""

from __future__ import annotations

import pytest
import torch

import rekindle
from rekindle.pytorch.devices import accelerator, is_out_of_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("size mismatch"), False),
        (MemoryError("out of memory"), False),
    ],
)
def test_device_oom_errors_of_all_libraries_are_recognized(
    error: BaseException, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


def test_device_without_index_means_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert accelerator.with_index(torch.device("cuda")) == torch.device("cuda", 3)
    assert accelerator.with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert accelerator.with_index(CPU) == CPU


def test_available_cuda_memory_excludes_split_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = {"inactive_split_bytes.all.current": 100}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: pieces)
    assert accelerator.obtainable(torch.device("cuda")) == (600, 200)


@pytest.mark.parametrize(
    ("devices", "shown", "expected"), [(8, "", 1), (4, "", 2), (1, "", 8), (1, "3", 1), (3, "", 3)]
)
def test_eight_ranks_are_divided_among_visible_devices(
    monkeypatch: pytest.MonkeyPatch, devices: int, shown: str, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert accelerator.ranks_of_device(8) == expected


def test_page_locked_memory_check_runs_no_operator() -> None:
    """If PyTorch has a usable device, Rekindle asks if memory made by other code is page-locked.

    PyTorch's own function for that runs an operator, which a dispatch mode would see.
    """
    weight = torch.rand(8, requires_grad=True)

    def step() -> None:
        (weight * weight.sin()).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)

    trace = rekindle.capture(step)
    assert "aten::is_pinned" not in [op.name for op in trace.ops]
    assert 0 not in trace.storages


def test_allocator_snapshot_lists_blocks_of_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(device: int, *states: str) -> dict[str, object]:
        blocks = [{"address": n, "size": 512, "state": state} for n, state in enumerate(states)]
        return {"device": device, "blocks": blocks}

    reported = [segment(0, "active_allocated", "inactive"), segment(1, "active_awaiting_free")]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": reported})
    assert accelerator.segments(torch.device("cuda", 0)) == [[(0, 512, True), (1, 512, False)]]
    assert accelerator.segments(torch.device("cuda", 1)) == [[(0, 512, True)]]

    def refuses() -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuses)
    assert accelerator.segments(torch.device("cuda", 0)) == []
