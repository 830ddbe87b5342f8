"""Tests of invertible networks: a layer frees its input and restores it in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.pytorch.harsh import WIDTH, deeper, harshest, vector


class Shift(torch.autograd.Function):
    """`x + weight`, which frees the memory of `x` until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.x, ctx.y = x, (x + weight).detach()
        x.untyped_storage().resize_(0)
        return ctx.y.view_as(ctx.y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        x: Tensor = ctx.x
        with torch.no_grad():
            x.untyped_storage().resize_(4 * WIDTH)
            x.copy_(ctx.y - weight)
        return gradient * x.cos(), gradient


@pytest.mark.filterwarnings("ignore:.*saved tensor")
@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_storage_that_program_frees_and_restores_matches_pytorch(
    evict: Literal["saved", "anything"],
) -> None:
    """Values computed before the free are recomputed from the old contents of the storage.

    Rules R3, in-place writes; R4, sources.
    """

    def program() -> Callable[[], object]:
        weight, batch = vector(True), vector()

        def step() -> object:
            hidden = (batch * weight).sin()
            before = deeper(hidden.detach() + weight, 3)
            for _ in range(3):
                hidden = Shift.apply(hidden, weight)
            loss = hidden.square().sum() + before.sum()
            del hidden, before
            loss.backward()
            return weight, loss

        return step

    harshest(program, evict=evict, resized=True)
