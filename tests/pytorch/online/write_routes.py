"""Every way in which a program changes a tensor's memory: by an operator, or past all operators.

A route takes a contiguous vector `x` and changes its contents, or gives `x` other memory.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import dlpack

Route = Callable[[Tensor], object]


@torch.library.custom_op("rekindle_tests::move_one", mutates_args=("x",))
def move_one(x: Tensor, y: Tensor) -> None:
    x.lerp_(y, 0.25)


@torch.library.custom_op("rekindle_tests::move_list", mutates_args=("xs",))
def move_list(xs: list[Tensor]) -> None:
    for x in xs:
        x.mul_(0.75)


@torch.library.custom_op("rekindle_tests::move_two", mutates_args=("x", "y"))
def move_two(x: Tensor, y: Tensor) -> None:
    x.mul_(0.75)
    y.mul_(0.5)


def _other(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel())


def _on(home: torch.UntypedStorage) -> Tensor:
    """Return a tensor of floats in the storage `home`."""
    return torch.empty(0).set_(home)


# -- functions of Python that run no operator on `x` -----------------------------------------------


def _by_map(x: Tensor) -> None:
    x.map_(_other(x), lambda mine, its: mine * 0.5 + its)


def _by_map2(x: Tensor) -> None:
    x.map2_(_other(x), _other(x), lambda mine, one, other: mine - one * other)


def _by_memoryview(x: Tensor) -> None:
    memoryview(x.numpy()).cast("B")[:400] = bytes(400)  # type: ignore[arg-type]


def _by_buffer(x: Tensor) -> None:
    torch.frombuffer(x.numpy(), dtype=torch.float32, offset=400).fill_(0.5)


def _by_part_of_array(x: Tensor) -> None:
    torch.from_numpy(x.numpy()[100:300]).fill_(0.5)


def _by_part_of_dlpack(x: Tensor) -> None:
    torch.from_dlpack(x[100:300]).fill_(0.5)


def _by_address_in_custom_op(x: Tensor) -> None:
    fill_by_address(x)


@torch.library.custom_op("rekindle_tests::fill_by_address", mutates_args=("x",))
def fill_by_address(x: Tensor) -> None:
    ctypes.memset(x.data_ptr(), 0, x.nbytes)


# -- storages --------------------------------------------------------------------------------------


def _by_bytes(x: Tensor) -> None:
    home = x.untyped_storage()
    for position in range(8):
        home[position] = 1


def _by_typed_storage(x: Tensor) -> None:
    home = x._typed_storage()
    home._setitem(3, 0.5)
    home._setitem(slice(100, 300), 0.25)


def _from_file(x: Tensor) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(np.int64(x.numel()).tobytes() + _other(x).numpy().tobytes())
        file.seek(0)
        x.untyped_storage()._set_from_file(file, 0, True, 4)


def _resized(x: Tensor) -> None:
    home = x.untyped_storage()
    home.resize_(0)
    home.resize_(4 * x.numel())
    x.copy_(_other(x))


def _by_storage_of_other_process(x: Tensor) -> None:
    x.share_memory_()
    handle = x.untyped_storage()._share_filename_cpu_()
    _on(torch.UntypedStorage._new_shared_filename_cpu(*handle)).mul_(0.5)


def _halves(x: Tensor) -> tuple[torch.UntypedStorage, torch.UntypedStorage]:
    middle = x.nbytes // 8 * 4
    return x.untyped_storage()[:middle], x.untyped_storage()[middle:]


def _in_part(write: Callable[[torch.UntypedStorage], object], which: int = 1) -> Route:
    return lambda x: write(_halves(x)[which])


def _part_by_bytes(home: torch.UntypedStorage) -> None:
    for position in range(8):
        home[position] = 1


def _through_flat_buffers(x: Tensor) -> None:
    """Write through the whole what is read through the parts, and the reverse."""
    parts = [_on(part) for part in _halves(x)]
    torch._foreach_mul_(parts, 0.5)
    x.mul_(1.5)
    torch._foreach_add_([x, *parts], 0.25)


# -- the tensor gets other memory ------------------------------------------------------------------


def _with_data(x: Tensor) -> None:
    x.data = _other(x)


def _with_data_twice(x: Tensor) -> None:
    x.data = _other(x)
    (x * 2).cos()
    x.data = x.data.half().float()
    x.data.mul_(0.5)


def _alias_with_data(x: Tensor) -> None:
    """Write memory that has the version counter of `x`, but not the memory of `x`."""
    alias = x.detach()
    alias.data = alias.data.clone()
    alias.mul_(3)


def _written_under_alias(x: Tensor) -> None:
    alias = x.detach()
    alias.data = alias.data.clone()
    x.mul_(0.5)


def _exchanged(x: Tensor) -> None:
    x.untyped_storage()._swap_data_ptr_(_other(x).untyped_storage())  # type: ignore[attr-defined]


def _swapped(x: Tensor) -> None:
    torch.utils.swap_tensors(x, _other(x))


def _as_parameter(x: Tensor) -> None:
    nn.utils.vector_to_parameters(_other(x), [x])


def _applied(x: Tensor) -> None:
    module = nn.Module()
    module.register_buffer("x", x)
    module._apply(lambda value: value * 0.5)
    x.copy_(module.x)  # type: ignore[arg-type]


# -- operators -------------------------------------------------------------------------------------


def _by_results(x: Tensor) -> None:
    torch.max(_other(x).view(1, -1), 0, out=(x, torch.empty(0, dtype=torch.long)))


def _by_list_of_results(x: Tensor) -> None:
    a, b = x[:500], x[500:]
    torch._foreach_copy_([a, b], [_other(a), _other(b)])


def _by_optimizer(kind: Any, **options: Any) -> Route:
    def step(x: Tensor) -> None:
        x.grad = _other(x)
        kind([x], lr=0.1, **options).step()
        x.grad = None

    return step


def _version_raised(x: Tensor) -> None:
    torch.autograd.graph.increment_version(x)


def _version_kept(x: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.mul_(0.5)
        (x * 2).cos()


def _by_saved_data(x: Tensor) -> None:
    x.data.mul_(0.5)


ROUTES: dict[str, Route] = {
    "apply_": lambda x: x.apply_(lambda value: value * 0.5),
    "map_": _by_map,
    "map2_": _by_map2,
    "numpy": lambda x: x.numpy().fill(0.5),
    "asarray": lambda x: np.asarray(x).fill(0.5),
    "memoryview": _by_memoryview,
    "frombuffer": _by_buffer,
    "part of array": _by_part_of_array,
    "from_dlpack": lambda x: torch.from_dlpack(x).fill_(0.5),
    "capsule": lambda x: dlpack.from_dlpack(dlpack.to_dlpack(x)).fill_(0.5),
    "part of dlpack": _by_part_of_dlpack,
    "address in a custom operator": _by_address_in_custom_op,
    "storage.fill_": lambda x: x.untyped_storage().fill_(1),
    "storage.copy_": lambda x: x.untyped_storage().copy_(_other(x).untyped_storage()),
    "storage[i] =": _by_bytes,
    "storage._byteswap": lambda x: x.untyped_storage().byteswap(torch.int16),
    "storage._set_from_file": _from_file,
    "storage.resize_": _resized,
    "typed storage": _by_typed_storage,
    "another process": _by_storage_of_other_process,
    "set_ to the same storage": lambda x: _on(x.untyped_storage()).mul_(0.5),
    "part of storage": _in_part(lambda home: _on(home).mul_(0.5)),
    "first part of storage": _in_part(lambda home: _on(home).mul_(0.5), 0),
    "part of a part": _in_part(lambda home: _on(home[400:800]).mul_(0.5)),
    "part of storage.fill_": _in_part(lambda home: home.fill_(1)),
    "part of storage.copy_": _in_part(
        lambda home: home.copy_(torch.zeros(home.nbytes(), dtype=torch.uint8).untyped_storage())
    ),
    "part of storage[i] =": _in_part(_part_by_bytes),
    "part of storage.numpy": _in_part(lambda home: _on(home).numpy().fill(0.5)),
    "flat buffers": _through_flat_buffers,
    ".data =": _with_data,
    ".data = twice": _with_data_twice,
    ".data = of an alias": _alias_with_data,
    ".data = of an alias, mul_": _written_under_alias,
    "storage._swap_data_ptr_": _exchanged,
    ".data.mul_": _by_saved_data,
    "detach().mul_": lambda x: x.detach().mul_(0.5),
    "set_": lambda x: x.set_(_other(x)),
    "swap_tensors": _swapped,
    "vector_to_parameters": _as_parameter,
    "Module._apply": _applied,
    "increment_version": _version_raised,
    "version kept": _version_kept,
    "mul_": lambda x: x.mul_(0.5),
    "[...] =": lambda x: x.__setitem__(slice(100, 300), 0.5),
    "out=": lambda x: torch.sin(x, out=x),
    "out= list": _by_results,
    "_foreach_copy_": _by_list_of_results,
    "custom operator": lambda x: move_one(x, _other(x)),
    "custom operator with a list": lambda x: move_list([x]),
    "SGD": _by_optimizer(torch.optim.SGD, momentum=0.9),
    "SGD, foreach": _by_optimizer(torch.optim.SGD, foreach=True),
    "SGD, fused": _by_optimizer(torch.optim.SGD, fused=True),
    "Adam, fused": _by_optimizer(torch.optim.Adam, fused=True),
    "init": lambda x: nn.init.constant_(x, 0.5),
}  # fmt: skip

#: Operators that write several memories in one call: the arguments are a value and its source.
TOGETHER: dict[str, Callable[[Tensor, Tensor], object]] = {
    "_foreach_mul_": lambda x, y: torch._foreach_mul_([x, y], 0.5),
    "_foreach_mul_, source first": lambda x, y: torch._foreach_mul_([y, x], 0.5),
    "_foreach_add_ of each other": lambda x, y: torch._foreach_add_([x, y], [y, x]),
    "_foreach_zero_": lambda x, y: torch._foreach_zero_([x, y]),
    "custom operator": lambda x, y: move_two(x, y),
    "custom operator, source first": lambda x, y: move_two(y, x),
    "custom operator with a list": lambda x, y: move_list([x, y]),
    "out=": lambda x, y: torch.frexp(x.clone(), out=(x, torch.empty(0, dtype=torch.int32))),
    "aminmax": lambda x, y: torch.aminmax(
        torch.stack([x, y]), dim=0, out=(x, y)
    ),
    "_fused_sgd_": lambda x, y: torch._fused_sgd_(
        [x, y], [x.clone(), y.clone()], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    ),
}  # fmt: skip
