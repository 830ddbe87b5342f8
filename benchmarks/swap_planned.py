"""Compare plans that both swap and recompute with runs that do only one, or decide online.

    scripts/bench swap_planned --logs FOLDER [--only NAME ...] [--seconds 60]

The script simulates the DTR paper's logs. Budgets, bandwidths and overheads are those of
`swap_simulated.py`, and so are three of the columns: `recompute` (only recomputing), `swap` (only
swapping) and `hybrid` (the engine decides online). The planner starts its search from these three
runs. `planned` is the overhead of its plan, simulated with the same bandwidth. `bound` is a lower
bound of the overhead of every run. The script prints a table, and writes results/swap_planned.json
after each log. Rows of logs that are not measured again stay, each with its commit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _common import ROOT, conditions, earlier, write
from _dtr_logs import load, logs_in
from swap_simulated import hiding, overhead, run

from rekindle._planners import WarmCuts
from rekindle.planners import Problem
from rekindle.policies import Swap
from rekindle.trace import Trace

RATIOS = (0.5, 0.3)
SHARES = (0.05, 0.2, 0.5)


def planned(problem: Problem, ratio: float, swap: Swap, seconds: float) -> dict[str, Any]:
    budget = int(ratio * problem.keep_all_peak)
    plan = WarmCuts(seconds, gap=0.001, swap=swap).plan(problem, budget)
    if plan.overhead is None:
        return {"status": plan.status.name.lower(), "bound": round(plan.lower_bound, 4)}
    return {
        "status": plan.status.name.lower(),
        "overhead": round(plan.overhead, 4),
        "bound": round(plan.lower_bound, 4),
        "waiting": round(plan.waiting_ns / plan.compute_ns, 4),
        "swapped_out": round(plan.swapped_out / problem.keep_all_peak, 4),
        "seconds": round(plan.seconds, 1),
    }


def measure(name: str, trace: Trace, seconds: float) -> list[dict[str, Any]]:
    problem = Problem.of(trace)
    rows: list[dict[str, Any]] = []
    for ratio in RATIOS:
        plain = run(trace, ratio, None)
        for share in SHARES:
            rate = max(1, int(share * hiding(trace)))
            row: dict[str, Any] = {"log": name, "ratio": ratio, "share": share, "recompute": plain}
            row["swap"] = run(trace, ratio, Swap(None, rate, rate, only=True))
            row["hybrid"] = run(trace, ratio, Swap(None, rate, rate))
            row["planned"] = planned(problem, ratio, Swap(None, rate, rate), seconds)
            rows.append(row)
            ends = [overhead(row[way]) for way in ("recompute", "swap", "hybrid", "planned")]
            shown = "".join(f"{end:>11.3f}" for end in (*ends, row["planned"]["bound"]))
            print(f"{name:>12} {ratio:>5} {share:>5}{shown}", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the cases in which the plan is faster or slower than the other runs."""
    pairs = [
        (overhead(row["planned"]), min(overhead(row["recompute"]), overhead(row["swap"])))
        for row in rows
    ]
    online = [(overhead(row["planned"]), overhead(row["hybrid"])) for row in rows]
    return {
        "cases": len(pairs),
        "planned better than both alone": sum(ours < best for ours, best in pairs),
        "equal to the better": sum(ours == best for ours, best in pairs),
        "worse": sum(ours > best for ours, best in pairs),
        "better than the online choice": sum(ours < other for ours, other in online),
        "worse than the online choice": sum(ours > other for ours, other in online),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="a folder of the logs")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    about = {**conditions(), "seconds": given.seconds}
    here = {"commit": about["commit"]}
    rows = earlier(ROOT / "benchmarks" / "results" / "swap_planned.json")
    print(f"{'log':>12} {'ratio':>5} {'share':>5}", end="")
    print("".join(f"{way:>11}" for way in ("recompute", "swap", "hybrid", "planned", "bound")))
    for path in logs_in(given.logs):
        name = path.name.partition(".")[0]
        if not given.only or name in given.only:
            rows = [row for row in rows if row["log"] != name]
            rows += [row | here for row in measure(name, load(path), given.seconds)]
            write("swap_planned", {**about, "figures": {"summary": summary(rows), "rows": rows}})
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
