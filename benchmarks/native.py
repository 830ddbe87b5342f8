"""Measure the time that a budget adds to plain PyTorch, and the memory of Rekindle's records.

Blocks of training steps in plain PyTorch and within a budget take turns in one process. The first
steps of a block are not timed. Of the others the fastest tenth counts, and of the blocks the
fastest, because other programs on the machine only make steps slower. Times are processor times
with one thread.

All rows are measured with two cores in turns, each in processes of its own: the core that the first
budget compiles, and the core that `rekindle build --guided` compiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import conditions, spread, write
from _operators import Count, operators
from tests.pytorch.models import Case, Phase, Workload, next_token_loss, tokens, tree_lstm
from tests.pytorch.networks import GPT
from torch import Tensor, nn

import rekindle

#: Budgets, as fractions of the activations; None: without a limit. In a budget of `AMPLE` times the
#: activations, operators are only counted after some steps.
AMPLE = 32
FRACTIONS = (None, AMPLE, 0.5)
#: Blocks in plain PyTorch, and within a budget, for each ratio.
PAIRS = 3
#: Steps before the timed ones in a budget with learned plans.
LEARNING_STEPS = 20
#: Fields of a row that are the same in all rounds.
DESCRIPTION = ("case", "fraction", "learned", "budget", "operators_per_step")
COUNTED_AFTER = 4096  #: operators of a program before which they are always recorded


class Unrolled(nn.Module):
    """An LSTM cell in a loop: very many very small operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = cell = torch.zeros(batch.shape[1], batch.shape[2])
        for item in batch:
            hidden, cell = self.cell(item, (hidden, cell))
        return hidden


def lstm() -> Workload:
    model = Unrolled(64)
    batch = torch.randn(60, 8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    phase = Phase(lambda model, batch: model(batch).sum(), optimizer)
    return Workload(model, lambda number: batch, (phase,))


def gpt(layers: int = 4) -> Workload:
    model = GPT(vocabulary=64, width=128, heads=4, layers=layers, context=64)
    phase = Phase(next_token_loss, torch.optim.AdamW(model.parameters(), foreach=True))
    return Workload(model, tokens(64, batch=8, time=64), (phase,))


CASES = [
    Case("lstm", lstm),
    Case("tree_lstm", lambda: tree_lstm(width=64, sentences=24)),
    Case("gpt", gpt),
]
DEEP = Case("gpt of 48 blocks", lambda: gpt(48))  # many operators, so many records


def budget_of(case: Case, fraction: float) -> int:
    """Return a budget in bytes: the constants and a fraction of the activations."""
    workload = case.build()
    with rekindle.budget.unlimited() as run:
        for _ in range(2):
            workload.step(0)
        constants = run.memory
    return constants + int(fraction * (run.peak - constants))


def context(budget: int | None, *, learned: bool = False) -> rekindle.budget:
    """Return a budget of `budget` bytes, or a budget without a limit if it is None."""
    if budget is None:
        return rekindle.budget.unlimited()
    return rekindle.budget(budget, learn="wait" if learned else False)


def warm_up(operators: int) -> int:
    """Return after how many steps of `operators` each the operators are only counted."""
    return 3 + 2 * COUNTED_AFTER // operators


class Clock:
    """Measures the time of training steps, in plain PyTorch or within a budget."""

    def __init__(self, case: Case, steps: int) -> None:
        self.workload = case.build()
        self.steps = steps

    def block(self, within: rekindle.budget | None, warm: int = 2) -> tuple[float, Any]:
        """Run `warm` steps and `steps` timed steps inside `with within:` (None: in plain PyTorch).

        Returns:
            The seconds of the fastest tenth of the timed steps, and the run (None in plain
            PyTorch).
        """
        gc.collect()
        seconds = []
        with nullcontext() if within is None else within as run:
            for _ in range(warm):
                self.workload.step(0)
            for _ in range(self.steps):
                start = time.process_time()
                self.workload.step(0)
                seconds.append(time.process_time() - start)
        return sorted(seconds)[len(seconds) // 10], run


def bookkeeping(case: Case) -> dict[str, Any]:
    """Return the memory of Rekindle's own records after a forward pass.

    The figures are in bytes, in bytes per operator, and as a share of the memory peak.
    """
    workload = case.build()
    (phase,) = workload.phases
    batch = workload.data(0)
    with Count() as count:
        phase.losses(workload.model, batch)
    with context(None) as run:
        loss = phase.losses(workload.model, batch)
        nbytes = run._driver.engine.now().bookkeeping
        del loss
    return {
        "case": case.name,
        "operators": count.operators,
        "bytes": nbytes,
        "bytes_per_operator": round(nbytes / count.operators),
        "share_of_memory": round(nbytes / run.peak, 5),
    }


def side_by_side(case: Case, fraction: float | None, steps: int, learned: bool) -> dict[str, Any]:
    """Measure a budget of a fraction of the activations beside plain PyTorch.

    Args:
        case: The model.
        fraction: Size of the budget, as a fraction of the activations; None: without a limit.
        steps: Number of timed steps in each block.
        learned: The budget follows learned plans.
    """
    budget = None if fraction is None else budget_of(case, fraction)
    count = operators(case, 0)
    clock = Clock(case, steps)
    warm = LEARNING_STEPS if learned else warm_up(count) if fraction == AMPLE else 2
    base = seconds = float("inf")
    run: Any = None
    for _ in range(PAIRS):
        base = min(base, clock.block(None)[0])
        within, run = clock.block(context(budget, learned=learned), warm)
        seconds = min(seconds, within)
    return {
        "case": case.name,
        "fraction": fraction,
        "learned": learned,
        "budget": budget,
        "operators_per_step": count,
        "plain_ms": 1e3 * base,
        "ratio": seconds / base,
        "added_us_per_operator": (seconds - base) / count * 1e6,
        "evictions_per_step": run.evictions / (steps + warm),
        "recomputations_per_step": run.recomputations / (steps + warm),
    }


def work(steps: int) -> None:
    """Measure all cases once with the core of this process, and print the rows."""
    for case in CASES:
        for fraction, learned in [*((each, False) for each in FRACTIONS), (0.5, True)]:
            print(json.dumps(side_by_side(case, fraction, steps, learned)), flush=True)


def merged(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of all rounds as one list of rows, with medians and ranges."""
    found = []
    for same in zip(*rounds, strict=True):
        values = {name: [row[name] for row in same] for name in same[0]}
        found.append(
            {
                **{name: values[name][0] for name in DESCRIPTION},
                "plain_ms": spread(values["plain_ms"], 3),
                "native": {
                    "ratio": spread(values["ratio"], 3),
                    "added_us_per_operator": spread(values["added_us_per_operator"], 2),
                    "evictions_per_step": round(values["evictions_per_step"][0], 1),
                    "recomputations_per_step": round(values["recomputations_per_step"][0], 1),
                },
            }
        )
    return found


def measured(rounds: int, steps: int) -> dict[str, Any]:
    """Measure all cases with both cores in turns."""
    found: dict[str, list[list[dict[str, Any]]]] = {"rows": [], "guided": []}
    command = [sys.executable, __file__, "--worker", "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        environments = {
            "rows": os.environ | {"REKINDLE_CACHE": f"{folder}/plain"},
            "guided": os.environ | {"REKINDLE_CACHE": f"{folder}/guided"},
        }
        for name, environment in environments.items():
            build = [sys.executable, "-m", "rekindle", "build"]
            build += ["--guided"] if name == "guided" else []
            subprocess.run(build, env=environment, check=True)
        for number in range(rounds):
            for name, environment in environments.items():
                print(f"{name}, round {number + 1} of {rounds}", flush=True)
                done = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, text=True, check=True
                )
                found[name].append([json.loads(line) for line in done.stdout.splitlines()])
    return {name: merged(rows) for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed in each block")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    results = conditions()
    if options.worker:
        work(options.steps)
        return
    results |= measured(options.rounds, options.steps)
    for row, guided in zip(results["rows"], results["guided"], strict=True):
        ratios = [each["native"]["ratio"]["median"] for each in (row, guided)]
        print(f"{row['case']} {row['fraction']} {row['learned']}: {ratios} times plain")
    books = [bookkeeping(case) for case in (*CASES, DEEP)]
    for row in books:
        print(f"{row['case']}: {row['bytes_per_operator']} bytes of books an operator")
    write("native", results | {"bookkeeping": books}, options.out)


if __name__ == "__main__":
    main()
