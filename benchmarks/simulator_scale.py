"""Measure how the time of an eviction grows with the number of values in memory.

python benchmarks/simulator_scale.py writes results/simulator_scale.json and
docs/images/simulator_scale.png; with `--draw` only the picture, from existing results.

A synthetic program first computes n values that all fit into the budget, with random sizes and
costs. Each is computed from a random one of the values just before it. Then the program computes
2000 more values, each of which causes an eviction. The policy is h_DTR.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from _common import ROOT, conditions, write

from rekindle._types import OpId, StorageId
from rekindle.engine import Call, Engine, Value
from rekindle.policies import DTR
from rekindle.report import _plot

MORE = 2000
RESULTS = ROOT / "benchmarks" / "results" / "simulator_scale.json"
PICTURE = ROOT / "docs" / "images" / "simulator_scale.png"


def measure(resident: int) -> dict[str, float]:
    rng = random.Random(resident)
    engine = Engine(None, DTR())
    values: list[Value] = []
    evictions = 0

    def run(number: int) -> None:
        nonlocal evictions
        inputs = [values[rng.randrange(max(0, len(values) - 64), len(values))]] if values else []
        call = Call(OpId(number), "op", rng.randint(1_000, 1_000_000), inputs)
        values.append(call.makes(StorageId(number), rng.randint(1_000, 1_000_000)))
        actions = sum(1 for _ in engine.call(call))
        evictions += actions

    for number in range(resident):
        run(number)
    engine.budget = engine.memory
    gc.collect()
    gc.disable()
    evictions, computed = 0, engine.compute_ns + engine.recompute_ns
    started = time.process_time()
    for number in range(resident, resident + MORE):
        run(number)
    seconds = time.process_time() - started
    gc.enable()
    assert engine.compute_ns + engine.recompute_ns > computed
    engine.check()
    return {
        "resident_values": resident,
        "evictions": evictions - MORE,
        "microseconds_per_eviction": round(1e6 * seconds / (evictions - MORE), 1),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the time of an eviction against the number of values, with a line of linear growth."""
    resident = [row["resident_values"] for row in rows]
    cost = [row["microseconds_per_eviction"] for row in rows]
    figure, (axes,) = _plot.grid(1, width=6, height=4)
    _plot.line(axes, resident, cost, label="measured", number=0)
    proportional = [cost[0] * count / resident[0] for count in resident]
    _plot.line(
        axes,
        resident,
        proportional,
        label="growth in proportion, for comparison",
        number=6,
        style=":",
    )
    axes.set(xscale="log", yscale="log", xlabel="resident values", ylabel="us for an eviction")
    axes.set_ylim(10, 100 * max(cost))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _plot.save(figure, path)


def main() -> None:
    if sys.argv[1:] != ["--draw"]:
        rows = [measure(10**power) for power in range(3, 7)]
        for row in rows:
            print(row)
        write(RESULTS.stem, {**conditions(), "rows": rows})
    plot(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"], PICTURE)


if __name__ == "__main__":
    main()
