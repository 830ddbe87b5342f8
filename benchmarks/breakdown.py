"""Break down the time of a step within a budget, as in Figure 4 of the DTR paper.

    scripts/bench breakdown [--models gpt bert ...] [--fraction 0.5] [--rounds 5]

The script measures these times for each model, and divides each of them by the time of a step in
plain PyTorch:

`bookkeeping`: the time that a budget without a limit adds to a step.
`recomputation`: the time of recomputed operators, at their measured costs.
`choosing`: the time in which the engine chooses evictions. It is the difference of two simulations
    of the same step, with the budget and without. A simulation runs the engine, but no operators.
`other`: the remaining time: calls of recomputed operators, freeing memory, and cache misses.

Blocks of steps alternate: in plain PyTorch, in a budget without a limit, and within the budget.
Times are processor times with one thread; each figure is the median of the rounds. Each model runs
in its own process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from _common import ROOT, answers, conditions, earlier_by, write
from _trainer import Trainer, activations
from _workloads import WORKLOADS
from restarts import MODELS

import rekindle

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("model",)
PARTS = ("bookkeeping", "recomputation", "choosing", "other")
SECONDS = 0.6  # time of a block of steps
MOST_SECONDS = 590.0  # time limit for one process (one point of the results)
WARM_UP = 3  # steps until every operator has a measured cost


def seconds(run: Callable[[], object], count: int = 1) -> float:
    """Return the processor seconds of one run, measured over `count` runs."""
    gc.collect()
    start = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - start) / count


def timed(
    trainer: Trainer, within: Callable[[], AbstractContextManager[Any]], count: int
) -> tuple[float, float]:
    """Return the seconds of a step, and the seconds of recomputation in that step."""
    with within() as run:
        for _ in range(WARM_UP):
            trainer.step()
        before = 0 if run is None else run.recompute_ns
        taken = seconds(trainer.step, count)
        again = 0 if run is None else run.recompute_ns - before
    return taken, again / count / 1e9


def choosing(trainer: Trainer, budget: int, rounds: int) -> float:
    """Return the seconds that the engine takes to choose evictions in one step."""
    with rekindle.budget.unlimited():
        for _ in range(WARM_UP):
            trainer.step()
    trace = rekindle.capture(trainer.step)
    rekindle.simulate(trace, budget=budget, core="native")
    least = [
        min(seconds(lambda: rekindle.simulate(trace, budget=amount, core="native"))  # noqa: B023
            for _ in range(rounds))
        for amount in (budget, None)
    ]  # fmt: skip
    return max(0.0, least[0] - least[1])


def measure(name: str, fraction: float, rounds: int) -> dict[str, Any]:
    trainer = Trainer(WORKLOADS[name], "cpu")
    for _ in range(2):
        trainer.step()
    constants = trainer.constants()
    budget = constants + int(fraction * activations(trainer, "cpu"))
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "watched": rekindle.budget.unlimited,
        "limited": lambda: rekindle.budget(budget, learn=False),
    }
    count = max(2, int(SECONDS / seconds(trainer.step)))
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, within in ways.items():
            taken[way].append(timed(trainer, within, count))
    plain, watched, limited = (statistics.median(each for each, _ in taken[way]) for way in ways)
    again = statistics.median(each for _, each in taken["limited"])
    chose = choosing(trainer, budget, rounds)
    found = {
        "bookkeeping": watched - plain,
        "recomputation": again,
        "choosing": chose,
        "other": limited - watched - again - chose,
    }
    reported = {part: round(value / plain, 4) for part, value in found.items()}
    return {"plain_ms": round(1e3 * plain, 2), "time": round(limited / plain, 4)} | reported


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot a bar for each model."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4.2), layout="constrained")
    own = [row for row in rows if "time" in row]
    names = [row["model"] for row in own]
    above = [1.0] * len(own)
    axis.bar(names, above, color="#c8c8c8", label="operators")
    for part, color in zip(PARTS, ("#4c78a8", "#f58518", "#e45756", "#72b7b2"), strict=True):
        heights = [max(0.0, row[part]) for row in own]
        axis.bar(names, heights, bottom=above, color=color, label=part)
        above = [low + height for low, height in zip(above, heights, strict=True)]
    axis.set_ylabel("time of a step, over plain")
    axis.tick_params(axis="x", rotation=40)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--fraction", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "breakdown.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        try:
            print(json.dumps(measure(options.worker, options.fraction, options.rounds)))
        except rekindle.OutOfBudget as error:
            print(json.dumps({"infeasible": str(error).splitlines()[0]}))
        return
    now = conditions() | {"fraction": options.fraction}
    rows = earlier_by(options.out, KEY)
    for name in options.models:
        settings = ["--fraction", str(options.fraction), "--rounds", str(options.rounds)]
        command = [sys.executable, __file__, "--worker", name, *settings]
        *_, reported = answers(command, MOST_SECONDS)
        rows[(name,)] = {"model": name} | reported | {"commit": now["commit"]}
        print({key: value for key, value in rows[(name,)].items() if key != "commit"}, flush=True)
        write("breakdown", now | {"rows": [*rows.values()]}, options.out)
    draw([*rows.values()], options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
