"""Runs a recorded call again, as the first time, touching nothing that anyone else sees."""

from __future__ import annotations

import ctypes
import functools
import operator
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from rekindle.engine import Call, Storage
from rekindle.pytorch.operators._random import drawing_again
from rekindle.pytorch.operators._refusals import (
    changed_size,
    foreign_input,
    modified_input,
    resized_input,
)
from rekindle.pytorch.operators._signature import Invocation, Signature, tensors_in
from rekindle.pytorch.operators._switches import switched, switches
from rekindle.pytorch.tensors import Geometry, Memory, site

#: Of autocast, and of the `vmap` that runs a backward pass for a batch of gradients.
_ABOVE = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name))  # type: ignore[attr-defined]
        for name in (
            "AutocastCPU",
            "AutocastCUDA",
            "AutocastMPS",
            "AutocastXPU",
            "AutocastHPU",
            "AutocastPrivateUse1",
            "FuncTorchDynamicLayerBackMode",
            "FuncTorchDynamicLayerFrontMode",
            "FuncTorchVmapMode",
            "VmapMode",
        )
    ),
)


@final
class Recipe:
    """How a call made its results. Hangs on `Call.payload`.

    The tensor arguments are the call's inputs, in order, but for those that are left out.
    """

    __slots__ = (
        "depth",
        "dropped",
        "extras",
        "grad_mode",
        "random",
        "signature",
        "switches",
        "written",
    )

    depth: int  #: how many calls hang on each other, where somebody counts

    def __init__(
        self, invocation: Invocation, written: tuple[int, ...], dropped: tuple[int, ...]
    ) -> None:
        self.signature = invocation.signature
        self.extras = invocation.extras
        self.random = invocation.noted  #: generators, and their states before the call
        self.grad_mode = invocation.grad_mode
        #: PyTorch's own, as they stood
        self.switches = switches.now(invocation.operator.precise)
        self.written = written  #: which of the tensors the operator writes
        self.dropped = dropped  #: which are left out: running statistics move only once


def checksum(home: torch.UntypedStorage) -> int:
    """Of all bytes."""
    nbytes = home.nbytes()
    return zlib.crc32((ctypes.c_char * nbytes).from_address(home.data_ptr())) if nbytes else 0


@contextmanager
def as_the_first_time(grad_mode: bool = True) -> Iterator[None]:
    """Below autograd, autocast, `vmap`, where the mode saw the call; in the grad mode of then."""
    grad_mode_now = torch.is_grad_enabled()
    below_autograd = torch._C._AutoDispatchBelowAutograd()  # type: ignore[attr-defined]
    below_others = torch._C._ExcludeDispatchKeyGuard(_ABOVE)  # type: ignore[attr-defined]
    with below_autograd, below_others:
        torch._C._set_grad_enabled(grad_mode)
        try:
            yield
        finally:
            torch._C._set_grad_enabled(grad_mode_now)


def run_again(call: Call, *, in_place: bool) -> list[Tensor]:
    """The tensors that `call` makes, in the order of `Call.outputs`.

    With `in_place` it writes the memory of the inputs that it overwrites, else copies of them.
    """
    recipe: Recipe = call.payload
    signature = recipe.signature
    homes = [_home(value.storage) for value in call.inputs]
    device = homes[0].device if homes else None
    for position in recipe.dropped:
        homes.insert(position, torch.UntypedStorage(0))
    if recipe.written and not in_place:
        for position in recipe.written:
            storage = call.inputs[position].storage
            private = _copy(_home(storage))
            for other, value in enumerate(call.inputs):
                if value.storage is storage:
                    homes[other] = private
    rebuilt = (
        _stand_in(signature, geometry, device) if position in recipe.dropped else geometry.of(home)
        for position, (geometry, home) in enumerate(zip(signature.geometries(), homes, strict=True))
    )
    args, kwargs = signature.arguments(rebuilt, recipe.extras)
    with (
        as_the_first_time(recipe.grad_mode),
        switched(recipe.switches),
        drawing_again(recipe.random),
    ):
        result = signature.operator.func(*args, **kwargs)
    if recipe.written:
        return [_whole(homes[position]) for position in recipe.written]
    made = tensors_in(result)
    fresh = [made[position] for position in signature.fresh or ()]
    for tensor, storage in zip(fresh, call.made, strict=True):
        size = storage.payload.size
        if tensor.untyped_storage().nbytes() != size:
            raise changed_size(call.name, tensor.untyped_storage().nbytes(), size)
    return fresh


def _home(storage: Storage) -> torch.UntypedStorage:
    """The memory of a resident input, after making sure that it still is what it was."""
    memory: Memory = storage.payload
    home = memory.home()
    if home.nbytes() != memory.size:
        raise resized_input(home.nbytes(), memory.size)
    if memory.checksum is not None and memory.checksum != checksum(home):
        raise foreign_input(site(storage))
    tells = memory.version >= 0 and not memory.strays and memory.program_tensor_is_at(home)
    if tells and memory.current_version() not in (-1, memory.version):
        raise modified_input(site(storage), memory.current_version(), memory.version)
    return home


def _whole(home: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=home.device).set_(home)  # type: ignore[call-overload]


def _copy(home: torch.UntypedStorage) -> torch.UntypedStorage:
    return _whole(home).clone().untyped_storage()


def _stand_in(
    signature: Signature, geometry: Geometry, device: torch.device | None
) -> Tensor | None:
    """In the place of running statistics: nothing where that is allowed, else a scratch tensor."""
    if not signature.operator.written:
        return None
    empty = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=device)
    return empty.zero_()
