"""Define a case (one sample of a database), its possible outcomes, and equality of results."""

from __future__ import annotations

import abc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.differ.modes import Evict

SEED = 20
T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case, and the number of recomputations of each operator."""

    #: "same", "different", "as in any mode", "undetermined" (plain PyTorch is random), or "refused"
    #: (by plain PyTorch)
    kind: str
    detail: str = ""
    again: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Case(abc.ABC):
    """One sample of an entry of a database."""

    entry: str
    name: str

    @abc.abstractmethod
    def judge(self, evict: Evict = "saved") -> Verdict:
        """Run the case in plain PyTorch and with recomputation, and return the verdict."""

    def __str__(self) -> str:
        return f"{self.entry}: {self.name}"


#: For the name of each entry: a function that yields the cases of the entry. Its argument `few` is
#: the most samples of each kind; None: all.
Entries = dict[str, Callable[[int | None], Iterator[Case]]]
AMONG = 16  #: samples are drawn from the first 16, because making all of them takes long


def drawn(samples: Iterable[T], few: int | None, *seeds: object) -> Iterator[tuple[int, T]]:
    """Return at most `few` of the samples, the same ones each time, with their numbers.

    If `few` is None, return all. The samples are made before any other code draws random numbers.
    """
    known = list(enumerate(itertools.islice(samples, None if few is None else AMONG)))
    if few is not None and few < len(known):
        known = sorted(random.Random(str(seeds)).sample(known, few), key=lambda pair: pair[0])
    return iter(known)


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def copies(name: str, values: list[Any]) -> dict[str, Any]:
    """Copy contents and geometry (shape and strides), without being seen by dispatch modes."""
    found: dict[str, Any] = {}
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            value.untyped_storage()  # this access pins the storage
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
    """Return the version counters of the tensors in `values`.

    Pass only tensors that existed before: those of new tensors depend on active modes.
    """
    tensors = ((index, value) for index, value in enumerate(values) if isinstance(value, Tensor))
    return {f"version of {name} {index}": value._version for index, value in tensors}


def _geometry(value: Tensor) -> Any:
    if value.layout is not torch.strided:
        return value.layout, value.shape
    place = value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()
    return value.shape, *place, value.requires_grad
