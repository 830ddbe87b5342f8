"""Tests of `rekindle.plan` of a trace: public planner names, and no import of torch."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import rekindle
from rekindle import _progress, _route
from rekindle.planners import KeepAll, Plan, Problem, Status
from rekindle.trace import chain
from rekindle.trace.formats import native


def test_plan_of_trace_object_equals_plan_of_its_file(tmp_path: Path) -> None:
    trace = chain(8)
    budget = Problem.of(trace).keep_all_peak
    plan = rekindle.plan(trace, budget=budget, planner=rekindle.planners.KeepAll())
    assert plan.status is Status.OPTIMAL
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(native.write(trace)) + "\n")
    assert rekindle.plan(path, budget=budget, planner=KeepAll()).schedule == plan.schedule
    assert rekindle.plan(str(path), budget=str(budget), planner=KeepAll()).peak == plan.peak


def test_plan_with_default_planner_fits_into_smaller_budget() -> None:
    trace = chain(8)
    budget = int(0.7 * Problem.of(trace).keep_all_peak)
    plan = rekindle.plan(trace, budget=budget)
    assert plan.peak is not None
    assert plan.peak <= budget
    assert plan.overhead


def test_plan_of_trace_does_not_import_torch() -> None:
    program = (
        "import sys, rekindle\nfrom rekindle.trace import chain\n"
        "rekindle.plan(chain(4), budget=10**9, planner=rekindle.planners.KeepAll())\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == ["False"], result.stderr


@pytest.mark.parametrize("wrong", ["lots", 0])
def test_plan_with_wrong_budget_is_refused(wrong: str | int) -> None:
    with pytest.raises(rekindle.InvalidBudget, match=r"rekindle\.plan\(\.\.\., budget="):
        rekindle.plan(chain(4), budget=wrong)


def test_plan_of_model_without_example_inputs_is_refused() -> None:
    with pytest.raises(rekindle.Unsupported, match="example inputs"):
        rekindle.plan(object(), None, budget="1GB")


def test_plan_of_trace_with_swap_uses_host() -> None:
    trace = chain(8, nbytes=10, cost=1000)
    swap = rekindle.policies.Swap(out_bytes_per_s=10**9, in_bytes_per_s=10**9)
    budget = Problem.of(trace).keep_all_peak // 2
    plan = rekindle.plan(trace, budget=budget, swap=swap)
    run = rekindle.simulate(trace, budget=budget, swap=swap)
    assert plan.overhead is not None
    assert 0 == plan.lower_bound <= plan.overhead <= run.overhead
    assert plan.swapped_out > 0


def test_plan_with_swap_and_planner_without_swap_is_refused() -> None:
    swap = rekindle.policies.Swap()
    with pytest.raises(
        rekindle.Unsupported, match=r"planner=rekindle\.planners\.Cuts\(swap=\.\.\."
    ):
        rekindle.plan(chain(4), budget="1GB", swap=swap, planner=KeepAll())
    with pytest.raises(rekindle.Unsupported, match=r"write rekindle\.plan\(model, x, swap="):
        rekindle.plan(chain(4), budget="1GB", swap=swap, swap_directory="/tmp")


def test_progress_of_stages_is_shown_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `done()`, the next task also shows progress only after two seconds of its own."""
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = _progress.ProgressLine()
    for done in (1, 2, 3):
        now[0] += 1.5
        progress.stages(done, 4)
    shown = capsys.readouterr().err
    assert "measuring stages: 3 of 4" in shown
    assert "measuring stages: 1 of 4" not in shown
    progress.stages(4, 4)
    assert capsys.readouterr().err == "\r\x1b[K"
    now[0] += 60
    progress("the next")
    assert capsys.readouterr().err == ""


def test_search_for_plan_ends_when_plan_is_proven_optimal() -> None:
    """A search up to its time limit would take longer than a test may."""
    pytest.importorskip("highspy")
    trace = chain(6, nbytes=1000)
    plans = io.StringIO()
    _route.main(io.StringIO("".join(native.write(trace))), plans, 8000, 1000.0)
    assert plans.getvalue().count("\n") == 1


def test_learned_plan_that_recomputes_for_too_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan counts as none if it recomputes for ten times the program's own time."""
    pytest.importorskip("highspy")
    from rekindle.planners.cuts import Cuts

    search = Cuts.plan

    def endless(planner: Cuts, problem: Problem, budget: int) -> Plan:
        plan = search(planner, problem, budget)
        return replace(plan, status=Status.FEASIBLE, recompute_ns=11 * plan.compute_ns)

    monkeypatch.setattr(Cuts, "plan", endless)
    plans = io.StringIO()
    with pytest.raises(SystemExit, match="no plan within 8000 bytes"):
        _route.main(io.StringIO("".join(native.write(chain(6, nbytes=1000)))), plans, 8000, 4.0)
    assert plans.getvalue() == ""
