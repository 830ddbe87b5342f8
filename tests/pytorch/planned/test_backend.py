"""Tests of `rekindle.backend` for torch.compile: graph breaks, shared budgets, Inductor."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planners import Cuts, KeepAll, RecomputeAll
from tests.pytorch.allocations import allocated
from tests.pytorch.harsh import differing, everything
from tests.pytorch.planned.helpers import Onlooker

WIDTH = 32

pytestmark = [
    pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled"),
    # torch.compile reads the gradient of tensors that one graph passes to the next one.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Broken(nn.Module):
    """A model with a branch on data, at which torch.compile breaks the graph in two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._half(), self._half()

    def _half(self) -> nn.Module:
        layer = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)]
        return nn.Sequential(*layer, nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.isfinite().all():
            x = self.second(x)
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(3))


def outcome(compile_with: Any, model: nn.Module | None = None) -> tuple[Any, int]:
    """Return the results of two training steps, and the peak memory of both."""
    torch.manual_seed(20)
    model = model or Broken()
    runs = model if compile_with is None else torch.compile(model, backend=compile_with)
    torch.manual_seed(21)
    losses = []
    with Onlooker() as onlooker:
        for _ in range(2):
            loss = runs(batch())
            loss.backward()
            losses.append(loss.detach())
    return everything((losses, model)), onlooker.peak


@pytest.mark.parametrize("planner", [KeepAll(), RecomputeAll()], ids=lambda each: each.name)
def test_backend_with_inner_eager_matches_pytorch(planner: Any) -> None:
    wanted, _ = outcome(None)
    backend = rekindle.backend("1GB", planner=planner, inner="eager")
    found, peak = outcome(backend)
    assert differing(found, wanted) == []
    assert len(backend.graphs) == 2
    assert bool(backend.last.plan.overhead) == isinstance(planner, RecomputeAll)
    assert peak <= sum(graph.plan.peak for graph in backend.graphs.values())


def test_graphs_of_one_backend_share_budget() -> None:
    """The plan of each graph gets the memory that the plans of earlier graphs leave."""
    backend = rekindle.backend("1GB", planner=KeepAll(), inner="eager")
    left: list[int] = []

    def compiled() -> None:
        others = [graph for graph in backend.graphs.values() if graph is not backend.last]
        taken = [graph.saved + graph.parameters + graph.gradients for graph in others]
        assert all(taken)
        left.append(10**9 - sum(taken))
        assert backend.last.plan.budget == left[-1]

    backend.when_compiled = compiled
    outcome(backend)
    assert left[0] == 10**9
    assert left[1] < left[0]


def test_backend_with_too_small_budget_names_smallest_budget() -> None:
    backend = rekindle.backend("30KB", planner=RecomputeAll(), inner="eager")
    with pytest.raises(Exception, match="smallest") as caught:
        outcome(backend)
    inner = getattr(caught.value, "inner_exception", None)
    assert isinstance(inner, rekindle.OutOfBudget)
    assert inner.smallest_budget > 30_000


def test_backend_with_symbolic_sizes_is_refused() -> None:
    compiled = torch.compile(
        nn.Linear(4, 4),
        backend=rekindle.backend("1GB", planner=KeepAll(), inner="eager"),
        dynamic=True,
    )
    with pytest.raises(Exception, match="dynamic=False"):
        compiled(torch.randn(5, 4))


@pytest.mark.parametrize("wrong", [{"inner": "fast"}, {"shapes": "any"}])
def test_backend_with_wrong_option_suggests_line_to_write(wrong: dict[str, Any]) -> None:
    with pytest.raises(rekindle.Unsupported, match=r"write (inner|shapes)="):
        rekindle.backend("1GB", **wrong)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_backend_with_inductor_matches_compile_within_rounding() -> None:
    """Results differ from plain torch.compile by at most 1e-4 of the largest number.

    The reason is another order of sums.
    """

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.layers = nn.Sequential(
                *(
                    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
                    for _ in range(2)
                )
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.norm(x)).square().mean()

    def build() -> nn.Module:
        torch.manual_seed(20)
        return Whole()

    wanted, _ = outcome("inductor", build())
    torch._dynamo.reset()
    backend = rekindle.backend("1GB", planner=RecomputeAll())
    found, _ = outcome(backend, build())
    assert backend.last.plan.overhead
    for name, value in wanted.items():
        if name != "generator":
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_backend_reports_memory_of_step_before_it_compiles() -> None:
    reported: list[str] = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
    backend = rekindle.backend("1GB", planner=KeepAll())
    backend._report = reported.append
    torch.compile(model, backend=backend)(batch()).square().sum().backward()
    (before,) = (line for line in reported if line.startswith("before compilation"))
    later = reported[reported.index(before) :]
    assert "a step, nothing evicted" in before
    assert any("(compiled(" in line or "compiling segment" in line for line in later)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(norm(layer(x)))
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_backend_with_inductor_stays_within_budget() -> None:
    """The peak is measured by the allocator's events, which include memory inside compiled code."""
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(1024, WIDTH)
    whole = rekindle.plan(model, (x,), budget="1GB", planner=KeepAll()).peak
    assert whole is not None
    budget = int(0.5 * whole)
    compiled = torch.compile(model, backend=rekindle.backend(budget, planner=Cuts(time_limit=3)))
    compiled(x).backward()
    model.zero_grad()
    given = sum(each.nbytes for each in [x, *model.parameters(), *model.buffers()])
    peak = given + allocated(lambda: compiled(x).backward()).peak
    assert given < peak <= budget
