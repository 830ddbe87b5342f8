"""Tests of finding existing tensors and their storages."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.pytorch.tensors import homes_of


def test_storage_of_leaked_torch_func_wrapper_counts_once() -> None:
    left: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        left.append(x)
        return x * 2

    given = torch.ones(3)
    torch.vmap(keep)(given)
    (home,) = homes_of([*left, given])
    assert home.data_ptr() == given.data_ptr()
