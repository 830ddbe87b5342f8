"""Simulate runs that follow a plan with swapping, and compare their time with the plan's.

    scripts/bench swap_learned --traces FOLDER [--only NAME ...] [--rates 50] [--seconds 60]

FOLDER has traces NAME-BATCH-KIND.jsonl.gz of training steps: for each model NAME and number format
KIND (such as fp32), one with a larger and one with a smaller BATCH. The larger batch is simulated
within a budget that equals the peak of the smaller batch. An overhead is the time of recomputing
and of waiting for copies, divided by the computation time. The overheads of a row:

`recompute`: the default policy, which only recomputes.
`online`: the engine decides for each evicted value whether to swap or to recompute it.
`planned`: the overhead that a plan predicts.
`followed`: the engine follows this plan, as in a real run that has learned it.
`bound`: a lower bound; no run that recomputes and swaps is faster.

The script prints a table, and writes results/swap_learned.json after each trace.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _common import ROOT, conditions, earlier, write

from rekindle._planners import WarmCuts
from rekindle.engine import Route
from rekindle.planners import Problem
from rekindle.policies import DEFAULT, Swap
from rekindle.schedule import Record, verify
from rekindle.simulator import replay
from rekindle.trace import Trace, keep_all_peak
from rekindle.trace.formats import load

COLUMNS = ("recompute", "online", "planned", "followed", "bound")


def lost(record: Record) -> float:
    """Return the overhead: recomputing and waiting for copies, divided by the computation time."""
    return (record.recompute_ns + record.waiting_ns) / record.compute_ns


def measure(trace: Trace, budget: int, rate: int, seconds: float) -> dict[str, Any]:
    swap = Swap(None, rate, rate)
    problem = Problem.of(trace)
    online = replay(trace, budget=budget, policy=DEFAULT, swap=swap)
    plan = WarmCuts(seconds, gap=0.001, swap=swap).plan(problem, budget)
    assert plan.schedule is not None
    assert plan.overhead is not None
    route = Route.of(trace, plan.schedule)
    followed = replay(trace, budget=budget, policy=DEFAULT, swap=swap, route=route)
    verify(trace, followed.schedule, budget, swap=swap)
    return {
        "recompute": round(lost(replay(trace, budget=budget, policy=DEFAULT)), 4),
        "online": round(lost(online), 4),
        "online_swapped": {"out": online.swapped_out, "in": online.swapped_in},
        "planned": round(plan.overhead, 4),
        "followed": round(lost(followed), 4),
        "followed_waiting": round(followed.waiting_ns / followed.compute_ns, 4),
        "followed_swapped": {"out": followed.swapped_out, "in": followed.swapped_in},
        "bound": round(plan.lower_bound, 4),
        "seconds": round(plan.seconds, 1),
    }


def pairs(folder: Path) -> list[tuple[str, Path, Path]]:
    """Return the traces to compare.

    Returns:
        For each model and kind: the name, the file with the trace of the larger batch, and the file
        with that of the smaller batch.
    """
    found: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    for path in folder.glob("*.jsonl.gz"):
        name, batch, kind = path.name.removesuffix(".jsonl.gz").rsplit("-", 2)
        if batch.isdecimal():
            found.setdefault((name, kind), []).append((int(batch), path))
    return [
        (f"{name} {kind}", max(paths)[1], min(paths)[1])
        for (name, kind), paths in sorted(found.items())
        if len(paths) == 2
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="a folder of traces")
    parser.add_argument("--only", nargs="*", default=[], help="names, such as 'GPT-2 fp32'")
    parser.add_argument("--rates", nargs="*", type=float, default=[50.0], help="GB/s")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each plan")
    given = parser.parse_args()
    about = {**conditions(), "seconds": given.seconds}
    here = {"commit": about["commit"]}
    rows = earlier(ROOT / "benchmarks" / "results" / "swap_learned.json")
    print(f"{'trace':>16} {'GB/s':>5}" + "".join(f"{column:>11}" for column in COLUMNS))
    for name, larger, smaller in pairs(given.traces):
        for rate in given.rates if not given.only or name in given.only else ():
            trace, budget = load(larger), keep_all_peak(load(smaller))
            row = measure(trace, budget, int(rate * 1e9), given.seconds)
            row = {"trace": name, "GB/s": rate, "budget": budget} | row | here
            rows = [old for old in rows if (old["trace"], old["GB/s"]) != (name, rate)] + [row]
            print(
                f"{name:>16} {rate:>5}" + "".join(f"{row[c]:>11.4f}" for c in COLUMNS), flush=True
            )
            write("swap_learned", {**about, "figures": {"rows": rows}})
    print(json.dumps({"worse than planned": max(r["followed"] - r["planned"] for r in rows)}))


if __name__ == "__main__":
    main()
