"""Compare steps with and without learned plans, which take turns. benchmarks/README.md has more.

    scripts/bench turns [--models gpt moe ...] [--rounds 5]

Two copies of a model train in one process: one in plain PyTorch, one within a budget, first without
learned plans and then with them. The three ways take turns, in blocks of steps. Times are processor
times, which other programs on the machine disturb little.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from _common import ROOT, answers, conditions, earlier_by, spread, write
from _trainer import Trainer, activations
from _workloads import WORKLOADS

import rekindle

RESULTS = ROOT / "benchmarks" / "results" / "turns.json"
KEY = ("model", "share")
SHARES = (0.5, 0.25)  #: budgets: shares of the activations
SECONDS = 2.0  # processor time of a block
UNTIMED = 3  # steps at the beginning of each budget
MOST_SECONDS = 600.0  # time limit for one model and share


def timed(step: Callable[[], None], count: int) -> float:
    """Return the processor time (s) of a step, the average of `count` steps."""
    gc.collect()
    began = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - began) / count


def within(budget: int, trainer: Trainer, count: int, *, learn: bool) -> tuple[float, Any]:
    with rekindle.budget(budget, learn=learn) as run:
        for _ in range(UNTIMED):
            trainer.step()
        return timed(trainer.step, count), run


def measure(model: str, share: float, rounds: int) -> dict[str, Any]:
    plain, changed = (Trainer(WORKLOADS[model], "cpu") for _ in range(2))
    plain.step()
    plain.step()
    constants = plain.constants()
    budget = constants + int(share * activations(plain, "cpu"))
    count = max(2, int(SECONDS / timed(plain.step, 2)))
    with rekindle.budget(budget, learn=True) as run:
        for _ in range(20):
            changed.step()
        run.wait_for_plan(60.0)
        for _ in range(UNTIMED):
            changed.step()
    online: list[float] = []
    learned: list[float] = []
    followed = 0
    for _ in range(rounds):
        free = timed(plain.step, count)
        taken, _ = within(budget, changed, count, learn=False)
        online.append(taken / free)
        taken, run = within(budget, changed, count, learn=True)
        learned.append(taken / free)
        followed += run.steps_followed
    return {
        "online": spread(online, 3),
        "learned": spread(learned, 3),
        "learned/online": round(median(a / b for a, b in zip(learned, online, strict=True)), 3),
        "followed": round(followed / (rounds * (count + UNTIMED)), 3),
        "report": [line for line in str(run.report()).splitlines() if "was left" in line],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        model, share = options.worker
        torch.set_num_threads(1)
        print(json.dumps(measure(model, float(share), options.rounds)))
        return
    now = conditions()
    rows = earlier_by(RESULTS, KEY)
    for model in options.models:
        for share in SHARES:
            command = [sys.executable, __file__, "--worker", model, str(share)]
            command += ["--rounds", str(options.rounds)]
            row = {"model": model, "share": share} | [*answers(command, MOST_SECONDS)][-1]
            rows[model, share] = row | {"commit": now["commit"]}
            print(row, flush=True)
            write("turns", now | {"rows": [*rows.values()]}, RESULTS)


if __name__ == "__main__":
    main()
