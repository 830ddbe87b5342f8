"""Tests of `REKINDLE_POISON=1`, which overwrites evicted memory to reveal stale reads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rekindle

ROOT = Path(__file__).parents[3]
N = 1_000
NONE = b"\xff" * 4
"""The bytes of a NaN, which overwrite evicted memory."""


def _evicted() -> tuple[bytes, bytes, bool]:
    """Return the bytes at a value's address before and after eviction.

    The third result is True if the gradients equal plain PyTorch's. Nothing is allocated between
    eviction and reading, so no other value is at the address.
    """
    weight = torch.linspace(0.1, 1.0, N, requires_grad=True)
    (expected,) = torch.autograd.grad(weight.sin().exp().square().sum(), [weight])
    with rekindle.budget("1MiB", evict="saved") as run:
        x = weight.sin().exp()
        loss = x.square().sum()
        middle = x.untyped_storage().data_ptr() + 4 * (N // 2)
        del x
        before = ctypes.string_at(middle, 4)
        run.budget = run.memory - 4 * N
        after = ctypes.string_at(middle, 4)
        assert run.evictions == 1
        run.budget = "1MiB"
        (gradient,) = torch.autograd.grad(loss, [weight])
        assert run.recomputations > 0
    return before, after, torch.equal(gradient, expected)


@pytest.mark.parametrize("asked_for", ["1", "0", ""])
def test_evicted_memory_is_overwritten_if_rekindle_poison_is_set(asked_for: str) -> None:
    program = "from tests.pytorch.online.test_poison import _evicted;print(_evicted())"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"REKINDLE_POISON": asked_for},
    )  # fmt: skip
    before, after, equal = eval(result.stdout)
    assert equal
    assert before != NONE
    assert (after == NONE) == (asked_for == "1")
