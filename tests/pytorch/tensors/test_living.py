"""Tests of finding living tensors and their memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.pytorch.tensors import homes_of


def test_escaped_transform_wrapper_has_no_own_memory() -> None:
    left: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        left.append(x)
        return x * 2

    given = torch.ones(3)
    torch.vmap(keep)(given)
    (home,) = homes_of([*left, given])
    assert home.data_ptr() == given.data_ptr()
