"""Room for what an operator makes is there before it runs for the first time."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F

import rekindle
from rekindle.pytorch.operators import _operators, _signature
from tests.pytorch.tracker import Tracker

LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of some is one number in the memory of as many as there are elements."""
    monkeypatch.setattr(_signature, "_signatures", {})
    x, y = torch.rand(10, 30), torch.rand(10, 30)
    amount = x.nbytes + y.nbytes + 100
    with Tracker() as tracker, suppress(rekindle.OutOfBudget), rekindle.budget(amount):
        getattr(F, name)(x, y, reduction=reduction)
    assert tracker.peak <= amount


def test_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_signature, "_signatures", {})
    patches = torch.rand(2, 9, 64)
    amount = patches.nbytes + 2 * 64 * 4 + 100
    with Tracker() as tracker, suppress(rekindle.OutOfBudget), rekindle.budget(amount):
        F.fold(patches, (8, 8), 3, padding=1)
    assert tracker.peak <= amount


def test_all_that_do_so_are_among_them() -> None:
    tested = {f"aten::{name}" for name in (*LOSSES, "col2im")}
    assert tested >= _operators.REDUCED_IN_PLACE
