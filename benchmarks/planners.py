"""Measure how good the plans of each planner are, and how long the planner searches.

    scripts/bench planners --graphs FOLDER [--only NAME ...] [--time-limit 60] [--large]

FOLDER has graphs in Checkmate's format. The file `static_reference.json`, next to FOLDER, has
budgets, best known costs and bounds. For comparison, DTR's policy is simulated. `--large` adds GPTs
of 5,000 and 10,000 operators (`_gpt.py`). Prints a table and writes
benchmarks/results/planners.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from _gpt import gpt

from rekindle._planners import PLANNERS
from rekindle.planners import Problem
from rekindle.trace import Trace
from rekindle.trace.formats import load

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planners.json"
QUICK = ("rotor", "revolve-all", "chen-sqrt-all", "chen-greedy-all", "dtr")
LARGE_LIMIT = 110.0  # seconds; the aim is a plan within 1 % of the bound after 120 seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path, required=True, help="a folder of the graphs")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    reference = json.loads((arguments.graphs.parent / "static_reference.json").read_text())["rows"]
    commit = about()["commit"]  # read now, because commits may be made meanwhile
    rows: list[dict[str, object]] = []
    problems: dict[str, Problem] = {}
    print("         graph ratio            planner  overhead     bound     gap      s")
    for known in reference:
        name = known["graph"]
        if arguments.only and name not in arguments.only:
            continue
        if name not in problems:
            problems[name] = Problem.of(load(arguments.graphs / f"{name}.json"))
        gap = {"reference_overhead": known["best_cost"] / known["base_cost"] - 1}
        gap |= {"reference_gap": known["gap"]}
        small = ("checkmate",) if len(problems[name]) <= 17 else ()
        rows += measure(
            problems[name],
            known["ratio"],
            known["budget"],
            ("cuts", *small, *QUICK),
            arguments.time_limit,
            gap,
        )
    if arguments.large:
        for layers in (110, 222):
            trace: Trace = gpt(layers)
            problem = Problem.of(trace)
            for ratio in (0.5, 0.3):
                budget = int(ratio * problem.keep_all_peak)
                rows += measure(problem, ratio, budget, ("cuts",), LARGE_LIMIT, {})
    RESULT.parent.mkdir(exist_ok=True)
    rows = [row | {"commit": commit} for row in rows]
    if arguments.only and RESULT.exists():  # keep the rows of the other graphs
        done = {row["graph"] for row in rows}
        before = json.loads(RESULT.read_text())["rows"]
        rows = [row for row in before if row["graph"] not in done] + rows
    RESULT.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")


def measure(
    problem: Problem,
    ratio: float,
    budget: int,
    names: tuple[str, ...],
    time_limit: float,
    more: dict[str, float],
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in names:
        plan = PLANNERS[name](time_limit).plan(problem, budget)
        rows.append(
            {
                "graph": problem.trace.name,
                "nodes": len(problem),
                "ratio": ratio,
                "planner": name,
                "status": plan.status.name.lower(),
                "overhead": plan.overhead,
                "lower_bound": plan.lower_bound if name in ("cuts", "checkmate") else None,
                "gap": plan.gap if name in ("cuts", "checkmate") else None,
                "seconds": round(plan.seconds, 3),
                **more,
            }
        )
        print(
            f"{problem.trace.name:>14} {ratio:>5} {name:>18} "
            f"{_percent(plan.overhead):>9} {_percent(rows[-1]['lower_bound']):>9} "
            f"{_percent(rows[-1]['gap']):>7} {plan.seconds:>6.1f}",
            flush=True,
        )
    return rows


def _percent(share: object) -> str:
    return f"{100 * share:.2f}%" if isinstance(share, float) else "-"


def about() -> dict[str, object]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "command": "scripts/bench planners " + " ".join(sys.argv[1:]),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_at_end": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("highspy", "numpy")},
        "commit": commit.stdout.strip(),
    }


if __name__ == "__main__":
    main()
