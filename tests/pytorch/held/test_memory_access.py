"""Tests of every way to access an evicted tensor's memory without an operator.

Each access is made three times. In plain PyTorch it gives the wanted result. Within a budget the
result must be the same, also if all is evicted again. On a bare placeholder (the storage of an
evicted tensor, without Rekindle's replaced methods) it must raise.
"""

from __future__ import annotations

import copy
import ctypes
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.dlpack import from_dlpack

import rekindle
from rekindle.pytorch.held import _escapes, _placeholders
from rekindle.pytorch.online import _handed_out
from tests.pytorch.held.placeholders import ADDRESS, HOME, UNREADABLE, is_empty
from tests.pytorch.sweep import _everything

Look = Callable[[Tensor], Any]


def saved(x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file).tolist()


def address(x: Tensor) -> Any:
    """Return the contents at the address, as a kernel outside PyTorch reads them."""
    return list((ctypes.c_float * x.numel()).from_address(x.data_ptr()))


def shared(x: Tensor) -> Any:
    return x.share_memory_().tolist()


def sent(x: Tensor) -> Any:
    """Send the tensor to another process, through a queue's own thread."""
    queue: Any = multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(ForkingPickler.dumps(x).tobytes())
    return pickle.loads(queue.get()).tolist()


class Kernel(Function):
    """A custom kernel that reads memory by address, without an operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tensor(address(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.tensor(address(x))


def custom(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    made = leaf * 1
    Kernel.apply(made).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


#: Ways to access the memory of a tensor `x`, by name. Some read the elements immediately. Others
#: return an object that shares the memory, which must stay valid.
LOOKS: dict[str, Look] = {
    "item": lambda x: x[1].item(),
    "float": lambda x: float(x[1]),
    "bool": lambda x: bool(x[1]),
    "tolist": lambda x: x.tolist(),
    "iteration": lambda x: [each.item() for each in x],
    "repr": repr,
    "str": str,
    "format": lambda x: f"{x[1]:.3f}",
    "deepcopy": lambda x: copy.deepcopy(x).tolist(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).tolist(),
    "torch.save": saved,
    "address": address,
    "another process": sent,
    "custom Function": custom,
    "equal": lambda x: torch.equal(x, x.clone()),
    "max pooling": lambda x: F.max_pool1d(x[None], 2).tolist(),
    "quantization": lambda x: torch.choose_qparams_optimized(x, 4, 10, 0.16, 8)[1].tolist(),
    "tensor of a list": lambda x: torch.tensor([x[:1], x[1:2]]).tolist(),
    "tensor of lists": lambda x: torch.tensor([[x[:1]], [x[1:2]]]).tolist(),
    "as_tensor": lambda x: torch.as_tensor([x[:1], x[1:2]]).tolist(),
    "asarray": lambda x: torch.asarray([x[:1], x[1:2]]).tolist(),
    "new_tensor": lambda x: x.new_tensor([x[:1], x[1:2]]).tolist(),
    "Tensor": lambda x: torch.Tensor([x[:1], x[1:2]]).tolist(),  # type: ignore[list-item]
    "tensor of complex": lambda x: torch.tensor([x[:1], 1j]).tolist(),
}
KEEPS: dict[str, Look] = {
    "numpy": lambda x: x.numpy(),
    "__array__": lambda x: np.asarray(x),
    "numpy, forced": lambda x: x.numpy(force=True),
    "numpy of a view": lambda x: x.view(2, 2).t().numpy(),
    "numpy from dlpack": lambda x: np.from_dlpack(x),
    "dlpack": lambda x: torch.from_dlpack(x),
    "capsule": lambda x: from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x._typed_storage()._untyped_storage,
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
}


def packed(sizes: Tensor) -> Any:
    """Return a packed sequence; sizes[t] is the number of sequences longer than t."""
    return PackedSequence(torch.ones(5, 2), sizes)


def recurrent(sizes: Tensor) -> Any:
    torch.manual_seed(1)
    return torch.nn.GRU(2, 3)(packed(sizes))[1].tolist()


#: Functions that read lengths or indices from a tensor before any operator runs. Such tensors are
#: pinned (not evicted).
COUNTS: dict[str, Look] = {
    "tensor_split": lambda n: [part.tolist() for part in torch.arange(4).tensor_split(n)],
    "torch.tensor_split": lambda n: torch.tensor_split(torch.arange(4), n)[0].tolist(),
    "ctc_loss": lambda n: F.ctc_loss(torch.zeros(4, 3, 5), torch.ones(3, 2).long(), n, n).item(),
    "pad_packed_sequence": lambda n: pad_packed_sequence(packed(n))[0].tolist(),
    "recurrent": recurrent,
}


@pytest.mark.parametrize("name", COUNTS)
def test_function_reads_counts_from_tensor_after_evictions(name: str) -> None:
    base = torch.tensor([2, 2, 1])
    wanted = COUNTS[name](base)
    with rekindle.budget(1 << 30, evict="anything") as run:
        n, other = base * 1, base * 1.0
        _everything.evict_all(run)
        assert is_empty(other)
        assert COUNTS[name](n) == wanted


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("name", LOOKS)
def test_python_access_to_evicted_value_recomputes_it(name: str) -> None:
    wanted = LOOKS[name](torch.ones(4) * 3)
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(4) * 3
        _everything.evict_all(run)
        assert is_empty(x)
        assert LOOKS[name](x) == wanted
        _everything.evict_all(run)
        assert LOOKS[name](x) == wanted
    assert x.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.half, torch.complex64])
def test_torch_tensor_of_evicted_scalars_has_right_numbers(dtype: torch.dtype) -> None:
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(4).to(dtype)
        _everything.evict_all(run)
        assert is_empty(x)
        made = torch.tensor([x[:1], x[1:2]])
    assert made.dtype is dtype
    assert made.tolist() == [1, 1]


@pytest.mark.parametrize("name", KEEPS)
def test_tensor_whose_address_the_program_has_is_pinned(name: str) -> None:
    wanted = plain(KEEPS[name](torch.ones(4) * 3))
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(4) * 3
        _everything.evict_all(run)
        assert is_empty(x)
        kept = KEEPS[name](x)
        del x
        _everything.evict_all(run)
        filler = [torch.zeros(4) for _ in range(64)]  # would reuse the memory if it were freed
        assert plain(kept) == wanted
        del filler
    assert plain(kept) == wanted


class Doubled(Function):
    """A function that overwrites its input by address (unseen by Rekindle) between two reads."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        Doubled.seen.append(x.exp())
        numbers = (ctypes.c_float * x.numel()).from_address(ADDRESS(x))
        numbers[:] = [2 * number for number in numbers]
        ctx.mark_dirty(x)
        Doubled.seen.append(x.mul_(2).exp())
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 4, None


def test_custom_function_that_writes_by_address_matches_pytorch() -> None:
    """Both reads inside the function see the contents that they see in plain PyTorch."""
    x, weight = torch.rand(4), torch.rand(4, requires_grad=True)
    wanted = [x.exp(), (4 * x).exp()]
    Doubled.seen.clear()
    with rekindle.budget(1 << 30, evict="anything") as run:
        made = x * 1
        result = Doubled.apply(made, weight)
        _everything.evict_all(run)
        assert all(torch.equal(*pair) for pair in zip(Doubled.seen, wanted, strict=True))
        assert torch.equal(result.detach(), x * 4)
    assert all(torch.equal(*pair) for pair in zip(Doubled.seen, wanted, strict=True))
    assert torch.equal(made.detach(), x * 4)


def test_evicted_value_moved_to_shared_memory_keeps_its_content() -> None:
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(4) * 3
        _everything.evict_all(run)
        assert shared(x) == [3, 3, 3, 3]
        _everything.evict_all(run)
        assert x.is_shared()
        assert x.tolist() == [3, 3, 3, 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_tensor_methods_on_evicted_value_match_pytorch(part: int) -> None:
    """Every tensor method gives the same result as in plain PyTorch, or the same kind of error."""
    names = sorted({*dir(Tensor)} - {"__class__"} - _DIFFER.keys())
    differing = {}
    for name in names[part::8]:
        wanted = _called(torch.ones(4) * 3, name)
        with rekindle.budget(1 << 30, evict="anything") as run:
            x = torch.ones(4) * 3
            _everything.evict_all(run)
            assert is_empty(x)
            got = _called(x, name)
        if got != wanted:
            differing[name] = (got, wanted)
    assert differing == {}


#: Methods that the test leaves out, and why their results differ.
_DIFFER = {
    "__dlpack_c_exchange_api__": "hidden within a budget, so that `__dlpack__` is used instead",
    "__weakref__": "whether there is one",
    "_lazy_clone": "a storage of its own kind",
}


def _called(x: Tensor, name: str) -> str:
    torch.manual_seed(20)
    try:
        found = getattr(x, name)
        result = found() if callable(found) else found
    except Exception as error:
        return type(error).__name__
    if isinstance(result, Tensor) and result.layout is torch.strided and not result.is_quantized:
        return f"{result.dtype} {result.shape} {result.tolist() if not result.is_meta else ''}"
    return type(result).__name__


def _husk_of_nothing() -> torch.UntypedStorage:
    """Return an empty storage that raises when it is read, as that of an evicted tensor does."""
    home = torch.UntypedStorage(0)
    ctypes.memset(home._cdata + _placeholders.flag_of_reading(), 1, 1)
    return home


@pytest.mark.parametrize("name", [*LOOKS, *KEEPS])
def test_direct_access_to_evicted_storage_raises(name: str) -> None:
    """All ways of access but three raise an error. These three never return the old contents."""
    look = {**LOOKS, **KEEPS}[name]
    wanted = plain(look(torch.ones(4) * 3))
    x = torch.ones(4) * 3
    HOME(x)._swap_data_ptr_(_husk_of_nothing())
    try:
        found = plain(look(x))
    except (RuntimeError, BufferError):
        return
    assert name in ("another process", "storage", "untyped_storage")
    assert found != wanted


def test_kernel_that_reads_evicted_storage_raises() -> None:
    x = torch.ones(4, 4)
    HOME(x)._swap_data_ptr_(_husk_of_nothing())
    for touch in (
        lambda: x + 1,
        lambda: torch.add(torch.ones(4, 4), 1, out=x),
        lambda: x.fill_(1),
        lambda: x @ x,
        lambda: x.sum(),
        lambda: torch.nn.functional.conv2d(x[None, None], torch.ones(1, 1, 2, 2)),
        lambda: torch.ones(4, 4).copy_(x),
        lambda: x.sort(),
        lambda: torch.fft.fft(x),
        lambda: torch.linalg.inv(x),
    ):
        with pytest.raises(RuntimeError):
            touch()


def test_reading_evicted_storage_without_raise_flag_crashes() -> None:
    """Without PyTorch's flag that makes reads raise, a kernel reads freed memory and crashes."""
    program = (
        "import torch; x = torch.ones(4); "
        "x.untyped_storage()._swap_data_ptr_(torch.UntypedStorage(0)); x + 1"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode < 0


@pytest.mark.parametrize("name", ["address", "tolist", "custom Function"])
def test_access_to_evicted_tensor_raises_without_patched_methods(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rekindle patches methods of tensors, so that access recomputes an evicted tensor.

    Without the patches, access raises. So the tests of access can fail.
    """
    monkeypatch.setattr(_escapes, "replace", lambda *arguments: None)
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(4) * 3
        _everything.evict_all(run)
        with pytest.raises(RuntimeError, match=UNREADABLE):
            Kernel.apply(x) if name == "custom Function" else LOOKS[name](x)


@pytest.mark.parametrize("name", ["numpy", "dlpack", "capsule", "untyped_storage"])
def test_exported_memory_is_evicted_without_patched_methods(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rekindle patches methods of tensors, so that exported memory is pinned (not evicted).

    Without the patches it is evicted. So the tests of exported memory can fail.
    """
    monkeypatch.setattr(_escapes, "replace", lambda *arguments: None)
    monkeypatch.setattr(_handed_out, "replace", lambda *arguments: None)
    # What makes DLPack capsules stays patched, but tells the budget nothing then.
    monkeypatch.setattr(_handed_out, "by_rekindle", lambda depth: True)
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(4) * 3
        kept = KEEPS[name](x)
        _everything.evict_all(run)
        assert is_empty(x)
        del kept


def test_evict_anything_with_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _placeholders.flag_of_reading.cache_clear()
    monkeypatch.setattr(torch, "UntypedStorage", object)
    try:
        with pytest.raises(rekindle.Unsupported, match=r"torch 2\.12"):
            _placeholders.flag_of_reading()
    finally:
        _placeholders.flag_of_reading.cache_clear()


def test_evict_anything_in_torch_without_raise_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _placeholders.flag_of_reading.cache_clear()
    monkeypatch.setattr(
        _placeholders, "_next_to_the_flag_of_writing", lambda: 75
    )  # not the contents that Rekindle expects in memory next to PyTorch's flag
    try:
        with pytest.raises(rekindle.Unsupported, match="raise an error when"):
            rekindle.budget("1GiB", evict="anything")
    finally:
        _placeholders.flag_of_reading.cache_clear()
