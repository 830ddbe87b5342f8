"""Measure whether memory exceeds the budget: online, learned, planned, `rekindle.sequential`.

    scripts/bench cap [--models gpt bert ...] [--ways ...] [--fractions 0.7 ...]

The budget is the sum of the constants (weights, gradients, the optimizer's state) and a fraction of
the activation memory. Both are measured in a step of plain PyTorch, from its allocations and frees.
Three figures are compared with the budget:

- `first` is the memory peak of the first step, in which Rekindle has not measured any operator yet,
  divided by the budget.
- `over` is the same for a later step. Both peaks include the constants.
- `resident` is the growth of the process's resident memory up to the peak of a step, divided by
  the budget. Before the step, free memory is returned to the operating system.

Each combination of model, method and fraction runs in its own process. The script measures no time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, answers, conditions, earlier_by, write
from _methods import points
from _trainer import Trainer, activations, warm
from _workloads import WORKLOADS, Workload
from resident import forget_most, load_libraries, most_resident, resident
from tests.pytorch.allocations import allocated

import rekindle

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("model", "way", "fraction")
WAYS = ("rekindle online", "rekindle learned", "rekindle planned", "rekindle sequential")
FRACTIONS = (0.7, 0.5, 0.3)  #: budgets, as fractions of the activation memory
MOST_SECONDS = 600.0  # time limit for one process (one point of the results)


def give_back() -> None:
    """Return memory that is free in the C library to the operating system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def measure(workload: Workload, way: str, fraction: float) -> dict[str, Any]:
    plain, ours = Trainer(workload, "cpu"), Trainer(workload, "cpu")
    plain.step()
    constants = plain.constants()
    peak = constants + activations(plain, "cpu")
    budget = constants + int(fraction * (peak - constants))
    found = next((each for each in points(workload, (fraction,)) if each.method == way), None)
    if found is None:
        return {"unsuited": "not for this program"}
    about = {
        "constants": constants,
        "peak": peak,
        "inputs": ours.batch,
        "reserve": plain.state(),
    }
    del plain
    ours.step()  # makes the optimizer's state and the gradients
    load_libraries()
    give_back()
    before = resident() - constants
    ours.called = found.prepare(ours.model, workload, about)
    reported: dict[str, Any] = {}
    with found.around(constants, peak):
        first = allocated(ours.step)
        reported["first"] = round((constants + first.peak - max(0, first.left)) / budget, 4)
    give_back()  # memory that the profiler used
    with warm(found, ours, constants, peak):
        forget_most()
        ours.step()
        reported["resident"] = round((most_resident() - before) / budget, 3)
        most = allocated(ours.step)
    return reported | {"over": round((constants + most.peak - max(0, most.left)) / budget, 4)}


def worker(name: str, way: str, fraction: float) -> dict[str, Any]:
    try:
        return measure(WORKLOADS[name], way, fraction)
    except rekindle.OutOfBudget as error:
        return {"infeasible": f"needs {error.smallest_budget}"}
    except rekindle.RekindleError as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--fractions", nargs="+", type=float, default=[*FRACTIONS])
    parser.add_argument("--out", type=Path, default=RESULTS / "cap.json")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        name, way, fraction = options.worker
        print(json.dumps(worker(name, way, float(fraction))))
        return
    now = conditions()
    rows = earlier_by(options.out, KEY)
    for name in options.models:
        for way in options.ways:
            for fraction in options.fractions:
                command = [sys.executable, __file__, "--worker", name, way, str(fraction)]
                row = dict(zip(KEY, (name, way, fraction), strict=True))
                row |= [*answers(command, MOST_SECONDS)][-1]
                row |= {"commit": now["commit"], "load": round(os.getloadavg()[0], 1)}
                rows[name, way, fraction] = row
                print({key: each for key, each in row.items() if key != "commit"}, flush=True)
                write("cap", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
