"""Compare the memory peak of the very first step in a new process with the budget.

    scripts/bench first_calls [--programs mnist gpt ...] [--fractions 0.7 ...] [--later]

The programs are those of `_public` and the eight models. The budget is the memory that the program
uses before its first step (weights, batches), and a fraction of what the step allocates in plain
PyTorch. If the budget is too small, the program is started again with the budget that `OutOfBudget`
names, until the step runs. Each start is a new process. It knows only what earlier starts stored in
the cache: the budgets that were too small, and the workspaces of the operators that ran.

`starts` counts the starts. `first` is the peak of the first step, by the allocator's events,
divided by the budget. `repeated` counts the operator calls that ran twice, because they exceeded
the budget at the first attempt. With `--later` the program is started once more within the budget
that sufficed; `later_first` and `later_repeated` are the figures of that process. The script
measures no time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, answers, conditions, earlier_by, write
from _public import PUBLIC, Program
from _trainer import Trainer, nbytes
from _workloads import WORKLOADS
from tests.helpers import own_cache
from tests.pytorch.allocations import allocated

import rekindle

KEY = ("program", "fraction", "threads")
FRACTIONS = (0.7, 0.5)  #: budgets, as fractions of what the first step allocates in plain PyTorch
MOST_SECONDS = 300.0  # time limit for one process (one point of the results)
MOST_STARTS = 8


def program(name: str) -> Program:
    torch.manual_seed(0)
    if name in PUBLIC:
        return PUBLIC[name]()
    trainer = Trainer(WORKLOADS[name], "cpu")
    batch = trainer.batch if isinstance(trainer.batch, tuple | list) else [trainer.batch]
    inputs = [each for each in batch if isinstance(each, torch.Tensor)]
    return Program(trainer.step, [*trainer.model.parameters(), *trainer.model.buffers(), *inputs])


def plain(name: str) -> dict[str, Any]:
    """Return the bytes in use before the first step, and the most that the step allocates.

    The step runs in plain PyTorch.
    """
    step, inputs = program(name)
    return {"before": nbytes(inputs), "plain": allocated(step).peak}


def within(name: str, budget: int) -> dict[str, Any]:
    """Run the first step within `budget`. Return its peak, or the budget to try next."""
    step, inputs = program(name)
    before = nbytes(inputs)
    try:
        with rekindle.budget(budget, learn=False) as run:
            found = allocated(step)
    except rekindle.OutOfBudget as error:
        return {"next": error.worth_trying, "operator": error.operator}
    return {
        "first": round((before + found.peak) / budget, 4),
        "said": round(run.peak / budget, 4),
        "recomputed": run.recomputations,
        "repeated": run._driver.core.repeated_calls(run._driver.handle),
    }


def measure(name: str, fraction: float, threads: int, later: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--threads", str(threads), "--worker", name]
    about = [*answers(command, MOST_SECONDS)][-1]
    if "failed" in about:
        return about
    budget = about["before"] + int(fraction * about["plain"])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = f"REKINDLE_CACHE={own_cache(Path(folder))}"
        for starts in range(1, MOST_STARTS + 1):
            found = [*answers(["env", cache, *command, str(budget)], MOST_SECONDS)][-1]
            if "next" not in found:
                row = about | {"budget": budget, "starts": starts} | found
                if later and "failed" not in found:
                    again = [*answers(["env", cache, *command, str(budget)], MOST_SECONDS)][-1]
                    row |= {f"later_{key}": again.get(key) for key in ("first", "repeated")}
                return row
            budget = max(found["next"], budget + 1)
    return about | {"budget": budget} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    programs = [*PUBLIC, *WORKLOADS]
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--fractions", nargs="+", type=float, default=[*FRACTIONS])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--later", action="store_true", help="also measure a later process")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/first_calls.json")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(options.threads[0])
        name, *budget = options.worker
        print(json.dumps(within(name, int(budget[0])) if budget else plain(name)))
        return
    now = conditions()
    rows = earlier_by(options.out, KEY)
    for name in options.programs:
        for fraction in options.fractions:
            for threads in options.threads:
                place = (name, fraction, threads)
                row = dict(zip(KEY, place, strict=True))
                row |= measure(name, fraction, threads, options.later)
                rows[place] = row | {"commit": now["commit"]}
                print(row, flush=True)
                write("first_calls", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
