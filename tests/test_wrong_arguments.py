"""Tests of errors for wrong arguments of public functions: what was wanted, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rekindle
from rekindle.policies import DTR, Ablation, Random, Swap
from rekindle.trace import chain

MODEL = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
BATCH = torch.ones(4, 8)
TRACE = chain(3)
ran: list[str] = []


def step() -> None:
    ran.append("step")


OF_A_STEP: dict[str, Callable[[object], object]] = {
    "rekindle.profile": rekindle.profile,  # type: ignore[dict-item]
    "rekindle.capture": rekindle.capture,  # type: ignore[dict-item]
    "rekindle.verify": lambda given: rekindle.verify(given, budget="1MiB"),  # type: ignore[arg-type]
    "rekindle.export": lambda given: rekindle.export(MODEL, given, "1MiB"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OF_A_STEP)
@pytest.mark.parametrize(
    ("given", "got"),
    [
        (None, r"got None \(a call in place of a function\?\)"),
        (BATCH, "got Tensor"),
        (MODEL, r"got Sequential \(missing a required argument: 'input'\)"),
        (lambda batch: None, "missing a required argument: 'batch'"),
    ],
)
def test_wrong_step_argument_is_refused_with_line_to_write(
    name: str, given: object, got: str
) -> None:
    wanted = "wanted a function that takes one step, without arguments"
    reported = f"{name}.*{got}.*, {wanted}; write {name}.*lambda: step"
    with pytest.raises(rekindle.InvalidArgument, match=reported):
        OF_A_STEP[name](given)


def budget(**options: object) -> Callable[[], object]:
    return lambda: rekindle.budget("1GiB", **options)  # type: ignore[arg-type]


def profile(**options: object) -> Callable[[], object]:
    return lambda: rekindle.profile(step, **options)  # type: ignore[arg-type]


def max_batch(factory: object = lambda n: step, **options: object) -> Callable[[], object]:
    given = {"budget": "1MiB"} | options
    return lambda: rekindle.max_batch(factory, **given)  # type: ignore[arg-type]


def estimate(model: object = MODEL, **options: object) -> Callable[[], object]:
    return lambda: rekindle.estimate(model, BATCH, **options)  # type: ignore[arg-type]


def simulate(trace: object = TRACE, **options: object) -> Callable[[], object]:
    return lambda: rekindle.simulate(trace, **options)  # type: ignore[arg-type]


def plan(**options: object) -> Callable[[], object]:
    given = {"budget": "1MiB"} | options
    return lambda: rekindle.plan(MODEL, (BATCH,), **given)  # type: ignore[call-overload]


def sequential(**options: object) -> Callable[[], object]:
    return lambda: rekindle.sequential(MODEL, BATCH, "1MiB", **options)  # type: ignore[arg-type]


def export(**options: object) -> Callable[[], object]:
    return lambda: rekindle.export(MODEL, step, "1MiB", **options)  # type: ignore[arg-type]


NOT_ITS_OWN = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
OTHER_LOSS = (
    r"the loss is {}, wanted one number with a gradient; write .*loss=lambda output: output.mean"
)


@pytest.mark.parametrize(
    ("call", "reported"),
    [
        (budget(record="yes"), r"record='yes'\): wanted True or False; write .*record=True\)"),
        (budget(record=1), r"record=1\): wanted True or False"),
        (budget(cache="no"), r"cache='no'\): .*write .*cache=True\) or .*cache=False\)"),
        (budget(swap="1GiB", swap_directory=5), "got int, wanted the path of a folder; write"),
        (lambda: rekindle.budget("1GiB")("train"), r"got str, wanted a function; write"),
        (lambda: DTR("all"), r'wanted one of "exact", "classes", "local"; write .*DTR\("exact"\)'),
        (lambda: Random("x"), r"Random\('x'\): wanted a whole number of at least 0; write"),
        (lambda: Ablation(True, True, "x"), r'cost=.x.\): wanted one of .*"none"; write'),
        (lambda: Swap(-4), r"Swap\(host=-4\): wanted a whole number of at least 0; write"),
        (lambda: Swap("4GiB"), r"Swap\(host='4GiB'\): wanted a whole number"),
        (lambda: Swap(only="yes"), "wanted True or False"),
        (lambda: Swap(out_bytes_per_s=0), "without swapping write swap=None"),
        (profile(repeats=-1), r"repeats=-1\): wanted a whole number of at least 0; write"),
        (profile(repeats=1.5), "wanted a whole number"),
        (profile(budget="6 Gigs"), r"rekindle\.profile\(step, budget='6 Gigs'\): got the unknown"),
        (max_batch(None), "got None"),
        (max_batch(lambda: step), r"\(too many positional arguments\), wanted a function"),
        (max_batch(slowdown=0.5), r"slowdown=0.5\): wanted a number of at least 1.0; write .*1.3"),
        (max_batch(slowdown="1.3"), "wanted a number of at least 1.0"),
        (max_batch(at_most=0), r"at_most=0\): wanted a whole number of at least 1; write"),
        (max_batch(budget=None), r"rekindle\.max_batch\(.*budget=None\): got an object of type"),
        (estimate(nn.Linear), "got the class Linear, wanted a model"),
        (estimate(None), "got None, wanted a model"),
        (estimate(optimizer="adam"), "got str, wanted a function; write .*torch.optim.AdamW"),
        (estimate(optimizer=NOT_ITS_OWN), "got SGD with none of the model's parameters"),
        (estimate(loss="mse"), "got str, wanted a function; write .*loss=lambda output"),
        (estimate(loss=nn.MSELoss()), r"got MSELoss \(missing a required argument: 'target'\)"),
        (estimate(loss=lambda output: None), OTHER_LOSS.format("NoneType")),
        (estimate(loss=lambda output: output), OTHER_LOSS.format(r"a tensor of \(4, 8\)")),
        (estimate(loss=lambda x: x.detach().sum()), OTHER_LOSS.format("a number without.*")),
        (estimate(device="gpu"), 'got no device that PyTorch knows; write .*device="cpu"'),
        (
            simulate(None),
            r"got None, wanted a trace, or the path of a trace file; write .*capture\(step\)",
        ),
        (simulate(step), "got function, wanted a trace"),
        (simulate(core="c"), 'wanted one of "auto", "native", "python"; write'),
        (simulate(swap="1GiB"), r"got str, wanted a rekindle.policies.Swap; write .*Swap\(host="),
        (plan(planner="newest"), r'planner=\'newest\'\): wanted one of "cuts", .*; write'),
        (
            plan(planner=3),
            r"planner=3\): wanted a planner of rekindle.planners, or the name of one; write",
        ),
        (plan(planner=SimpleNamespace), "wanted a planner of rekindle.planners"),
        (plan(check="no"), "wanted True or False"),
        (plan(swap="1 Gigs"), r"rekindle\.plan\(model, x, swap='1 Gigs'\): got the unknown unit"),
        (lambda: rekindle.backend("1MiB", planner="x"), r"rekindle\.backend.*wanted one of"),
        (sequential(reshape="x"), 'wanted one of "measure", "refuse"; write'),
        (sequential(loss="x"), "got str, wanted a function; write .*loss=lambda output"),
        (export(selective="x"), "wanted True or False"),
        (export(blocks="0"), "got str, wanted paths of submodules; write"),
        (lambda: rekindle.export(None, step, "1MiB"), "got None, wanted a model; write"),
        (lambda: rekindle.distributed.common_budget("x"), r"common_budget\('x'\): got text"),
    ],
)
def test_wrong_argument_of_public_function_names_line_to_write(
    call: Callable[[], object], reported: str
) -> None:
    ran.clear()
    with pytest.raises((rekindle.InvalidArgument, rekindle.InvalidBudget), match=reported):
        call()
    assert ran == []
    # if the first budget were still active, a second one would be refused
    with rekindle.budget("1GiB"):
        pass


def test_device_that_torch_was_not_built_for_is_refused() -> None:
    """Rekindle must not ask torch for such a device, because that would end the process."""
    if torch.accelerator.current_accelerator() is not None:
        pytest.skip("this PyTorch was built for an accelerator")
    with pytest.raises(rekindle.InvalidArgument, match=r"was not built for; write .*device=.cpu."):
        rekindle.estimate(MODEL, BATCH, device="cuda")


def test_wrong_arguments_of_run_methods_are_refused() -> None:
    with rekindle.budget(None) as run:
        pass
    with pytest.raises(rekindle.InvalidArgument, match=r"got str, wanted a function; write run\."):
        run.on_step("print")  # type: ignore[arg-type]
    with pytest.raises(rekindle.InvalidArgument, match=r"got int, wanted a tensor"):
        run.keep(5)  # type: ignore[arg-type]


def test_profile_of_step_without_operators_is_refused() -> None:
    with pytest.raises(rekindle.InvalidArgument, match="ran no operator of PyTorch, wanted one"):
        rekindle.profile(lambda: None, repeats=0)


def test_sequential_with_wrong_sample_input_names_the_layer() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        rekindle.sequential(MODEL, torch.ones(4, 7), "1MiB")
    assert "in layer 0 (Linear)" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    "planner", ["chen-sqrt", " Chen-SQRT", rekindle.planners.ChenSqrt, rekindle.planners.ChenSqrt()]
)
def test_planner_argument_accepts_name_class_or_instance(planner: object) -> None:
    found = rekindle.plan(TRACE, budget=1 << 20, planner=planner)  # type: ignore[call-overload]
    assert found.planner == rekindle.planners.ChenSqrt().name
