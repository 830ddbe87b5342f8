"""Copy the results of programs, and compare them bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def differing(got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the names of the results that differ in at least one bit."""
    names = list(dict.fromkeys([*got, *wanted]))
    missing = object()
    return [n for n in names if not _same(got.get(n, missing), wanted.get(n, missing))]


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    pairs = zip(_strided_parts(one), _strided_parts(other), strict=True)
    return all(torch.equal(_bits(mine), _bits(its)) for mine, its in pairs)


def _strided_parts(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        raise AssertionError(f"no way to compare a tensor of layout {tensor.layout}")


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a value, because 0.0 equals -0.0 and NaN does not equal NaN."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


#: Objects whose state is compared.
_STATED = (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)


def everything(result: object) -> dict[str, Any]:
    """Return copies of all results of a program by name, and the state of the random generator.

    Results are tensors with their gradients, modules, optimizers and plain values, in any nesting.
    """
    found = dict(_named("result", result))
    found["generator"] = torch.get_rng_state()
    return found


def _named(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, value.detach().clone()
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad", value.grad.detach().clone()
    elif isinstance(value, nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from _named(f"{name}.{key}", tensor)
        for where, module in value.named_modules():
            for key, each in vars(module).items():
                if isinstance(each, Tensor):  # an attribute that is no parameter and no buffer
                    yield from _named(f"{name}.{where}.{key}", each)
    elif isinstance(value, _STATED):
        state = value.state_dict().items()
        yield from _named(name, {key: each for key, each in state if not callable(each)})
    elif isinstance(value, dict):
        for index, (key, item) in enumerate(value.items()):
            known = key if isinstance(key, (str, int, tuple)) else index
            yield from _named(f"{name}[{known}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _named(f"{name}[{index}]", item)
    elif isinstance(value, np.ndarray):
        yield name, (value.dtype.str, value.shape, value.tobytes())
    elif type(value).__eq__ is object.__eq__:
        yield name, type(value)  # such as a function: equal only to itself
    else:
        yield name, repr(value) if isinstance(value, float) else value  # NaN is unequal to itself


def noted(value: object) -> object:
    """Copy a value as it is now, because the program may overwrite it later."""
    if isinstance(value, Tensor):
        plain = value.detach().to_dense() if value.is_sparse else value.detach().resolve_conj()
        plain = plain.as_subclass(Tensor).contiguous().clone()
        data = plain.view(-1).view(torch.uint8).numpy().tobytes()
        return str(plain.dtype), tuple(plain.shape), data
    if isinstance(value, dict):
        return {str(name): noted(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [noted(each) for each in value]
    return repr(value)


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """Run kernels with so many threads inside the block: some bits depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
