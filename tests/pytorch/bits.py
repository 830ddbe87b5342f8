"""Compare results of programs bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


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
