"""Tests that plans copy a slice of a gradient, if the slice is read much later than the rest.

A slice is a view, which would keep the whole gradient in memory. Copying changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import rekindle
from rekindle.planners import KeepAll, RecomputeAll
from rekindle.pytorch.planned import _backend, _prices
from rekindle.pytorch.planned._late_slices import copy_late_slices
from tests.helpers import own_cache
from tests.pytorch.harsh import differing, everything
from tests.pytorch.networks import UNet

CLONE = "aten.clone.default"


pytestmark = pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled")


def unet() -> nn.Module:
    torch.manual_seed(3)
    return UNet(width=4, levels=3)


def images() -> Tensor:
    return torch.randn(2, 1, 21, 22, generator=torch.Generator().manual_seed(4))


def step(model: nn.Module) -> Tensor:
    loss = model(images()).square().mean()
    loss.backward()
    return loss.detach()


def copies(plan: Any) -> int:
    return sum(op.name == CLONE for op in plan.trace.ops)


def test_plan_that_copies_late_gradient_slice_has_lower_peak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Count no workspaces: in such a small network, those of convolutions would make up the peak.
    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path)))
    monkeypatch.setattr(_prices, "_most_at_once", lambda call, device: 0)
    spared = rekindle.plan(unet(), images(), budget=1, planner=RecomputeAll())
    monkeypatch.setattr(_backend, "copy_late_slices", lambda module: False)
    torch._dynamo.reset()
    plain = rekindle.plan(unet(), images(), budget=1, planner=RecomputeAll())
    assert (copies(spared), copies(plain)) == (2, 0)
    assert spared.smallest_budget < plain.smallest_budget


@pytest.mark.slow
def test_plan_that_copies_late_gradient_slice_matches_pytorch() -> None:
    plain, model = unet(), unet()
    wanted = everything((step(plain), plain))
    least = rekindle.plan(model, images(), budget=1, planner=RecomputeAll()).smallest_budget
    plan = rekindle.plan(model, images(), budget=least, planner=RecomputeAll())
    assert copies(plan) == 2
    assert differing(everything((step(plan.apply()), model)), wanted) == []


def test_plan_with_ample_budget_copies_no_gradient_slice() -> None:
    assert copies(rekindle.plan(unet(), images(), budget="1GB", planner=KeepAll())) == 0


def later(x: Tensor, times: int = 20) -> Tensor:
    for _ in range(times):
        x = x.sin()
    return x


def waits(whole: Tensor, other: Tensor) -> Tensor:
    whole = whole.cos()
    return later(whole[:2]) + (whole[2:] + later(other))


def both_wait(whole: Tensor, other: Tensor) -> Tensor:
    whole = whole.cos()
    late = later(other)
    return (whole[:2] + late) + (whole[2:] + late)


def is_wanted_soon(whole: Tensor, other: Tensor) -> Tensor:
    whole = whole.cos()
    return later(whole[:2] + whole[2:] + other)


def is_multiplied(whole: Tensor, other: Tensor) -> Tensor:
    whole = whole.cos()
    return later(whole[:2]) + whole[2:] @ later(other)


def is_returned(whole: Tensor, other: Tensor) -> Any:
    whole = whole.cos()
    return later(whole[:2]) + (whole[2:] + later(other)), whole.view(-1)


def is_an_input(whole: Tensor, other: Tensor) -> Tensor:
    return later(whole[:2]) + (whole[2:] + later(other))


@pytest.mark.parametrize(
    ("program", "copied"),
    [
        (waits, 1),
        (both_wait, 0),
        (is_wanted_soon, 0),
        (is_multiplied, 0),
        (is_returned, 0),
        (is_an_input, 0),
    ],
)
def test_plan_copies_slice_only_if_that_frees_rest_of_gradient(
    program: Callable[..., Any], copied: int
) -> None:
    given = torch.randn(4, 2), torch.randn(2, 2)
    module: fx.GraphModule = make_fx(program, tracing_mode="fake")(*given)
    assert copy_late_slices(module) == bool(copied)
    clones = module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert len(clones) == copied
    module.recompile()
    module.graph.lint()
    torch.testing.assert_close(module(*given), program(*given), rtol=0, atol=0)
