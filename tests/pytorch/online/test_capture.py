"""`rekindle.capture`: whole eager steps as traces, judged by a tracker and by real runs."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rekindle
from rekindle.trace import Call, Drop, Trace, check_trace, keep_all_peak
from rekindle.trace.formats import load, save
from tests.pytorch import cores
from tests.pytorch.models import Case, Workload
from tests.pytorch.test_models import differing, each_case, everything, some_cases
from tests.pytorch.tracker import Tracker


def warmed_up(case: Case) -> Workload:
    """After a step: gradients and optimizer state are there, as in most of a training."""
    workload = case.build()
    workload.step(0)
    return workload


def see_state(tracker: Tracker, workload: Workload) -> None:
    """Show the tracker an optimizer's state from earlier steps, which only `step()` would show."""
    for phase in workload.phases:
        tracker.see([list(state.values()) for state in phase.optimizer.state.values()])


def know_workspaces(case: Case) -> None:
    """Call operators until their workspace is known."""
    workload = warmed_up(case)
    with rekindle.budget(None):
        for _ in range(3):
            workload.step(1)


def see_models(tracker: Tracker, workload: Workload) -> None:
    """Which count whole, though stochastic depth leaves blocks out."""
    tracker.see([*workload.model.buffers()])
    for phase in workload.phases:
        for group in phase.optimizer.param_groups:
            tracker.see([group["params"], [each.grad for each in group["params"]]])


@functools.cache
def captured(case: Case) -> tuple[Trace, int]:
    """The trace of the second step, and its peak as a tracker saw it."""
    with cores.fixed_prices():
        know_workspaces(case)
        workload = warmed_up(case)
        gc.collect()
        with Tracker() as tracker:
            see_state(tracker, workload)
            see_models(tracker, workload)
            trace = rekindle.capture(lambda: workload.step(1))
        return trace, tracker.peak


def _without_workspaces(trace: Trace) -> Trace:
    """As a tracker sees it, which is not shown what operators take inside themselves."""
    return replace(trace, ops=tuple(replace(op, workspace=0) for op in trace.ops))


@some_cases
def test_captured_step_is_valid_trace_with_tracked_peak(case: Case) -> None:
    trace, peak = captured(case)
    check_trace(trace)
    assert keep_all_peak(_without_workspaces(trace)) == peak
    workload = warmed_up(case)
    with Tracker() as plain:
        see_state(plain, workload)
        see_models(plain, workload)
        workload.step(1)
    # A constant that a recipe reads lives a little longer than in plain PyTorch.
    assert peak - plain.peak <= 64


@some_cases
def test_the_simulator_predicts_a_real_run_within_half(case: Case) -> None:
    _, peak = captured(case)
    with cores.fixed_prices():  # without a tracker: under its mode no result is written in place
        know_workspaces(case)
        workload = warmed_up(case)
        trace = rekindle.capture(lambda: workload.step(1))
    parameters = sum(p.numel() * p.element_size() for p in case.build().model.parameters())
    budget = 3 * parameters + (peak - 3 * parameters) // 2  # with gradients and optimizer state
    while True:
        try:
            record = rekindle.simulate(trace, budget=budget)
            with cores.fixed_prices():
                know_workspaces(case)
                workload = warmed_up(case)
                with rekindle.budget(budget) as run:
                    workload.step(1)
        except rekindle.OutOfBudget as error:
            budget = max(budget + 1, error.smallest_budget)
        else:
            break
    assert record.recomputations > 0
    # A real run notices what the program has let go of only when room is short, and where values
    # came back in between, some die at other moments than in a run without a budget (in the GAN's
    # double backward pass three). That changes the choice in two of these eight, of 30 and 811
    # recomputations. Simulated on the trace of the real run itself, all are equal: test_one_engine.
    others = {"gan": 3, "tree_lstm": 12}
    allowed = others.get(case.name, 0)
    assert abs(run.recomputations - record.recomputations) <= allowed
    assert run.peak <= budget
    assert abs(run.peak - record.peak) <= (0.02 * record.peak if allowed else 0)


@each_case
def test_captured_step_leaves_same_results(case: Case) -> None:
    plain, watched = case.build(), case.build()
    torch.manual_seed(3)
    losses = plain.step(0)
    wanted = everything(plain, losses)
    torch.manual_seed(3)
    seen = []
    rekindle.capture(lambda: seen.extend(watched.step(0)))
    assert differing(everything(watched, seen), wanted) == []


def test_drop_is_recorded_at_next_operator() -> None:
    layer = nn.Linear(16, 16)
    x = torch.randn(8, 16)

    def step() -> None:
        hidden = layer(x).tanh()
        y = hidden.exp()
        del hidden  # autograd keeps it
        (y.cos() + 1).sum().backward()

    trace = rekindle.capture(step)
    (tanh,) = (op.outputs[0] for op in trace.ops if op.name == "aten::tanh")
    events = [event for event in trace.events if not isinstance(event, Call) or event.op > 0]
    dropped = events.index(Drop(tanh))
    after = [trace.ops[e.op].name for e in events[dropped:] if isinstance(e, Call)]
    assert after[0] == "aten::cos"
    assert any(op.is_backward for op in trace.ops)
    assert not trace.ops[trace.maker[tanh]].is_backward


def test_captured_trace_survives_file(tmp_path: Path) -> None:
    layer = nn.Linear(16, 16)
    trace = rekindle.capture(lambda: layer(torch.randn(8, 16)).relu().sum().backward())
    save(trace, tmp_path / "step.jsonl.gz")
    again = load(tmp_path / "step.jsonl.gz")
    assert (again.ops, again.events, again.storages) == (trace.ops, trace.events, trace.storages)


def test_error_in_captured_step_ends_context() -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rekindle.capture(step)
    with rekindle.budget("1GiB"):  # contexts do not nest: there is none left
        pass


def test_report_without_limit_shows_no_budget() -> None:
    with rekindle.budget.unlimited() as run:
        torch.randn(1000).exp()
    assert run.budget is None
    assert str(run.report()).splitlines()[0].split() == ["budget", "none"]
    assert run.evictions == 0
