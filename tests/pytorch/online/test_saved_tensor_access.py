"""Tests of programs that read a node's saved tensors, such as `grad_fn._saved_self`.

Within a budget they get the same as with saved-tensor hooks that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.pytorch.harsh import vector


def _own_hooks(leaf: Tensor) -> object:
    saved: Any = leaf.sin().grad_fn
    return saved._raw_saved_self.register_hooks(lambda x: x, lambda x: x)


def _same_object(leaf: Tensor) -> object:
    saved: Any = leaf.sin().grad_fn
    return saved._saved_self is leaf


def _detached(leaf: Tensor) -> object:
    x = leaf.clone()
    y = x.sin()
    x.detach_()
    return y.sum().backward()


def _same(value: Tensor) -> Tensor:
    return value


def outcome(of: Callable[[Tensor], object], context: AbstractContextManager[Any]) -> str:
    with context:
        try:
            return str(of(vector(requires_grad=True)))
        except RuntimeError as error:
            return str(error).splitlines()[0]


@pytest.mark.parametrize("of", [_own_hooks, _same_object, _detached])
def test_saved_tensor_access_matches_pytorch_with_noop_hooks(
    of: Callable[[Tensor], object],
) -> None:
    plain = outcome(of, nullcontext())
    hooked = outcome(of, torch.autograd.graph.saved_tensors_hooks(_same, _same))
    assert hooked != plain
    assert outcome(of, rekindle.budget(None)) == hooked
