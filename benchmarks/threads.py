"""Measure several threads that train at the same time within one budget.

Each Python thread trains its own model. Blocks of steps alternate in one process, in plain PyTorch
and within the budget. Two ratios are measured: of elapsed times, which include the time that
threads wait for each other, and of processor times. On a CPU, autograd runs each backward pass in
the thread that calls it, so there are no other threads. benchmarks/README.md has more.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import conditions, spread, write
from native import CASES, FRACTIONS, budget_of, context
from tests.pytorch.models import Case, Workload

THREADS = (1, 2, 4)


class Took(NamedTuple):
    """Seconds of a block, and its memory peak divided by the budget (0 without a budget)."""

    elapsed: float
    processor: float
    peak: float


def block(workloads: list[Workload], budget: int | None, steps: int, *, plain: bool) -> Took:
    """Run all workloads at once, each in its own thread, after three untimed steps."""
    gc.collect()
    ready = threading.Barrier(len(workloads) + 1)

    def train(workload: Workload) -> None:
        torch.set_num_threads(1)  # a new Python thread starts with one per core
        for _ in range(3):
            workload.step(0)
        ready.wait()
        for _ in range(steps):
            workload.step(0)

    with nullcontext() if plain else context(budget) as run:
        threads = [threading.Thread(target=train, args=(each,)) for each in workloads]
        for thread in threads:
            thread.start()
        ready.wait()
        began, processor = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.join()
        elapsed, processor = time.perf_counter() - began, time.process_time() - processor
    return Took(elapsed, processor, 0.0 if run is None or budget is None else run.peak / budget)


def side_by_side(
    case: Case, threads: int, fraction: float | None, rounds: int, steps: int
) -> dict[str, Any]:
    budget = None if fraction is None else threads * budget_of(case, fraction)
    workloads = [case.build() for _ in range(threads)]
    elapsed: list[float] = []
    processor: list[float] = []
    peaks: list[float] = []
    for _ in range(rounds):
        plain = block(workloads, None, steps, plain=True)
        found = block(workloads, budget, steps, plain=False)
        elapsed.append(found.elapsed / plain.elapsed)
        processor.append(found.processor / plain.processor)
        peaks.append(found.peak)
    row: dict[str, Any] = {"case": case.name, "threads": threads, "fraction": fraction}
    row |= {"elapsed": spread(elapsed, 3), "processor": spread(processor, 3)}
    return row if budget is None else row | {"budget": budget, "peak_over_budget": spread(peaks, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of each thread in each block")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results = conditions()
    rows = []
    for case in CASES:
        for threads in THREADS:
            for fraction in FRACTIONS:
                row = side_by_side(case, threads, fraction, options.rounds, options.steps)
                rows.append(row | {"commit": results["commit"]})
                print(f"{case.name}, {threads} threads, {fraction}: {row['elapsed']['median']}")
    write("threads", results | {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
