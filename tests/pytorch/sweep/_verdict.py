"""What a sample is, how it can go, and what "the same" means: to the last bit."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SEED = 20


@dataclass(frozen=True)
class Verdict:
    """How a case went, and how often which operator ran again."""

    kind: str  #: same, different, as in any mode, undetermined (in plain PyTorch), refused (there)
    detail: str = ""
    again: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Case(abc.ABC):
    """One sample of an entry of a database."""

    entry: str
    name: str

    @abc.abstractmethod
    def judge(self) -> Verdict:
        """Runs it plainly and with recomputation."""

    def __str__(self) -> str:
        return f"{self.entry}: {self.name}"


#: The cases of each entry, by its name; of at most so many samples of each kind, or of all.
Entries = dict[str, Callable[[int | None], Iterator[Case]]]


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def copies(name: str, values: list[Any]) -> dict[str, Any]:
    """Content and geometry, taken past every mode."""
    found: dict[str, Any] = {}
    unseen: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]
    with unseen, torch.no_grad():
        for index, value in enumerate(values):
            key = f"{name} {index}"
            if isinstance(value, Tensor):
                found[key] = value.detach().clone()
                found[f"geometry of {key}"] = _geometry(value)
            else:
                found[key] = None if value is None else type(value)
    return found


def versions(name: str, values: list[Any]) -> dict[str, int]:
    """Of what was there before: those of new tensors depend on whether any mode is active."""
    tensors = ((index, value) for index, value in enumerate(values) if isinstance(value, Tensor))
    return {f"version of {name} {index}": value._version for index, value in tensors}


def _geometry(value: Tensor) -> Any:
    if value.layout is not torch.strided:
        return value.layout, value.shape
    place = value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()
    return value.shape, *place, value.requires_grad


def differing(got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The names of what is not the same to the last bit."""
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
    """0.0 and -0.0 are equal as numbers, and not a number is not."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)
