"""Tests that Rekindle predicts the size of results, and frees memory before an operator runs.

This holds also for the first run of an operator.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F

import rekindle
from rekindle.pytorch.operators import _operators
from tests.pytorch import cores
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


@pytest.fixture(autouse=True)
def _met_for_the_first_time() -> None:
    cores.forget_signatures()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_result_size_of_loss_is_predicted(name: str, reduction: str) -> None:
    """Some losses return one number, but first allocate a result as large as the input."""
    x, y = torch.rand(10, 30), torch.rand(10, 30)
    amount = x.nbytes + y.nbytes + 100
    with Tracker() as tracker, suppress(rekindle.OutOfBudget), rekindle.budget(amount):
        getattr(F, name)(x, y, reduction=reduction)
    assert tracker.peak <= amount


def test_result_size_of_loss_with_two_dtypes_is_predicted() -> None:
    """With a bfloat16 input and a float32 target, the result has the larger dtype."""
    x, y = torch.rand(10, 30), torch.rand(10, 30).bfloat16()
    amount = x.nbytes + y.nbytes + y.nbytes + 100
    for one, other in ((x, y), (y, x)):
        with Tracker() as tracker, suppress(rekindle.OutOfBudget), rekindle.budget(amount):
            F.smooth_l1_loss(one, other)
        assert tracker.peak <= amount


OF_TWO_KERNELS = {
    "silu_backward": lambda x: torch.ops.aten.silu_backward(x, x),
    "mish_backward": lambda x: torch.ops.aten.mish_backward(x, x),
    "native_channel_shuffle": lambda x: torch.native_channel_shuffle(x, 2),
}


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("name", OF_TWO_KERNELS)
def test_result_of_composite_operator_with_kernel_counts_once(name: str, grad_mode: bool) -> None:
    """PyTorch can compute the operator from others, but has a kernel for it on the CPU."""
    x = torch.rand(1, 4, 10, 30)
    with rekindle.budget("1MiB") as run, torch.set_grad_enabled(grad_mode):
        x.sin()
        before = run.memory
        result = OF_TWO_KERNELS[name](x)
        assert run.memory == before + result.nbytes


def test_list_of_composite_operators_with_kernels_is_complete() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel(name)
        if has_kernel(name, "CompositeImplicitAutograd") and has_kernel(name, "CPU")
    ]
    assert sorted(found) == sorted(f"aten::{name}" for name in OF_TWO_KERNELS)


def test_result_size_of_fold_is_predicted() -> None:
    patches = torch.rand(2, 9, 64)
    amount = patches.nbytes + 2 * 64 * 4 + 100
    with Tracker() as tracker, suppress(rekindle.OutOfBudget), rekindle.budget(amount) as run:
        F.fold(patches, (8, 8), 3, padding=1)
    assert max(tracker.peak, run.peak) <= amount


CHOOSING = {
    "what is not zero": lambda x: x.nonzero(),
    "by a mask": lambda x: x[x > 0.9],
    "by a mask of rows": lambda x: x[x[:, 0] > 0.5],
    "by a mask, spread out": lambda x: torch.masked_select(x, x[:1] > 0.9),
    "different ones": lambda x: x.mul(9).int().unique(return_inverse=True, return_counts=True),
    "different rows": lambda x: torch.unique(x.mul(2).int(), dim=0, return_inverse=True),
    "runs": lambda x: x.mul(2).int().unique_consecutive(return_inverse=True),
    "counted": lambda x: torch.bincount(x.mul(90).long().view(-1)),
    "repeated": lambda x: torch.repeat_interleave(x.mul(9).long().view(-1)),
}


@pytest.mark.parametrize("more", [0, 40, 4_000])
@pytest.mark.parametrize("name", CHOOSING)
def test_data_dependent_result_size_above_budget_is_reported(name: str, more: int) -> None:
    """Before the call, only bounds of the size are known; they are no reason to raise.

    Either the result fits, or `OutOfBudget` is raised.
    """
    x = torch.rand(10, 30, generator=torch.Generator().manual_seed(0))
    amount = x.nbytes + more
    reported = False
    with Tracker() as tracker, rekindle.budget(amount) as run:
        try:
            CHOOSING[name](x)
        except rekindle.OutOfBudget:
            reported = True
    assert reported or max(tracker.peak, run.peak) <= amount


def test_each_operator_that_reduces_in_place_is_tested() -> None:
    tested = {f"aten::{name}" for name in (*LOSSES, "col2im")}
    assert tested >= _operators.REDUCED_IN_PLACE
