"""Measure the overhead of the online runtime, and the smallest budgets.

benchmarks/README.md has the claims. Blocks of training steps alternate in one process, in plain
PyTorch (A) and within a budget (B): A B A B. The first step of a block is not timed. Each ratio
compares two neighboring blocks.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import conditions, spread, write
from _operators import operators
from tests.pytorch.models import (
    ALL_CASES,
    Case,
    Phase,
    Workload,
    class_loss,
    images,
    next_token_loss,
    tree_lstm,
    unet,
)
from tests.pytorch.networks import ResNet
from tests.pytorch.tracker import Measured, Tracker, measure
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import rekindle
from rekindle.cli import _demo_training as demo

ROOMY = "1TiB"


# The models that are timed: their steps take a few tenths of a second or more.


def demo_gpt() -> Workload:
    settings = demo.Settings()
    text = demo.read_text(settings.context)
    model = demo.GPT(settings)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Workload(
        model,
        lambda step: demo.batch_of(text, settings, step),
        (Phase(next_token_loss, optimizer),),
    )


def big_resnet() -> Workload:
    model = ResNet(width=32, depths=(3, 3, 3), classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Workload(model, images(48, 32, classes=10), (Phase(class_loss, optimizer),))


TIMED = [
    Case("demo_gpt", demo_gpt),
    Case("resnet", big_resnet),
    Case("unet", lambda: unet(width=24, batch=8, height=108, breadth=116)),
    Case("tree_lstm", lambda: tree_lstm(width=256, sentences=128)),
]


# -- measuring ------------------------------------------------------------------------------------


def plain(case: Case) -> Measured:
    workload = case.build()
    return measure(lambda: [workload.step(number) for number in range(3)] and None)


class Clock:
    """Trains a model in blocks of steps, plainly or within a budget."""

    def __init__(self, case: Case, steps: int) -> None:
        self.workload = case.build()
        self.steps = steps
        self.runs: list[Any] = []

    def block(self, budget: str | int | None) -> list[float]:
        """Return the seconds of each step. Raises `OutOfBudget` if the budget is too small."""
        gc.collect()
        seconds = []
        with nullcontext() if budget is None else rekindle.budget(budget, learn=False) as run:
            self.workload.step(0)
            for number in range(self.steps):
                start = time.perf_counter()
                self.workload.step(number)
                seconds.append(time.perf_counter() - start)
        if run is not None:
            self.runs.append(run)
        return seconds


def side_by_side(case: Case, budget: str | int, rounds: int, steps: int) -> dict[str, Any]:
    """Time blocks of steps alternately: in plain PyTorch, and within the budget.

    If the budget is too small, the one that `OutOfBudget` names is used instead.
    """
    clock = Clock(case, steps)
    free: list[float] = []
    tight: list[float] = []
    ratios: list[float] = []
    while len(ratios) < rounds:
        a = clock.block(None)
        try:
            b = clock.block(budget)
        except rekindle.OutOfBudget as error:
            budget = error.smallest_budget
            free, tight, ratios = [], [], []
            clock = Clock(case, steps)
            continue
        free += a
        tight += b
        ratios.append(sum(b) / sum(a))
    steps_run = steps + 1
    return {
        "budget": budget,
        "plain_s": spread(free),
        "budget_s": spread(tight),
        "ratio": spread(ratios, 3),
        "evictions_per_step": round(clock.runs[-1].evictions / steps_run, 1),
        "recomputations_per_step": round(clock.runs[-1].recomputations / steps_run, 1),
    }


# -- the parts overhead, step_time and smallest ---------------------------------------------------


def overhead(rounds: int) -> dict[str, Any]:
    """Measure the overhead when nothing is evicted."""
    found: dict[str, Any] = {}
    small = {case.name: case for case in ALL_CASES}
    for case, steps in ((small["lstm"], 10), (small["tree_lstm"], 20), (TIMED[0], 4)):
        count = operators(case, 1)
        timing = side_by_side(case, ROOMY, rounds, steps)
        added = (timing["budget_s"]["median"] - timing["plain_s"]["median"]) / count * 1e6
        found[case.name] = {"operators": count, "added_us_per_operator": round(added, 2), **timing}
        show("overhead", case.name, found[case.name])
    return found


def step_time(rounds: int) -> dict[str, Any]:
    """Measure the overhead within half, and within a third, of the activation memory."""
    found: dict[str, Any] = {}
    for case in TIMED:
        memory = plain(case)
        rows = {}
        for name, fraction in (("1/2", 1 / 2), ("1/3", 1 / 3)):
            timing = side_by_side(case, memory.budget(fraction), rounds, 4)
            got = (timing["budget"] - memory.constants) / memory.activations
            rows[name] = {"fraction": round(got, 3), **timing}
            show("step time", f"{case.name} {name}", rows[name])
        found[case.name] = {"peak": memory.peak, "constants": memory.constants, **rows}
    return found


def smallest() -> dict[str, Any]:
    """Find the smallest fraction of its activations within which each model trains.

    Also measure `program_holds` of each model.
    """
    found: dict[str, Any] = {}
    for case in ALL_CASES:
        memory = plain(case)
        no, yes = 0, 100
        while yes - no > 1:
            middle = (no + yes) // 2
            if feasible(case, memory.budget(middle / 100)):
                yes = middle
            else:
                no = middle
        found[case.name] = {
            "peak": memory.peak,
            "constants": memory.constants,
            "fraction": yes / 100,
            "program_holds": round(program_holds(case) / memory.activations, 3),
        }
        show("smallest", case.name, found[case.name])
    return found


def feasible(case: Case, budget: int) -> bool:
    """Return True if three steps can be trained within the budget."""
    workload = case.build()
    try:
        with rekindle.budget(budget, learn=False):
            for number in range(3):
                workload.step(number)
    except rekindle.OutOfBudget:
        return False
    return True


def program_holds(case: Case) -> int:
    """Return the memory that the program's variables hold and that operators need, in bytes.

    It is measured as the peak of a forward pass for which autograd saves nothing, above the memory
    in use before.
    """
    workload = case.build()
    batch = workload.data(0)
    parameters = list(workload.model.parameters())
    with Tracker() as tracker:
        tracker.count(parameters)
        tracker.count(list(workload.model.buffers()))
        before = tracker.alive
        with saved_tensors_hooks(lambda tensor: None, _never):
            workload.phases[-1].losses(workload.model, batch)
    return tracker.peak - before


def _never(nothing: None) -> Tensor:
    raise AssertionError("a backward pass without anything saved")


def show(what: str, name: str, row: dict[str, Any]) -> None:
    parts = [f"{key} {_short(value)}" for key, value in row.items()]
    print(f"{what:10} {name:20} " + "  ".join(parts), flush=True)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']} ({value['min']}-{value['max']})"
    return str(value)


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "overhead": overhead,
    "step_time": step_time,
    "smallest": lambda rounds: smallest(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks, default 5")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--threads", type=int, default=1, help="of torch, default 1")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/runtime.json")
    options = parser.parse_args()
    results = conditions(options.threads)
    for part in options.parts:
        results[part] = PARTS[part](options.rounds)
    write("runtime", results, options.out)


if __name__ == "__main__":
    main()
