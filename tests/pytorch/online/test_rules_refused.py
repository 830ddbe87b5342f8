"""Tests of rule R11 (refuse loudly): a program that cannot work raises at once, with advice.

Programs with `torch.func` that can work have tests here, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import rekindle
from tests.pytorch.harsh import WIDTH, deeper, differing, everything, vector

TIGHT = 14 * 4 * WIDTH
ROOMY = 1_000 * 4 * WIDTH


def test_nested_budget_is_refused() -> None:
    with rekindle.budget(ROOMY), pytest.raises(rekindle.Unsupported, match="one budget"):
        rekindle.budget(ROOMY).__enter__()


def test_same_budget_object_entered_twice_is_refused() -> None:
    context = rekindle.budget(ROOMY)
    with context:
        pass
    with pytest.raises(rekindle.Unsupported, match=r"write a new rekindle\.budget"):
        context.__enter__()


def test_budget_inside_torch_func_transform_is_refused() -> None:
    def inside(x: Tensor) -> Tensor:
        with rekindle.budget(ROOMY):
            return x.sin().sum()

    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(rekindle.Unsupported, match=r"loss\.backward\(\)"):
            transform(inside)(torch.ones(3, 2) if transform is torch.func.vmap else torch.ones(3))


TRANSFORMS: dict[str, Callable[[Tensor], object]] = {
    "grad": lambda x: torch.func.grad(lambda x: deeper(x).sum())(x),
    "vjp": lambda x: torch.func.vjp(deeper, x)[1](x),
    "jacrev": lambda x: torch.func.jacrev(lambda x: x[:3].sin())(x),
    "hessian": lambda x: torch.func.hessian(lambda x: deeper(x).sum())(x[:3]),
    "vmap of grad": lambda x: torch.func.vmap(torch.func.grad(lambda x: deeper(x).sum()))(
        x[:6].reshape(2, 3)
    ),
    "functional jacobian": lambda x: torch.autograd.functional.jacobian(
        lambda x: x[:3].sin().sum(), x, vectorize=True
    ),
}


# a warning of torch.func itself
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_transforms_inside_budget_match_pytorch(name: str) -> None:
    x = vector()
    plain = TRANSFORMS[name](x)

    def within() -> object:
        with rekindle.budget(ROOMY):
            return TRANSFORMS[name](x)

    assert differing(everything(within()), everything(plain)) == []


def test_saved_tensor_hooks_in_torch_func_raise_pytorchs_error() -> None:
    def same(x: Tensor) -> Tensor:
        return x

    hooks = saved_tensors_hooks(same, same)
    refused = pytest.raises(RuntimeError, match="support saved tensor hooks")
    with refused as caught, rekindle.budget(ROOMY), hooks:
        torch.func.grad(lambda x: deeper(x).sum())(vector())
    assert type(caught.value) is RuntimeError


def test_torch_func_grad_within_small_budget_matches_pytorch() -> None:
    """Values that the transform holds are evicted like user-held values."""
    x = vector()
    wanted = TRANSFORMS["grad"](x)
    with rekindle.budget(None) as plain:
        TRANSFORMS["grad"](x)
    budget = int(0.7 * plain.peak)
    with rekindle.budget(budget) as run:
        got = TRANSFORMS["grad"](x)
    assert differing(everything(got), everything(wanted)) == []
    assert run.peak <= budget
    assert run._driver.evictions


# a warning of torch.func itself
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_gradient_inside_budget_matches_pytorch() -> None:
    x = vector()
    wanted = torch.func.jvp(deeper, (x,), (torch.ones_like(x),))
    with rekindle.budget(ROOMY):
        got = torch.func.jvp(deeper, (x,), (torch.ones_like(x),))
    assert differing(everything(got), everything(wanted)) == []


def test_torch_func_vmap_inside_budget_matches_pytorch() -> None:
    x = torch.rand(20, 50, requires_grad=True)

    def loss() -> Tensor:
        return torch.func.vmap(lambda row: deeper(row).sum() * row.max())(x).sum()

    (plain,) = torch.autograd.grad(loss(), x)
    with rekindle.budget(TIGHT) as run:
        (gradient,) = torch.autograd.grad(loss(), x)
    assert run.evictions > 0
    assert torch.equal(gradient, plain)
