"""Tests against the simulator of the DTR paper's authors (ICLR 2021), on logs of their models.

The logs are not part of this repository. The tests use a folder of them next to the repository.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from _authors import AuthorsEngine, Case, engine_of, play, run
from _dtr_logs import load
from simulator_reference import HEURISTICS

from rekindle import simulator
from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import named
from rekindle.schedule import Action, Compute, Schedule, verify
from rekindle.simulator import RATIOS
from rekindle.trace import Trace, keep_all_peak
from rekindle.trace.formats import native

FOLDER = Path(__file__).parents[3] / "shared" / "reference"
# Of each log one run in so many is compared with the authors'. benchmarks/simulator_reference.py
# compares all.
LOGS = {"resnet32": 1, "unet": 1, "transformer": 3, "treelstm": 7, "lstm": 7}

pytestmark = pytest.mark.skipif(
    not (FOLDER / "logs").is_dir(), reason=f"the authors' logs are not in {FOLDER}"
)

# Verdict and overhead of the authors' simulator (commit eff53cc4) for a log, a policy and a budget,
# which is a fraction of the log's peak.
GOLDEN = [
    ("resnet32", "dtr", 0.3, "pass", 1.1782478449951166),
    ("resnet32", "dtr", 0.1, "thrash", None),
    ("resnet32", "dtr-eq", 0.2, "pass", 1.332160786001258),
    ("resnet32", "largest", 0.4, "pass", 1.7384240228413383),
    ("resnet32", "lru", 0.8, "pass", 1.0672468345893067),
    ("unet", "dtr", 0.4, "oom", None),
    ("unet", "msps", 0.3, "pass", 1.58510120003871),
    ("unet", "dtr-local", 0.5, "pass", 1.846852502812155),
    ("transformer", "dtr", 0.5, "pass", 1.0583950499689931),
    ("transformer", "h-0-exact", 0.6, "pass", 1.5132604347198415),
    ("treelstm", "dtr", 0.5, "pass", 1.1230906150151168),
    ("treelstm", "dtr-eq", 0.5, "pass", 1.126796281000227),
    ("lstm", "dtr", 0.5, "pass", 1.0650586176323744),
    ("lstm", "dtr-eq", 0.5, "pass", 1.071006122298943),
    ("lstm", "dtr-local", 0.5, "thrash", None),
]


def _log(name: str) -> Path:
    return FOLDER / "logs" / f"{name}.log.gz"


@pytest.mark.parametrize(("log", "policy", "ratio", "status", "overhead"), GOLDEN)
def test_simulated_overhead_equals_stored_dtr_figures(
    log: str, policy: str, ratio: float, status: str, overhead: float | None
) -> None:
    outcome = run(Case(_log(log), policy, ratio))
    assert outcome.status == status
    if overhead is not None:
        assert outcome.overhead == overhead


@pytest.mark.slow
@pytest.mark.parametrize("log", [*LOGS])
@pytest.mark.parametrize("dead", ["evict", "banish"])
def test_simulated_overhead_of_each_policy_equals_dtr_paper(log: str, dead: str) -> None:
    policy = {"evict": "eager", "banish": "banish"}[dead]
    status = {"pass": "pass", "oom": "oom", "thrashed": "thrash"}
    rows = [
        row
        for row in json.loads((FOLDER / "simrd_reference.json").read_text())
        if row["log"] == log and row["dealloc_policy"] == policy and row["heuristic"] in HEURISTICS
    ]
    assert len(rows) == {"evict": 60, "banish": 10}[dead]
    for row in rows[:: LOGS[log]]:
        case = Case(_log(log), HEURISTICS[row["heuristic"]], row["ratio"], dead)  # type: ignore[arg-type]
        outcome = run(case)
        assert outcome.budget_bytes == row["budget_bytes"]
        assert outcome.status == status[row["result"]], case
        if outcome.status == "pass":
            assert outcome.overhead == row["overhead"], case
            assert outcome.rematerializations == row["remats"], case


@pytest.mark.slow
def test_recomputations_equal_those_of_dtr_simulator() -> None:
    """Each recomputation has the same order, time and cost (the first 400 events)."""
    compared = 0
    for wanted in json.loads((FOLDER / "simrd_traces.json").read_text())["traces"]:
        if wanted["result"] != "pass" or wanted["heuristic"] not in ("DTR", "DTREqClass"):
            continue
        case = Case(_log(wanted["log"]), HEURISTICS[wanted["heuristic"]], 1.0)
        events = _decisions(case, wanted["budget_bytes"])
        theirs = [[e[0], e[2]] for e in wanted["events_first"] if e[1].startswith("R:")]
        assert events[: len(theirs)] == theirs
        compared += len(theirs)
    assert compared > 500


def _decisions(case: Case, budget: int) -> list[list[object]]:
    """Simulate a log, and return the clock after each recomputation, with the operator's cost."""
    trace = load(case.log)
    actions: list[Action] = []
    play(trace, engine_of(trace, budget, case), actions)
    clock, ran, events = 1, set(), []
    for action in actions:
        if isinstance(action, Compute):
            clock += trace.ops[action.op].cost
            if action.op in ran:
                events.append([clock, trace.ops[action.op].cost])
            ran.add(action.op)
    return events


@pytest.mark.parametrize("log", [*LOGS])
def test_trace_of_dtr_log_is_equal_after_saving(log: str) -> None:
    trace = load(_log(log))
    assert native.read(native.write(trace)) == trace


def _simulated(
    trace: Trace, budget: int, policy: str, *, quirks: bool
) -> tuple[Sequence[Action], tuple[int, int]]:
    """Return the actions of a run, with its time of recomputation and its peak."""
    limit, actions = trace.compute_ns, list[Action]()
    if quirks:
        engine = AuthorsEngine(budget, named(policy), recompute_limit=limit)
        play(trace, engine, actions)
        return actions, (engine.recompute_ns, engine.peak)
    record = simulator.replay(trace, budget=budget, policy=named(policy), recompute_limit=limit)
    return record.actions, (record.recompute_ns, record.peak)


@pytest.mark.slow
@pytest.mark.parametrize("log", [*LOGS])
@pytest.mark.parametrize("quirks", [False, True])
def test_each_simulated_run_of_dtr_logs_is_valid_schedule(log: str, quirks: bool) -> None:
    trace = load(_log(log))
    everything = keep_all_peak(trace)
    passed = 0
    for policy in ("dtr", "dtr-eq", "thrifty", "msps", "lru", "random:1"):
        for ratio in RATIOS[::3]:
            budget = int(everything * ratio)
            try:
                actions, totals = _simulated(trace, budget, policy, quirks=quirks)
            except (NoRoom, Thrashed):
                continue
            cost = verify(trace, Schedule(tuple(actions)), budget)
            assert (cost.recompute_ns, cost.peak) == totals
            again = sum(isinstance(action, Compute) for action in actions) - len(trace.ops)
            assert again == cost.recomputations
            passed += 1
    assert passed > 5


@pytest.mark.slow
@pytest.mark.parametrize("log", [*LOGS])
def test_default_is_at_most_one_percent_slower_than_authors_dtr(log: str) -> None:
    """The default policy by our rules, and the paper's policy by those of its authors."""
    better, trace = 0, load(_log(log))
    for ratio in RATIOS:
        theirs = run(Case(_log(log), "dtr", ratio))
        ours = simulator.run_case(simulator.Case(log, "thrifty", ratio), trace)
        if theirs.status == "pass":
            assert ours.status == "pass"
            assert ours.overhead <= theirs.overhead * 1.01
        better += ours.status == "pass" and (
            theirs.status != "pass" or ours.overhead < theirs.overhead
        )
    assert better >= 3
