"""Tests of planned models whose traced operators may differ from those that eager PyTorch runs.

The plan gives equal bits, or `rekindle.plan` raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planners import KeepAll, Planner, RecomputeAll
from tests.pytorch.harsh import differing, everything

Loss = Callable[[Any], Tensor]


pytestmark = pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled")


def trained(model: nn.Module, run: nn.Module, x: Tensor, loss_of: Loss) -> dict[str, Any]:
    torch.manual_seed(21)
    result = run(x)
    loss_of(result).backward()
    return everything((result, model))


def same(
    build: Callable[[], nn.Module], x: Tensor, loss_of: Loss, *, check: bool = False
) -> list[nn.Module]:
    """Assert that the planned model equals the plain one, with and without recomputation.

    With `check=False`, `rekindle.plan` does not compare results itself.
    """
    torch.manual_seed(20)
    plain = build()
    wanted = trained(plain, plain, x, loss_of)
    planners: list[Planner] = [KeepAll(), RecomputeAll()]
    models = []
    for planner in planners:
        torch.manual_seed(20)
        model = build()
        plan = rekindle.plan(model, x, budget="1GB", planner=planner, check=check)
        assert differing(trained(model, plan.apply(), x, loss_of), wanted) == []
        models.append(model)
    return models


def images() -> Tensor:
    made = torch.randn(4, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    return made.to(memory_format=torch.channels_last)


def convolutions(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.GELU(), *more, nn.Conv2d(32, 3, 1))


def test_planned_dropout_mask_has_strides_of_its_input() -> None:
    same(lambda: convolutions(nn.Dropout(0.3)), images(), lambda y: y.square().mean())


class WithFeatures(nn.Module):
    """A model that returns a loss, the value `y` from which it is computed, and another value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convolutions()
        self.resized = nn.Upsample(scale_factor=3, mode="bilinear")
        self.aside = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        resized = self.resized(y).contiguous()
        aside = self.aside(y.mean((2, 3)))
        return {"loss": resized.log_softmax(1).square().mean(), "y": y, "aside": aside}


def test_planned_model_with_unused_result_matches_pytorch() -> None:
    """The unused results get no gradients. Zeros as gradients would change the order of sums.

    Parameters on which the loss does not depend would also get zero gradients instead of none.
    """
    for model in same(WithFeatures, images(), lambda found: found["loss"]):
        assert model.get_submodule("aside").weight.grad is None


def test_planned_model_with_loss_of_some_results_matches_pytorch() -> None:
    same(WithFeatures, images(), lambda found: found["y"].square().sum())
    same(WithFeatures, images(), lambda found: found["aside"].sum() + found["loss"])
    same(WithFeatures, images(), lambda found: sum(each.sum() for each in found.values()))


def test_planned_model_with_strided_gradient_matches_pytorch() -> None:
    """The result is channels-last, but its gradient is not, and must not be converted."""
    given = torch.randn(4, 3, 14, 14, generator=torch.Generator().manual_seed(2))
    same(convolutions, images(), lambda y: (y.contiguous() * given).sum())
    same(convolutions, images(), lambda y: (y.transpose(2, 3).contiguous() * given).sum())


class Flat(nn.Module):
    """A model that returns views of a layer's result, with strides that traces do not predict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(y.relu()).square().mean()


def test_planned_kernel_with_other_strides_matches_pytorch() -> None:
    same(Flat, torch.randn(8, 6, 32), lambda loss: loss)


class AsksForCompilers(nn.Module):
    """A model that takes another code path under a compiler, with other last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if torch.compiler.is_compiling():
            return (y.flip(0) / 3).sum(0).square().sum()
        return (y / 3).sum(0).square().sum()


def test_plan_of_model_that_checks_for_compiler_traces_eager() -> None:
    same(AsksForCompilers, torch.randn(1_000, 32), lambda loss: loss)
    model = AsksForCompilers()
    plan = rekindle.plan(model, torch.randn(10, 32), budget="1GB", planner=KeepAll())
    assert plan.path == "eager"


class CannotBeTraced(nn.Module):
    """A model that branches on data in eager PyTorch, and runs `instead` under a compiler."""

    def __init__(self, instead: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.instead = nn.Linear(32, 32), instead

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if torch.compiler.is_compiling():
            y = self.instead(y)
        elif y.isfinite().all():
            y = y * 2
        return y.square().mean()


def test_plan_traces_compiled_path_if_eager_cannot_be_traced() -> None:
    model = CannotBeTraced(lambda y: y + y)
    plan = rekindle.plan(model, torch.randn(64, 32), budget="1GB", planner=KeepAll())
    assert plan.path == "compiled"
    assert "traced as for a compiler" in plan.report()


def test_plan_whose_results_differ_from_model_is_refused() -> None:
    model, x = CannotBeTraced(lambda y: y * 2.001), torch.randn(64, 32)
    with pytest.raises(
        rekindle.Unsupported, match=r"differ from those .*another path when a compiler"
    ):
        rekindle.plan(model, x, budget="1GB", planner=KeepAll())
    plan = rekindle.plan(model, x, budget="1GB", planner=KeepAll(), check=False)
    assert plan.apply()(x) != model(x)


@torch.library.custom_op("rekindle_tests::broken", mutates_args=())
def broken(x: Tensor) -> Tensor:
    raise ValueError("out of order")


@torch.library.custom_op("rekindle_tests::unsteady", mutates_args=())
def unsteady(x: Tensor) -> Tensor:
    return x * random.SystemRandom().random()


for operator in (broken, unsteady):
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda _, gradient: gradient)


def test_plan_of_model_that_raises_only_if_traced_is_refused() -> None:
    model, x = CannotBeTraced(broken), torch.randn(64, 32)
    before = everything(model)
    with pytest.raises(rekindle.Unsupported, match=r"raises an error .*out of order") as caught:
        rekindle.plan(model, x, budget="1GB", planner=KeepAll())
    assert isinstance(caught.value.__cause__, ValueError)
    assert differing(everything(model), before) == []


def test_plan_of_nondeterministic_model_is_refused() -> None:
    class Unsteady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return unsteady(self.layer(x)).square().mean()

    with pytest.raises(rekindle.Unsupported, match="give different results"):
        rekindle.plan(Unsteady(), torch.randn(64, 32), budget="1GB", planner=KeepAll())


def test_plan_of_model_that_raises_gives_error_of_model() -> None:
    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return broken(self.layer(x)).square().mean()

    with pytest.raises(ValueError, match="out of order"):
        rekindle.plan(Deaf(), torch.randn(64, 32), budget="1GB", planner=KeepAll())


def test_check_of_plan_leaves_state_of_model_unchanged() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 1))
    x = torch.randn(64, 32)
    model(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = everything(model)
    rekindle.plan(model, x, budget="1GB", planner=KeepAll())
    assert differing(everything(model), before) == []
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_plan_is_made_although_plain_model_needs_larger_budget() -> None:
    """`rekindle.plan` also runs the plain model, to compare the bits.

    That run may use more memory than the budget of the plan.
    """
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    x = torch.randn(512, 64)
    refused = rekindle.plan(model, x, budget=1, planner=RecomputeAll())
    plan = rekindle.plan(model, x, budget=refused.smallest_budget, planner=RecomputeAll())
    assert plan.peak is not None
    assert plan.peak <= refused.smallest_budget


def test_planned_model_without_gradients_matches_pytorch() -> None:
    """Fake tensors have other strides than the results of real kernels."""

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                nn.Linear(32, 32),
                nn.BatchNorm1d(32),
                nn.Linear(32, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2).relu())

    kinds: list[tuple[nn.Module, Tensor, bool]] = [
        (Sequences(), torch.randn(8, 6, 32), False),
        (Sequences(), torch.randn(8, 6, 32), True),
        (convolutions(nn.Dropout(0.3)), images(), True),
    ]
    for model, x, trains in kinds:
        planned = rekindle.plan(model, x, budget="1GB", planner=KeepAll()).apply().train(trains)
        model.train(trains)
        with torch.no_grad():
            torch.manual_seed(0)
            wanted = model(x)
            torch.manual_seed(0)
            assert torch.equal(planned(x), wanted)


def test_hook_that_is_added_to_planned_model_runs() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)
    planned = rekindle.plan(model, x, budget="1GB", planner=KeepAll()).apply()
    planned(x).sum().backward()
    called: list[int] = []
    planned[0].register_forward_hook(lambda *_: called.append(1))
    planned(x).sum().backward()
    assert called == [1]
