"""Compare Rekindle's simulator with that of the DTR paper's authors: results and speed.

python benchmarks/simulator_reference.py LOGS REFERENCE.json [--speed SPEED.json]

All runs whose policy is deterministic are compared. REFERENCE.json is a table of the results of the
authors' simulator (log, heuristic, dealloc_policy, ratio, result, overhead). Our outcomes are those
of `AuthorsEngine`, a subclass of the Python engine. SPEED.json has the authors' times in seconds
(`run_s`) at ratio 0.5. Rekindle's own simulator is timed by this script, so the comparison of times
is fair only on the machine on which SPEED.json was measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from _authors import Case, Dead, run
from _common import conditions, write
from _dtr_logs import load, logs_in

from rekindle import simulator
from rekindle.native import cores
from rekindle.policies import PAPER

HEURISTICS = {
    "DTR": "dtr",
    "DTREqClass": "dtr-eq",
    "DTRLocal": "dtr-local",
    "LRU": "lru",
    "LargestStorage": "largest",
    "MSPS": "msps",
    "DTRUnopt": "dtr-unopt",
}
NAMES = {
    **HEURISTICS,
    **{
        f"Ab{cost}{size}{stale}": f"h-{('s' * bool(stale)) + ('m' * bool(size)) or '0'}-{ours}"
        for cost, ours in (("E", "exact"), ("Eq", "eq"), ("Local", "local"), ("", "none"))
        for size in ("", "Size")
        for stale in ("", "Stale")
    },
}
DEAD: dict[str, Dead] = {"eager": "evict", "ignore": "ignore", "banish": "banish"}
STATUS = {"pass": "pass", "oom": "oom", "thrashed": "thrash"}


def compare(logs: Path, reference: Path) -> dict[str, object]:
    wanted = [row for row in json.loads(reference.read_text()) if row["heuristic"] in NAMES]
    todo = [
        Case(
            logs / f"{row['log']}.log.gz",
            NAMES[row["heuristic"]],
            row["ratio"],
            DEAD[row["dealloc_policy"]],
        )
        for row in wanted
    ]
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    different: list[dict[str, object]] = []
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(run, todo))
    for row, outcome in zip(wanted, outcomes, strict=True):
        same = outcome.status == STATUS[row["result"]]
        exact = same and (outcome.status != "pass" or outcome.overhead == row["overhead"])
        counts["runs"] += 1
        counts["same verdict"] += same
        counts["same verdict and, where it passes, the same overhead to the last bit"] += exact
        if not exact:
            different.append({"theirs": row, "ours": asdict(outcome)})
    seconds = round(time.perf_counter() - started, 1)
    return {**counts, "different": different, "seconds": seconds}


def speed(logs: Path, theirs: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for row in json.loads(theirs.read_text()):
        trace = load(logs / f"{row['log']}.log.gz")
        policy, ratio = NAMES[row["heuristic"]], row["ratio"]
        case = simulator.Case(trace.name, policy, ratio)
        ours = min(simulator.run_case(case, trace).seconds for _ in range(3))
        rows.append(
            {
                "log": row["log"],
                "policy": policy,
                "ratio": ratio,
                "theirs_seconds": row["run_s"],
                "ours_seconds": round(ours, 3),
                "times_faster": round(row["run_s"] / ours, 1),
            }
        )
        print(rows[-1])
    return rows


def seven_by_ten(logs: Path) -> dict[str, object]:
    done, started = 0, time.perf_counter()
    for trace in map(load, logs_in(logs)):
        for case in simulator.cases([trace.name], PAPER):
            simulator.run_case(case, trace)
            done += 1
    return {"runs": done, "processes": 1, "seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--speed", type=Path)
    given = parser.parse_args()
    figures: dict[str, object] = {"sweep": seven_by_ten(given.logs)}
    print(figures)
    if given.speed:
        figures["speed"] = speed(given.logs, given.speed)
    figures["reference"] = compare(given.logs, given.reference)
    print(figures["reference"])
    write("simulator_reference", {**conditions(), "figures": figures})
