"""Cost per eviction against the number of resident values: python benchmarks/simulator_scale.py

A synthetic program makes n values, each from an earlier one chosen at random nearby, with random
sizes and costs; all fit. Then 2000 more, each of which has to make room. Policy h_DTR.
"""

from __future__ import annotations

import gc
import random
import time

from _common import conditions, write

from rekindle._types import OpId, StorageId
from rekindle.engine import Call, Engine, Value
from rekindle.policies import DTR

MORE = 2000


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


if __name__ == "__main__":
    rows = [measure(10**power) for power in range(3, 7)]
    for row in rows:
        print(row)
    write("simulator_scale", {**conditions(), "rows": rows})
