"""Tests of planned and compiled models with `evict="anything"`.

Their arguments and results are user-held values, which may be evicted like all others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Run
from tests.pytorch.harsh import differing, everything

WIDTH, BATCH = 64, 512
NBYTES = 4 * WIDTH * BATCH


pytestmark = [
    pytest.mark.filterwarnings("default"),  # a warning of the compiler itself
    pytest.mark.usefixtures("kernels", "nothing_left_compiled"),
]


@pytest.fixture(scope="module")
def inner() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def trained(
    inner: Callable[[Tensor], Tensor], model: nn.Module, budget: int | None
) -> tuple[dict[str, object], Run]:
    """Return the gradients of a step that holds twelve values, one of them made by `inner`."""
    model.zero_grad()
    kept = [torch.linspace(-1.0, 1.0, WIDTH * BATCH).view(BATCH, WIDTH).requires_grad_()]
    evict = "saved" if budget is None else "anything"
    with rekindle.budget(budget, evict=evict) as run:  # type: ignore[arg-type]
        for number in range(12):
            middle = inner(kept[-1]) if number == 5 else kept[-1].sin()
            kept.append(middle * 1.01)
        torch.stack([each.sum() for each in kept]).sum().backward()
    return everything((kept[0].grad, model)), run


def test_planned_model_within_evict_anything_matches_pytorch(inner: nn.Sequential) -> None:
    planned = rekindle.plan(inner, (torch.rand(BATCH, WIDTH),), budget=8 * NBYTES).apply()
    wanted, roomy = trained(inner, inner, None)
    got, run = trained(planned, inner, int(0.7 * roomy.peak))
    assert differing(got, wanted) == []
    assert run.recomputations > 0
    assert run.peak <= int(0.7 * roomy.peak)


@pytest.mark.slow
def test_compiled_model_within_evict_anything_matches_pytorch(inner: nn.Sequential) -> None:
    compiled = torch.compile(inner)
    for _ in range(2):  # after that the workspace of the compiled region is known
        wanted, roomy = trained(compiled, inner, None)
    got, run = trained(compiled, inner, int(0.7 * roomy.peak))
    assert differing(got, wanted) == []
    assert run.recomputations > 0
    assert run.peak <= int(0.7 * roomy.peak)
