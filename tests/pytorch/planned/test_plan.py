"""Tests that planned models equal plain models bit for bit; each test uses one PyTorch feature."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle import ModelPlan
from rekindle.planners import Cuts, KeepAll, RecomputeAll, Status
from tests.helpers import own_cache
from tests.pytorch.harsh import differing, everything
from tests.pytorch.planned.helpers import Onlooker, training_on
from tests.pytorch.tracker import Tracker

ROWS, WIDTH = 256, 32
Step = Callable[[nn.Module], Any]


pytestmark = pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled")


def mlp(*between: Callable[[], nn.Module], layers: int = 4) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), *(make() for make in between), nn.GELU()]
    return nn.Sequential(*parts)


def batch(number: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


train = training_on(batch)


def tight(model: nn.Module, inputs: Any, **options: Any) -> ModelPlan:
    """Return a plan that recomputes as much as possible, within the smallest budget for that."""
    refused = rekindle.plan(model, inputs, budget=1, planner=RecomputeAll(), **options)
    assert refused.status is Status.INFEASIBLE
    plan = rekindle.plan(
        model, inputs, budget=refused.smallest_budget, planner=RecomputeAll(), **options
    )
    assert plan.overhead
    return plan


def same(
    build: Callable[[], nn.Module], step: Step, inputs: Any = None, **options: Any
) -> nn.Module:
    """Run `step` with a plain and with a planned model, and assert that no result differs."""
    torch.manual_seed(20)
    plain = build()
    torch.manual_seed(21)
    wanted = everything((step(plain), plain))

    torch.manual_seed(20)
    model = build()
    plan = tight(model, (batch(),) if inputs is None else inputs, **options)
    torch.manual_seed(21)
    planned = plan.apply()
    assert differing(everything((step(planned), model)), wanted) == []
    return planned


def test_planned_model_with_dropout_matches_pytorch() -> None:
    same(lambda: mlp(lambda: nn.Dropout(0.3)), train)


def test_planned_model_updates_batch_norm_statistics_once() -> None:
    same(lambda: mlp(lambda: nn.BatchNorm1d(WIDTH)), train)


def test_planned_model_with_in_place_activation_matches_pytorch() -> None:
    same(lambda: mlp(lambda: nn.LayerNorm(WIDTH), lambda: nn.ReLU(inplace=True)), train)


def test_planned_model_under_autocast_matches_pytorch() -> None:
    # Each forward pass has its own autocast context, because eager PyTorch reuses the casts of
    # weights within one context.
    def step(model: nn.Module) -> Any:
        results = []
        for number in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(model(batch(number)))
            results[-1].square().mean().backward()
        return results

    with torch.autocast("cpu", torch.bfloat16):
        refused = rekindle.plan(mlp(), batch(), budget=1, planner=RecomputeAll())
    assert any(op.name == "aten._to_copy.default" for op in refused.trace.ops)
    same(mlp, step)


def test_planned_model_with_frozen_parameters_matches_pytorch() -> None:
    def build() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        model[4].bias.requires_grad_(False)
        return model

    planned = same(build, train)
    assert planned[0].weight.grad is None


def test_planned_model_with_tied_weights_matches_pytorch() -> None:
    def build() -> nn.Module:
        model = mlp()
        model[4].weight = model[2].weight = model[0].weight
        return model

    same(build, train)


def test_planned_model_accumulates_gradients_like_pytorch() -> None:
    def step(model: nn.Module) -> None:
        for number in range(3):
            (model(batch(number)).square().mean() / 3).backward()

    same(lambda: mlp(lambda: nn.Dropout(0.1)), step)


def test_planned_model_with_two_forward_passes_matches_pytorch() -> None:
    def step(model: nn.Module) -> None:
        first, second = model(batch(1)), model(batch(2))
        (first * second).mean().backward()

    same(lambda: mlp(lambda: nn.Dropout(0.1)), step)


class Several(nn.Module):
    """A model that takes keyword arguments and a flag. One of its three results has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(lambda: nn.Dropout(0.2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0, twice: bool = False) -> Any:
        hidden = self.body(x * mask)
        if twice:
            hidden = hidden + self.body(hidden)
        return {"scores": self.head(hidden) * scale, "hidden": (hidden, hidden.argmax(-1))}


def test_planned_model_with_keywords_and_tuple_matches_pytorch() -> None:
    mask = (batch(5) > 0).float()

    def step(model: nn.Module) -> Any:
        found = model(x=batch(1), mask=mask, scale=0.5, twice=True)
        (found["scores"].sum() + found["hidden"][0].square().mean()).backward()
        return found

    same(Several, step, {"x": batch(), "mask": mask, "scale": 0.5, "twice": True})


def test_planned_model_that_returns_its_loss_matches_pytorch() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(lambda: nn.BatchNorm1d(WIDTH))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.body(x), labels)

    labels = torch.arange(ROWS) % WIDTH

    def step(model: nn.Module) -> Tensor:
        loss = model(batch(1), labels)
        loss.backward()
        return loss

    same(WithLoss, step, (batch(), labels))


def test_planned_model_in_eval_and_no_grad_matches_pytorch() -> None:
    def step(model: nn.Module) -> Any:
        before = train(model)
        model.eval()
        with torch.no_grad():
            quiet = model(batch(7))
        assert not quiet.requires_grad
        loud = model(batch(7))
        loud.sum().backward()
        model.train()
        return before, quiet, loud, train(model)

    same(lambda: mlp(lambda: nn.Dropout(0.2), lambda: nn.BatchNorm1d(WIDTH)), step)


# torch.compile reads the gradient of a non-leaf tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_planned_model_computes_gradient_of_input() -> None:
    def step(model: nn.Module) -> Tensor:
        x = batch(1).requires_grad_()
        model(x * 2).sum().backward()
        return x

    same(mlp, step)


def test_planned_model_with_retain_graph_runs_backward_twice() -> None:
    def step(model: nn.Module) -> None:
        loss = model(batch(1)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    same(lambda: mlp(lambda: nn.Dropout(0.2)), step)


def test_planned_model_has_same_parameters_as_its_model() -> None:
    model = mlp(lambda: nn.BatchNorm1d(WIDTH))
    planned = tight(model, batch()).apply()
    assert type(planned) is type(model)
    assert planned.state_dict().keys() == model.state_dict().keys()
    assert all(
        one is other for one, other in zip(planned.parameters(), model.parameters(), strict=True)
    )
    planned.eval()
    assert not planned[1].training
    twin = copy.deepcopy(planned)  # a plain model, because compiled code cannot be pickled
    assert torch.equal(twin(batch()), planned(batch()))


@pytest.mark.slow
@pytest.mark.parametrize("between", [(), (lambda: nn.Dropout(0.2),)], ids=["plain", "dropout"])
def test_peak_of_planned_model_is_as_predicted_and_in_budget(between: Any) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(*between, layers=8)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

    # large, so that bytes of generator states hardly matter
    model, x = WithLoss(), batch().repeat(16, 1)
    least = tight(model, x)
    most = rekindle.plan(model, x, budget="1GB", planner=KeepAll())
    assert most.overhead == 0
    for plan in (least, most):
        planned = plan.apply()
        model.zero_grad()
        with Onlooker() as onlooker:
            loss = planned(x)
            loss.backward()
        assert onlooker.peak <= plan.peak <= plan.budget
        assert onlooker.peak > 0.97 * plan.peak
    assert least.peak < 0.6 * most.peak


def test_planned_model_recomputes_exactly_operators_of_plan() -> None:
    model, x = mlp(layers=6), batch()
    plan = tight(model, x)
    again = [plan.trace.ops[op].name for op in _computed_again(plan)]
    planned = plan.apply()
    with Onlooker() as onlooker:
        planned(x).sum().backward()
    ran = onlooker.operators
    assert ran["gelu"] == 6 + again.count("aten.gelu.default")
    assert ran["addmm"] == 6 + again.count("aten.addmm.default") > 6


def _computed_again(plan: ModelPlan) -> list[int]:
    seen: set[int] = set()
    again = []
    assert plan.plan.schedule is not None
    for action in plan.plan.schedule.actions:
        op = getattr(action, "op", None)
        if op is not None:
            (again.append(op) if op in seen else seen.add(op))
    return again


def test_planning_leaves_state_of_model_unchanged() -> None:
    model = mlp(lambda: nn.Dropout(0.2), lambda: nn.BatchNorm1d(WIDTH))
    before = everything(model)
    tight(model, batch())
    assert differing(everything(model), before) == []
    assert all(p.grad is None for p in model.parameters())


def test_planned_model_makes_new_plan_for_other_input_shape() -> None:
    def step(model: nn.Module) -> None:
        model(batch()).sum().backward()
        model(batch()[: ROWS // 2]).sum().backward()

    same(mlp, step, shapes="replan")


def test_planned_model_with_shapes_error_refuses_other_shape() -> None:
    planned = tight(mlp(), batch(), shapes="error").apply()
    planned(batch(1)).sum().backward()
    with pytest.raises(
        rekindle.Unsupported, match=r"got an input of shape \[128, 32\], wanted \[256, 32\]"
    ):
        planned(batch()[: ROWS // 2])
    with torch.no_grad():
        planned(batch(2))


def test_plan_without_solution_names_smallest_budget() -> None:
    plan = rekindle.plan(mlp(), batch(), budget="20KB", planner=RecomputeAll())
    assert plan.status is Status.INFEASIBLE
    assert (plan.peak, plan.time_ns, plan.overhead) == (None, None, None)
    assert "smallest budget" in str(plan)
    with pytest.raises(rekindle.OutOfBudget, match=f"budget={plan.smallest_budget}") as caught:
        plan.apply()
    assert caught.value.smallest_budget == plan.smallest_budget
    enough = rekindle.plan(mlp(), batch(), budget=plan.smallest_budget, planner=RecomputeAll())
    assert enough.peak is not None
    assert enough.peak <= plan.smallest_budget


def test_plan_of_data_dependent_control_flow_is_refused() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) if x.sum() > 0 else x

    with pytest.raises(rekindle.Unsupported, match=r"with rekindle\.budget\(\.\.\.\)"):
        rekindle.plan(Moody(), batch(), budget="1GB")


class WithNumpy(nn.Module):
    """A model that computes part of its result with NumPy."""

    def __init__(self, part: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.part(x)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (lambda x: torch.from_numpy(np.sin(x.detach().numpy())), "numpy.sin"),
        (lambda x: torch.from_numpy(x.detach().numpy() * 2), "numpy.mul"),
        (lambda x: float(x.detach().numpy().sum()) * x, "numpy.sum"),
        (lambda x: torch.from_numpy(np.random.rand(*x.shape)), "numpy.rand"),  # noqa: NPY002
    ],
    ids=["function", "operator", "method", "random"],
)
def test_plan_of_model_that_converts_to_numpy_is_refused(part: Any, named: str) -> None:
    with pytest.raises(rekindle.Unsupported, match=named):
        rekindle.plan(WithNumpy(part), (torch.zeros(4, 8),), budget=1 << 20)


def test_plan_of_model_with_numpy_constants_matches_pytorch() -> None:
    model = WithNumpy(lambda x: x * np.sqrt(8) * np.float32(0.5) + np.prod(x.shape))
    x = torch.randn(4, 8)
    planned = rekindle.plan(model, (x,), budget=1 << 20).apply()
    assert torch.equal(planned(x), model(x))


def test_plan_of_model_without_gradients_is_refused() -> None:
    with pytest.raises(rekindle.Unsupported, match=r"requires_grad_\(True\)"):
        rekindle.plan(mlp().requires_grad_(False), batch(), budget="1GB")


def test_planned_model_within_dispatch_mode_is_refused() -> None:
    planned = rekindle.plan(mlp(), batch(), budget="1GB", planner=KeepAll()).apply()
    with Tracker(), pytest.raises(rekindle.Unsupported, match="dispatch mode"):
        planned(batch())


def test_planned_model_inside_other_budget_matches_pytorch() -> None:
    model, x = mlp(), batch()
    planned = rekindle.plan(model, x, budget="1GB", planner=KeepAll()).apply()
    gradients: list[list[Tensor | None]] = []
    for program in (model, planned):
        model.zero_grad()
        with rekindle.budget("1GB") if program is planned else nullcontext():
            torch.manual_seed(1)
            program(x).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("inputs", [3, "batch"])
def test_plan_with_wrong_example_inputs_is_refused(inputs: object) -> None:
    with pytest.raises(rekindle.Unsupported, match="example_inputs"):
        rekindle.plan(mlp(), inputs, budget="1GB")


def test_plan_with_reserve_argument_leaves_these_bytes_free() -> None:
    model, x = mlp(), batch()
    plain = rekindle.plan(model, x, budget="1GB", planner=KeepAll())
    assert plain.peak is not None
    with_state = rekindle.plan(model, x, budget="1GB", planner=KeepAll(), reserve=10_000)
    assert with_state.peak == plain.peak + 10_000
    refused = rekindle.plan(model, x, budget=plain.peak, planner=KeepAll(), reserve=10_000)
    assert refused.status is Status.NOT_FOUND
    assert refused.smallest_budget == plain.peak + 10_000


@pytest.mark.slow
def test_plan_with_larger_budget_is_not_slower() -> None:
    model, x = mlp(layers=6), batch()
    least, most = tight(model, x), rekindle.plan(model, x, budget="1GB", planner=KeepAll())
    assert least.peak is not None
    assert most.peak is not None
    costs = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        budget = int(least.peak + share * (most.peak - least.peak))
        costs.append(rekindle.plan(model, x, budget=budget, planner=Cuts(1.0)).time_ns)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: Any) -> Iterator[list[object]]:
    """Yield the list of nodes whose costs are measured, with an own folder for stored costs."""
    from rekindle.pytorch.planned import _prices

    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path)))
    nodes: list[object] = []
    measure = _prices.measure
    monkeypatch.setattr(_prices, "measure", lambda node: nodes.append(node) or measure(node))
    yield nodes
    as_new_process()


def as_new_process() -> None:
    """Forget the costs of operators that this process knows, as a new process does."""
    from rekindle.pytorch.planned import _prices

    _prices._of_folder.cache_clear()


def keep_all() -> ModelPlan:
    return rekindle.plan(mlp(), batch(), budget="1GB", planner=KeepAll())


def test_costs_of_operators_are_equal_within_process(measured: list[object]) -> None:
    first = keep_all()
    assert measured
    measured.clear()
    assert keep_all().trace == first.trace
    assert measured == []


def test_costs_are_measured_again_only_by_first_processes(measured: list[object]) -> None:
    from rekindle.pytorch.planned import _prices

    counts: list[int] = []
    for _ in range(_prices.ENOUGH_PROCESSES + 1):
        as_new_process()
        measured.clear()
        keep_all()
        counts.append(len(measured))
    *early, late = counts
    assert all(early)
    assert late == 0


def test_too_high_stored_cost_is_lowered_by_next_process(
    measured: list[object], tmp_path: Path
) -> None:
    slow = 3_000_000_000
    keep_all()
    (file,) = tmp_path.glob("prices-*")
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({each: [slow, *rest] for each, (_, *rest) in stored.items()}))
    assert keep_all().trace.compute_ns < slow, "this process keeps the costs that it knows"
    as_new_process()
    assert keep_all().trace.compute_ns < slow
    assert all(cost < slow for cost, *_ in json.loads(file.read_text()).values())


def test_stored_cost_is_not_raised_by_slower_measurement(
    measured: list[object], tmp_path: Path
) -> None:
    keep_all()
    (file,) = tmp_path.glob("prices-*")
    stored = json.loads(file.read_text())
    file.write_text(
        json.dumps({each: [min(cost, 1), *rest] for each, (cost, *rest) in stored.items()})
    )
    as_new_process()
    plan = keep_all()
    assert all(op.cost <= 1 for op in plan.trace.ops)


def test_damaged_file_of_costs_causes_new_measurement(
    measured: list[object], tmp_path: Path
) -> None:
    keep_all()
    (file,) = tmp_path.glob("prices-*")
    measured.clear()
    as_new_process()
    file.write_text("{")
    keep_all()
    assert measured


def test_planned_backward_without_input_gradient_matches_pytorch() -> None:
    """The norm's input needs no gradient, so its backward operator returns None for it."""
    same(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)), train)


def test_cost_of_operator_that_does_not_fit_is_estimated(tmp_path: Path, monkeypatch: Any) -> None:
    """Measuring the operator fails with device OOM, so its cost is estimated.

    The next plan measures it again.
    """
    from rekindle.pytorch.planned import _prices

    def full(node: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr(_prices, "measure", full)
        rekindle.plan(mlp(), batch(), budget="1GB", planner=KeepAll())
    measured: list[object] = []
    measure = _prices.measure
    monkeypatch.setattr(_prices, "measure", lambda n: measured.append(n) or measure(n))
    rekindle.plan(mlp(), batch(), budget="1GB", planner=KeepAll())
    assert measured


def test_costs_of_operators_are_stored_per_cudnn_benchmark_mode(monkeypatch: Any) -> None:
    from rekindle.pytorch.planned import _prices

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    names = set()
    for benchmark in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
        names.add(_prices._name_of(torch.device("cuda", 0)))
    assert len(names) == 2
