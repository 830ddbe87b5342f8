"""Tests of custom operators that are defined a second time, as when a notebook cell runs again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle

N = 4096


def _define(space: str, schema: str, body: Callable[[Tensor], Any]) -> torch.library.Library:
    made = torch.library.Library(space, "FRAGMENT")
    made.define(f"f{schema}")
    made.impl("f", body, "CPU")
    return made


def _double(x: Tensor) -> None:
    x.mul_(2)


def _step(space: str) -> Tensor:
    w = torch.full((N,), 0.01, requires_grad=True)
    with torch.no_grad():
        state = torch.ones(N)
    y = w + state
    for _ in range(8):
        y = (y * 1.01).sin()
    with torch.no_grad():
        getattr(torch.ops, space).f(state)
    z = w
    for _ in range(8):
        z = (z * 1.01).cos()
    (y.sum() + (z * y).sum()).backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("number", range(8))
def test_operator_redefined_with_in_place_write_matches_pytorch(number: int) -> None:
    space = f"rekindle_redefined_{number}"
    library = _define(space, "(Tensor x) -> ()", lambda x: None)
    with rekindle.budget(16 * 4 * N):
        _step(space)
    library._destroy()
    del library
    gc.collect()
    library = _define(space, "(Tensor(a!) x) -> ()", _double)
    plain = _step(space)
    with rekindle.budget(16 * 4 * N) as run:
        found = _step(space)
    library._destroy()
    assert torch.equal(found, plain)
    assert run.recomputations > 0


def test_recomputation_that_needs_removed_operator_raises() -> None:
    space = "rekindle_removed"
    library = _define(space, "(Tensor x) -> Tensor", lambda x: x * 2)
    w = torch.full((N,), 0.01, requires_grad=True)
    with rekindle.budget(8 * 4 * N, learn=False):
        with torch.no_grad():
            made = torch.ones(N) + 1
        y = w
        for _ in range(4):
            y = (y * getattr(torch.ops, space).f(made)).sin()
        library._destroy()
        with pytest.raises(RuntimeError, match=r"rekindle_removed::f .* was removed"):
            y.sum().backward()
