"""Tests of rule R4 (sources) for memory that code outside of PyTorch may write.

No recomputation reads such memory, because its contents may have changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import dlpack

import rekindle
from rekindle import Run
from tests.pytorch import cores
from tests.pytorch.harsh import WIDTH, deeper, vector

BYTES = 4 * WIDTH
SETTINGS: dict[str, dict[str, Any]] = {
    "saved": {},
    "anything": {"evict": "anything"},
    "swap": {"swap": "1GiB"},
    "learned": {"learn": "wait"},
}
settings = pytest.mark.parametrize("setting", SETTINGS)


def evict_all(run: Run | None) -> None:
    """Evict everything that may be evicted; do nothing without a budget."""
    if run is not None:
        cores.evict_all(run._driver)


def same(step: Callable[[Run | None], Tensor], weight: Tensor, setting: str) -> Run:
    """Assert that the loss of `step` has the gradient of plain PyTorch, and return the run."""
    (wanted,) = torch.autograd.grad(step(None), [weight])
    with rekindle.budget("1GiB", **SETTINGS[setting]) as run:
        for _ in range(3):
            (gradient,) = torch.autograd.grad(step(run), [weight])
            assert torch.equal(gradient, wanted)
    return run


def _numpy(folder: Path) -> tuple[Tensor, Any]:
    array = np.zeros(WIDTH, np.float32)
    return torch.from_numpy(array), array


def _lent_before(folder: Path) -> tuple[Tensor, Any]:
    tensor = torch.zeros(WIDTH)
    return tensor, tensor.numpy()


def _buffer(folder: Path) -> tuple[Tensor, Any]:
    buffer = bytearray(BYTES)
    return torch.frombuffer(buffer, dtype=torch.float32), np.frombuffer(buffer, np.float32)


def _dlpack(folder: Path) -> tuple[Tensor, Any]:
    array = np.zeros(WIDTH, np.float32)
    return torch.from_dlpack(array), array


def _shared(folder: Path) -> tuple[Tensor, Any]:
    """Return a tensor in shared memory, and a NumPy array of it as in another process."""
    tensor = torch.zeros(WIDTH).share_memory_()
    handle = tensor.untyped_storage()._share_filename_cpu_()
    other = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    return tensor, torch.empty(0).set_(other).numpy()


def _file(folder: Path) -> tuple[Tensor, Any]:
    path = str(folder / "numbers")
    tensor = torch.from_file(path, shared=True, size=WIDTH)
    return tensor, np.memmap(path, np.float32, "r+")


FOREIGN: dict[str, Callable[[Path], tuple[Tensor, Any]]] = {
    "NumPy": _numpy,
    "lent to NumPy before": _lent_before,
    "a buffer": _buffer,
    "DLPack": _dlpack,
    "shared memory": _shared,
    "a mapped file": _file,
}


@settings
@pytest.mark.parametrize("name", FOREIGN)
def test_refilled_numpy_buffer_matches_pytorch(name: str, setting: str, tmp_path: Path) -> None:
    batch, array = FOREIGN[name](tmp_path)
    weight = vector(requires_grad=True)

    def step(run: Run | None) -> Tensor:
        loss: Any = 0
        for number in range(3):
            array[:] = np.arange(WIDTH) % (number + 2)
            x = (batch / 3).sin()
            loss = loss + deeper(x * weight, 2).sum()
        array[:] = 0
        del x
        evict_all(run)
        return loss

    assert same(step, weight, setting).evictions > 0


@settings
def test_backward_after_write_by_numpy_matches_pytorch(setting: str) -> None:
    """PyTorch does not notice writes by NumPy, so the backward pass reads the new contents."""
    array = np.zeros(WIDTH, np.float32)
    weight = vector(requires_grad=True)

    def step(run: Run | None) -> Tensor:
        array[:] = 1
        loss = (weight * torch.from_numpy(array)).sum()
        evict_all(run)
        array[:] = 5
        return loss

    same(step, weight, setting)


@settings
def test_memory_written_by_numpy_and_operator_matches_pytorch(setting: str) -> None:
    array = np.zeros(WIDTH, np.float32)
    batch = torch.from_numpy(array)
    weight = vector(requires_grad=True)

    def step(run: Run | None) -> Tensor:
        array[:] = 1
        first = (batch * weight.detach()).cos() * weight
        batch.add_(1)
        torch.sin(batch, out=batch)
        second = (batch * 3).cos() * weight
        array[:] = 7
        loss = (first.sin() + second.sin()).sum()
        del first, second
        evict_all(run)
        return loss

    same(step, weight, setting)


def _by_numpy(x: Tensor) -> None:
    x.numpy()[:] = 0.5


def _by_array(x: Tensor) -> None:
    np.asarray(x)[:] = 0.5


def _by_dlpack(x: Tensor) -> None:
    torch.from_dlpack(x).fill_(0.5)


def _by_capsule(x: Tensor) -> None:
    dlpack.from_dlpack(dlpack.to_dlpack(x)).fill_(0.5)


def _by_numpy_dlpack(x: Tensor) -> None:
    torch.from_numpy(np.from_dlpack(x)).fill_(0.5)


def _by_storage(x: Tensor) -> None:
    x.untyped_storage().fill_(1)


def _by_bytes(x: Tensor) -> None:
    home = x.untyped_storage()
    for position in range(8):
        home[position] = 1


def _by_another_storage(x: Tensor) -> None:
    x.untyped_storage().copy_(torch.full((WIDTH,), 0.5).untyped_storage())


def _by_another_process(x: Tensor) -> None:
    handle = x.untyped_storage()._share_filename_cpu_()
    other = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    torch.empty(0).set_(other).fill_(0.5)


WRITES = (
    _by_numpy, _by_array, _by_dlpack, _by_capsule, _by_numpy_dlpack, _by_storage, _by_bytes,
    _by_another_storage, _by_another_process,
)  # fmt: skip


@settings
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_results_of_value_written_by_numpy_match_pytorch(
    write: Callable[[Tensor], None], setting: str
) -> None:
    """Results computed before and after the write keep their bits."""
    weight = vector(requires_grad=True)

    def step(run: Run | None) -> Tensor:
        x = (weight * 2).cos()
        before = (x * 3).sin().exp()
        evict_all(run)
        write(x.detach())
        after = (x * 3).sin().exp()
        del x
        evict_all(run)
        return (before * after).sum()

    run = same(step, weight, setting)
    assert run.evictions > 0


@settings
def test_earlier_results_of_numpy_written_source_match_pytorch(setting: str) -> None:
    weight = vector(requires_grad=True)

    def step(run: Run | None) -> Tensor:
        x = torch.ones(WIDTH)
        with torch.no_grad():
            factor = x + 1
        before = (weight * 0.1 + factor).sin().exp()
        evict_all(run)
        _by_numpy(factor)
        after = (weight * 0.1 + factor).sin().exp()
        del factor, x
        evict_all(run)
        return (before * after).sum()

    assert same(step, weight, setting).evictions > 0


def test_smaller_of_numpy_source_and_its_results_is_kept() -> None:
    """NumPy may overwrite the source later, so results cannot be recomputed from it.

    If the source is smaller than its results, Rekindle keeps a copy of the source, and evicts the
    results. If it is larger, the results stay in memory.
    """
    weight = vector(requires_grad=True)
    small, large = torch.from_numpy(np.ones(WIDTH, np.uint8)), torch.from_numpy(np.ones(50 * WIDTH))
    with rekindle.budget("1GiB", evict="saved") as run:
        x = small * 0.5
        # both operators that read the buffer share one copy of it
        kept = [x.sin() * weight, (small * 0.25).sin() * weight]
        del x
        assert run.memory == small.nbytes * 2 + weight.nbytes + 4 * BYTES
        evict_all(run)
        assert run.memory == small.nbytes * 2 + weight.nbytes + 2 * BYTES
        before = run.memory
        kept.append(large[:WIDTH].float().sin() * weight)
        evict_all(run)
        assert run.memory == before + large.nbytes + 2 * BYTES  # the source, and both its results
        del kept
        assert run.memory == small.nbytes + weight.nbytes + large.nbytes


def _parameter(array: Any) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(array))


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_weights_in_memory_mapped_file_match_pytorch(evict: Any) -> None:
    """Recomputations may read weights, also if a file is mapped to them or NumPy shares them."""
    arrays = [np.full(WIDTH, 0.5, np.float32) for _ in range(3)]
    weights = [_parameter(array) for array in arrays]

    def loss() -> Tensor:
        x: Any = 1
        for weight in weights:
            x = deeper(x * weight, 2)
        return x.sum()

    wanted = torch.autograd.grad(loss(), weights)
    with rekindle.budget("1GiB", evict=evict) as run:
        for _ in range(2):
            result = loss()
            evict_all(run)
            for gradient, its in zip(torch.autograd.grad(result, weights), wanted, strict=True):
                assert torch.equal(gradient, its)
            # between steps any code may write to weights
            for array, weight in zip(arrays, weights, strict=True):
                array[:] += 1
                array[:] -= 1
                weight.detach().numpy()
        assert run.recomputations > 0


@pytest.mark.parametrize("evict", ["saved", "anything"])
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_recomputation_may_read_weights_from_torch_load(
    mmap: bool, evict: Any, tmp_path: Path
) -> None:
    """Storages from `torch.load` look like memory of other code, but nothing else writes them."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh())]
    ours, batch = nn.Sequential(*layers), torch.randn(64, 32)
    ours(batch).sum().backward()
    wanted = [weight.grad for weight in ours.parameters()]
    torch.save(ours.state_dict(), tmp_path / "weights.pt")
    ours.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=mmap), assign=True)
    ours.zero_grad()
    with rekindle.budget("1GiB", device="cpu", evict=evict) as run:
        loss = ours(batch).sum()
        evict_all(run)
        loss.backward()
    assert run.recomputations > 0
    for weight, gradient in zip(ours.parameters(), wanted, strict=True):
        assert weight.grad is not None
        assert gradient is not None
        assert torch.equal(weight.grad, gradient)


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_recomputation_from_weights_written_by_numpy_raises(evict: Any) -> None:
    """The end of the budget raises as well, because it cannot recompute user-held values."""
    array = np.full(WIDTH, 0.5, np.float32)
    weight = _parameter(array)

    def train() -> None:
        with rekindle.budget("1GiB", evict=evict) as run:
            loss = deeper(weight * 1, 4).sum()
            evict_all(run)
            array[17] = 3
            loss.backward()

    with pytest.raises(RuntimeError, match=r"was modified outside of PyTorch, .* NumPy"):
        train()


def test_exporting_to_numpy_pins_only_the_exported_value() -> None:
    """Values made before and after the exported one are evicted."""
    weight = vector(requires_grad=True)
    with rekindle.budget("1GiB") as run:
        x = deeper(weight, 4)
        x.detach().numpy().sum()
        loss = deeper(x, 4).sum()
        del x
        evict_all(run)
        assert run.memory <= 3 * BYTES + 8
        (gradient,) = torch.autograd.grad(loss, [weight])
    (wanted,) = torch.autograd.grad(deeper(weight, 8).sum(), [weight])
    assert torch.equal(gradient, wanted)


def _fill(x: Tensor) -> None:
    """Fill memory by its address, like a kernel outside of PyTorch."""
    np.ctypeslib.as_array((ctypes.c_float * x.numel()).from_address(x.data_ptr()))[:] = 0.5


@torch.library.custom_op("rekindle_tests::fill", mutates_args=("x",))
def declared(x: Tensor) -> None:
    _fill(x)


@pytest.mark.parametrize(("fill", "right"), [(_fill, False), (declared, True)])
def test_write_by_address_is_right_if_program_declares_it(
    fill: Callable[[Tensor], None], right: bool
) -> None:
    """Rekindle observes the write only inside a custom operator that has `mutates_args`."""
    weight = vector(requires_grad=True)

    def gradient(run: Run | None) -> Tensor:
        x = (weight * 2).cos()
        before = (x * 3).sin().exp()
        with torch.no_grad():
            fill(x.detach())
        evict_all(run)
        return torch.autograd.grad(before.sum(), [weight])[0]

    wanted = gradient(None)
    with rekindle.budget("1GiB") as run:
        assert torch.equal(gradient(run), wanted) == right


ARRAY = np.zeros(WIDTH, np.float32)


@torch.library.custom_op("rekindle_tests::observe", mutates_args=())
def observe(x: Tensor) -> Tensor:
    """Return one array, changed in each call, like an environment in reinforcement learning."""
    ARRAY[:] += 1
    return torch.from_numpy(ARRAY)


def test_result_in_numpy_memory_is_never_evicted() -> None:
    weight = vector(requires_grad=True)

    def step(run: Run | None) -> Tensor:
        ARRAY[:] = 0
        seen = observe(weight.detach())
        loss = deeper((seen * 0.5).sin() * weight, 2).sum()
        del seen
        ARRAY[:] += 1
        evict_all(run)
        return loss

    assert same(step, weight, "saved").evictions > 0
    assert ARRAY[0] == 2  # the operator was not recomputed
