"""Compare how much each policy recomputes, in simulations of recorded training steps.

    scripts/bench policies [--seconds 10] [--every 10]

The script records one training step of each network of `_workloads.py`, and of every tenth
architecture of the zoo (transformers and diffusers). It simulates each step within three budgets,
which lie between the smallest budget that any schedule needs and the peak when everything is kept.
The parameters of `Thrifty`, the default policy, were tuned on these networks and on the DTR paper's
logs. Nothing was tuned on the zoo.

An overhead is the recomputation time divided by the computation time, at measured costs. No
schedule of the same step has a lower overhead than `bound`, which the planner Cuts proves. Prints a
table, writes results/policies.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

from _common import conditions, write
from _trainer import Trainer
from _workloads import WORKLOADS
from tests.zoo.architectures import ALL_ARCHITECTURES
from tests.zoo.runs import training_step

import rekindle
from rekindle.engine import NoRoom, Thrashed
from rekindle.planners import Cuts, Problem
from rekindle.policies import NAMED
from rekindle.simulator import replay
from rekindle.trace import Trace

FRACTIONS = (0.5, 0.3, 0.15)
POLICIES = ("dtr", "dtr-eq", "thrifty", "msps")
LIMIT = 5  # a run fails if recomputation takes more than this multiple of the computation time
WARM_UP = 3  # steps until operators have measured costs


def traces(every: int) -> Iterator[tuple[str, str, Trace]]:
    """Yield the origin, the name and the trace of a step of each program."""
    for name, workload in WORKLOADS.items():
        yield "chosen on", name, captured(Trainer(workload, "cpu").step)
    for architecture in ALL_ARCHITECTURES[::every]:
        yield "not chosen on", architecture.name, captured(training_step(architecture)())


def captured(step: Any) -> Trace:
    with rekindle.budget("1TiB"):
        for _ in range(WARM_UP):
            step()
    return rekindle.capture(step)


def measure(trace: Trace, fraction: float, seconds: float) -> dict[str, Any]:
    problem = Problem.of(trace)
    budget = problem.floor + int(fraction * (problem.keep_all_peak - problem.floor))
    limit = LIMIT * problem.compute_ns
    row: dict[str, Any] = {"fraction": fraction, "budget": budget}
    for name in POLICIES:
        try:
            run = replay(trace, budget=budget, policy=NAMED[name], recompute_limit=limit)
            row[name] = round(run.recompute_ns / problem.compute_ns, 4)
        except (NoRoom, Thrashed):
            row[name] = None
    plan = Cuts(time_limit=seconds, gap=0.001).plan(problem, budget)
    return row | {"bound": round(plan.lower_bound, 4) or None}  # None: not found in time


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare each policy with h_DTR, in cases in which both finish the step and recompute.

    h_DTR must recompute more than 0.5 % of the computation. Less and more: by at least 1 %.

    Returns:
        For each policy: its recomputation divided by h_DTR's (geometric mean), and how often it
        recomputes less than h_DTR, more than h_DTR, and at most 1.5 times the lower bound, which
        holds for every schedule of the same step.
    """
    found: dict[str, Any] = {}
    for name in POLICIES:
        both = [row for row in rows if row[name] and row["dtr"] and row["dtr"] > 0.005]
        bounded = [row for row in both if row["bound"]]
        ratios = [row[name] / row["dtr"] for row in both]
        found[name] = {
            "over h_DTR": round(math.exp(statistics.fmean(map(math.log, ratios))), 3),
            "less": sum(ratio < 0.99 for ratio in ratios),
            "more": sum(ratio > 1.01 for ratio in ratios),
            "cases": len(ratios),
            "within 1.5 of the bound": sum(row[name] <= 1.5 * row["bound"] for row in bounded),
            "with a bound": len(bounded),
            "no room": sum(row[name] is None for row in rows),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time limit of the search for each lower bound"
    )
    parser.add_argument("--every", type=int, default=10, help="which architectures of the zoo")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = conditions()
    rows: list[dict[str, Any]] = []
    print(f"{'':36}" + "".join(f"{head:>9}" for head in ("of it", *POLICIES, "bound")))
    for group, name, trace in traces(options.every):
        for fraction in FRACTIONS:
            row = {"group": group, "program": name} | measure(trace, fraction, options.seconds)
            rows.append(row)
            cells = (row[key] for key in ("fraction", *POLICIES, "bound"))
            print(f"{name[:35]:36}" + "".join(f"{'-' if c is None else c:>9}" for c in cells))
    groups = dict.fromkeys(row["group"] for row in rows)
    of = {group: summary([row for row in rows if row["group"] == group]) for group in groups}
    for group, found in of.items():
        print(group, *(f"\n  {name:8} {figures}" for name, figures in found.items()))
    write("policies", results | {"seconds": options.seconds, "summary": of, "rows": rows})


if __name__ == "__main__":
    main()
