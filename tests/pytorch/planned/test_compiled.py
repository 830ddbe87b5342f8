"""Tests of `rekindle.plan(..., compile=True)`: Inductor compiles segments of a plan.

A segment is a part of the model's operators that is compiled as one function. Most tests here run
the operators of a segment one by one in place of Inductor's code. So they compare the code around
segments with eager PyTorch bit for bit, within seconds. Tests that compile are slow.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import rekindle
from rekindle import ModelPlan
from rekindle.planners import Cuts, KeepAll, RecomputeAll, Status
from rekindle.pytorch.planned import _cut, _segments
from rekindle.pytorch.planned._cut import Cut
from rekindle.pytorch.planned._joint import Joint
from tests.pytorch.allocations import allocated
from tests.pytorch.harsh import differing, everything
from tests.pytorch.planned.helpers import training_on

ROWS, WIDTH = 64, 32
leave_out_slow = Cut.leave_out_slow
Step = Callable[[nn.Module], Any]

pytestmark = pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled")


def by_inductor(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test that compiles with Inductor."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.timeout(900),
        pytest.mark.filterwarnings("ignore:.*torch.jit"),  # a warning when Inductor is imported
        pytest.mark.usefixtures("kernels"),
        pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
    ):
        test = mark(test)
    return test


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """Make segments run their operators one by one, and list the graphs that Inductor would get."""
    made: list[fx.Graph] = []

    def run(graph: fx.Graph) -> Callable[[list[Any]], Sequence[Tensor]]:
        made.append(graph)
        module = fx.GraphModule({}, graph)

        def boxed(args: list[Any]) -> Sequence[Tensor]:
            given = [*args]
            args.clear()
            for node, each in zip(graph.find_nodes(op="placeholder"), given, strict=True):
                assert each.stride() == node.meta["val"].stride()  # compiled code asserts the same
            return module(*given)

        return boxed

    monkeypatch.setattr(_segments, "_compile", run)
    monkeypatch.setattr(_segments, "_known", {})
    monkeypatch.setattr(Cut, "leave_out_slow", lambda cut, written: False)
    return made


class Net(nn.Module):
    """A residual network with norms, gates and dropout: light operators between matrix products."""

    def __init__(self, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)]
            )
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(x))
        for norm, widen, narrow in self.layers:  # type: ignore[misc]
            gate, value = widen(norm(x)).chunk(2, dim=1)
            x = x + self.dropout(narrow(F.silu(gate) * torch.tanh(value)))
        return x


def batch(number: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


train = training_on(batch)


def ample(model: nn.Module, inputs: Any) -> ModelPlan:
    return rekindle.plan(model, inputs, budget="1GB", planner=KeepAll(), compile=True)


def tight(model: nn.Module, inputs: Any) -> ModelPlan:
    """Return a plan that recomputes as much as possible, within the smallest budget for that."""
    refused = rekindle.plan(model, inputs, budget=1, planner=RecomputeAll(), compile=True)
    assert refused.status is Status.INFEASIBLE
    budget = refused.smallest_budget
    plan = rekindle.plan(model, inputs, budget=budget, planner=RecomputeAll(), compile=True)
    assert plan.overhead
    return plan


def outcome(
    build: Callable[[], nn.Module],
    step: Step,
    planned: Callable[[nn.Module, Any], ModelPlan] | None,
    inputs: Any = None,
) -> dict[str, Any]:
    torch.manual_seed(20)
    model = build()
    runs = model
    if planned is not None:
        runs = planned(model, (batch(),) if inputs is None else inputs).apply()
    torch.manual_seed(21)
    return everything((step(runs), model))


def same(build: Callable[[], nn.Module], step: Step = train, inputs: Any = None) -> None:
    """Assert that a compiled plan gives the model's results, with and without recomputation."""
    wanted = outcome(build, step, None)
    for planned in (ample, tight):
        assert differing(outcome(build, step, planned, inputs), wanted) == []


def test_compiled_plan_with_dropout_and_norm_matches_pytorch(one_by_one: list[fx.Graph]) -> None:
    same(Net)
    assert one_by_one


def test_equal_segments_of_plan_are_compiled_once(one_by_one: list[fx.Graph]) -> None:
    plan = ample(Net(2), batch())
    few = len(one_by_one)
    calls = len(plan._planned.segments)
    more = ample(Net(8), batch())
    assert len(one_by_one) == few
    assert len(more._planned.segments) > 2 * calls
    assert f"of {few} segments" in str(more)


def test_plans_of_two_budgets_have_same_compiled_segments(one_by_one: list[fx.Graph]) -> None:
    model = Net()
    first = ample(model, batch())
    made = len(one_by_one)
    other = tight(model, batch())
    assert len(one_by_one) == made
    assert first._planned.segments == other._planned.segments


class Recurrent(nn.Module):
    """A cell whose gates are the norm of a sum of two products, applied to a state."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = (nn.Linear(WIDTH, 3 * WIDTH) for _ in "ab")
        self.norm = nn.LayerNorm(3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x
        for _ in range(4):
            f, i, o = self.norm(self.of_input(x) + self.of_state(h)).chunk(3, dim=1)
            c = torch.sigmoid(f) * c + torch.tanh(i)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


def test_compiled_segment_recomputes_norm_from_stored_sum(
    one_by_one: list[fx.Graph],
) -> None:
    """The segment that recomputes a norm reads the sum, and not the two summands."""
    same(Recurrent)
    norms = [
        node
        for graph in one_by_one
        for node in graph.nodes
        if node.target is torch.ops.aten.native_layer_norm.default
    ]
    assert norms
    assert all(node.args[0].op == "placeholder" for node in norms)


def test_compiled_segment_slower_than_operators_is_not_called(
    monkeypatch: pytest.MonkeyPatch, one_by_one: list[fx.Graph]
) -> None:
    """The next plan does not call the segment either, because the measured result is stored."""
    monkeypatch.setattr(Cut, "leave_out_slow", leave_out_slow)
    monkeypatch.setattr(_cut, "_is_slow", {})
    monkeypatch.setattr(Joint, "cost", lambda joint, node: len(joint.segments()))
    model = Net()
    assert not ample(model, batch())._planned.segments
    monkeypatch.setattr(Joint, "cost", lambda joint, node: -len(joint.segments()))
    assert not ample(model, batch())._planned.segments
    same(Net)


def test_compiled_plan_under_autocast_matches_pytorch(one_by_one: list[fx.Graph]) -> None:
    def step(model: nn.Module) -> Any:
        results = []
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(model(batch(number)))
            results[-1].square().mean().backward()
        return results

    same(Net, step)


def test_compiled_plan_with_tied_weights_matches_pytorch(
    one_by_one: list[fx.Graph],
) -> None:
    def build() -> nn.Module:
        model = Net()
        model.layers[2][1].weight = model.layers[0][1].weight  # type: ignore[index]
        model.layers[1][1].requires_grad_(False)  # type: ignore[index]
        return model

    same(build)


def test_compiled_plan_with_two_forward_passes_matches_pytorch(one_by_one: list[fx.Graph]) -> None:
    def step(model: nn.Module) -> None:
        first, second = model(batch(1)), model(batch(2))
        (first * second).mean().backward()

    same(Net, step)


@pytest.mark.slow
def test_compiled_plan_with_other_shape_or_eval_matches_pytorch(one_by_one: list[fx.Graph]) -> None:
    def step(model: nn.Module) -> Any:
        train(model)
        x = torch.randn(17, WIDTH, generator=torch.Generator().manual_seed(5))
        result = model(x)
        result.square().mean().backward()
        model.eval()
        with torch.no_grad():
            return result, model(x)

    same(Net, step)


class Several(nn.Module):
    """A model with three results, of which the loss may use only some, or a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(WIDTH),
            *(nn.Linear(WIDTH, WIDTH) for _ in "ab"),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tanh(self.norm(self.first(x))) * 2
        z = torch.sigmoid(self.second(y)) + y
        return y, z, torch.relu(y.t() - 1)


def given_to(loss_of: Callable[[Any], Tensor]) -> Step:
    def step(model: nn.Module) -> Any:
        found = model(batch())
        loss_of(found).backward()
        return found

    return step


def test_compiled_plan_with_unused_result_matches_pytorch(one_by_one: list[fx.Graph]) -> None:
    same(Several, given_to(lambda found: found[0].square().sum()))
    same(Several, given_to(lambda found: found[1].square().sum()))


def test_compiled_plan_with_strided_gradient_matches_pytorch(one_by_one: list[fx.Graph]) -> None:
    """A compiled segment (part of a plan) expects gradients in one memory layout.

    A gradient with other strides is first copied into that layout.
    """
    scale = torch.arange(WIDTH * ROWS).view(WIDTH, ROWS) / 1000
    step = given_to(lambda found: (found[1].t() * scale).sum() + found[2].square().sum())
    wanted = outcome(Several, step, None)
    found = outcome(Several, step, ample)
    assert differing(outcome(Several, step, tight), found) == []
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


class Writes(nn.Module):
    """A model that overwrites a buffer in place and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        self.seen.mul_(0.9).add_(y.detach().mean(0))
        return (torch.relu_(self.norm(y) * 2) + self.seen).square().mean(), x


def test_compiled_plan_updates_batch_norm_buffers_once(one_by_one: list[fx.Graph]) -> None:
    def step(model: nn.Module) -> Any:
        losses = []
        for number in range(3):
            loss, _ = model(batch(number))
            loss.backward()
            losses.append(loss.detach())
        return losses

    same(Writes, step)


def test_compiled_plan_computes_images_in_channels_last(one_by_one: list[fx.Graph]) -> None:
    """Results have the strides of plain PyTorch, and bits of sums in another order."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.second, self.last = nn.Conv2d(8, 4, 3), nn.Linear(4 * 36, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.relu(self.norm(self.first(x)))
            z = self.second(y)
            return z, self.last(torch.tanh(z + 1).flatten(1))

    def step(model: nn.Module) -> Any:
        results = model(images)
        sum(each.square().mean() for each in results).backward()
        return results

    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    wanted = outcome(Images, step, None)
    found = outcome(Images, step, ample, (images,))
    assert differing(outcome(Images, step, tight, (images,)), found) == []
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)
        if isinstance(value, Tensor):
            assert found[name].stride() == value.stride()


def test_plan_with_wrongly_compiled_segment_is_refused(
    monkeypatch: pytest.MonkeyPatch, one_by_one: list[fx.Graph]
) -> None:
    right = _segments._compile

    def wrong(graph: fx.Graph) -> Any:
        boxed = right(graph)
        return lambda args: [each * 1.01 for each in boxed(args)]

    monkeypatch.setattr(_segments, "_compile", wrong)
    # without a cache, so that costs of earlier tests are not known
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    with pytest.raises(rekindle.Unsupported, match=r"gives other results .*Leave out compile=True"):
        ample(Net(), batch())


def test_plan_whose_segment_fails_to_compile_raises_reason(
    monkeypatch: pytest.MonkeyPatch, one_by_one: list[fx.Graph]
) -> None:
    def broken(graph: fx.Graph) -> Any:
        raise FileNotFoundError("no g++ here")

    monkeypatch.setattr(_segments, "_compile", broken)
    with pytest.raises(rekindle.Unsupported, match=r"no g\+\+ here.*C\+\+ compiler"):
        ample(Net(), batch())


@by_inductor
def test_compiled_plan_gives_same_bits_at_every_budget() -> None:
    """The results also equal those of eager PyTorch within `torch.testing`'s tolerance."""
    wanted = outcome(Net, train, None)
    found = outcome(Net, train, ample)
    assert differing(outcome(Net, train, tight), found) == []
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


@by_inductor
def test_compiled_plan_stays_within_budget() -> None:
    """The peak is measured by the allocator's events, which include memory inside segments."""
    model, x = Net(6, dropout=0.0), torch.randn(2048, WIDTH)
    whole = rekindle.plan(model, (x,), budget="1GB", planner=KeepAll()).peak
    assert whole is not None
    budget = whole // 2
    plan = rekindle.plan(model, (x,), budget=budget, planner=Cuts(time_limit=3), compile=True)
    planned = plan.apply()
    gradient = torch.ones(2048, WIDTH)
    planned(x).backward(gradient)
    model.zero_grad()
    given = sum(each.nbytes for each in [x, *model.parameters(), *model.buffers()])
    peak = given + allocated(lambda: planned(x).backward(gradient)).peak
    assert given < peak - gradient.nbytes <= budget
