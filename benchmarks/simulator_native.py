"""Compare the speed of the simulator's two engines: the native one (C++) and the one in Python.

python benchmarks/simulator_native.py LOGS [--ratio 0.5] [--repeat 5]

Both simulate the same runs alternately in one process. The times are those of `run_case`, without
the time to read the log. A log is converted once for all runs of the native engine; this time is
measured separately.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from _common import conditions, spread, write
from _dtr_logs import load, logs_in

from rekindle import native
from rekindle.simulator import Case, run_case
from rekindle.simulator._native import encode

POLICIES = ("dtr", "thrifty", "msps", "lru")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=5)
    chosen = parser.parse_args()
    reported = conditions()
    if native.engine() is None:
        raise SystemExit(native.why_not(native.ENGINE))
    rows: list[dict[str, object]] = []
    for path in logs_in(chosen.logs):
        trace = load(path)
        started = time.perf_counter()
        encode(trace)
        converting = round(time.perf_counter() - started, 4)
        for policy in POLICIES:
            case = Case(str(path), policy, chosen.ratio)
            seconds: dict[str, list[float]] = {"native": [], "python": []}
            outcomes: set[object] = set()
            for _ in range(chosen.repeat):
                for core in ("native", "python"):
                    outcome = run_case(case, trace, core=core)
                    seconds[core].append(outcome.seconds)
                    outcomes.add(dataclasses.replace(outcome, seconds=0.0))
            assert len(outcomes) == 1, f"the engines differ: {outcomes}"
            rows.append(
                {
                    "log": path.name.partition(".")[0],
                    "policy": policy,
                    "ratio": chosen.ratio,
                    "native_s": spread(seconds["native"]),
                    "python_s": spread(seconds["python"]),
                    "times_as_fast": round(min(seconds["python"]) / min(seconds["native"]), 1),
                    "converting_s": converting,
                }
            )
            print(rows[-1])
    write("simulator_native", reported | {"figures": rows})


if __name__ == "__main__":
    main()
