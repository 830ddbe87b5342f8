"""Compare the time that `rekindle.profile` predicts with that of real steps, on the demo's GPT.

The profile is made once. Then, for each fraction of the activation memory, steps with and without
the budget alternate, and the median ratio of their times is compared with the prediction. The
profile's peak is compared with the one that the tests' tracker counts independently of Rekindle.
Times are processor times with one thread, because other programs use the machine too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import conditions, spread, write
from tests.pytorch.tracker import measure
from torch.nn import functional

import rekindle
from rekindle.cli import _demo_training as demo
from rekindle.pytorch import prices

FRACTIONS = (1.0, 0.7, 0.5, 0.3)


def gpt(layers: int) -> Callable[[], None]:
    settings = demo.Settings(layers=layers)
    text = demo.read_text(settings.context)
    torch.manual_seed(0)
    model = demo.GPT(settings, len(text.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    numbers = iter(range(1_000_000))

    def step() -> None:
        characters, following = text.batch(settings, next(numbers))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()

    return step


def ratio(step: Callable[[], None], budget: int) -> float:
    """Return the time of a step within the budget, divided by that of the next step without one."""
    plain = timed(step)
    with rekindle.budget(budget, learn=False):
        return timed(step) / plain


def timed(step: Callable[[], None]) -> int:
    start = time.process_time_ns()
    step()
    return time.process_time_ns() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of steps, default 7")
    parser.add_argument("--layers", type=int, default=12, help="of the GPT, default 12")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/prediction.json")
    options = parser.parse_args()
    results: dict[str, Any] = conditions()
    step = gpt(options.layers)
    step()
    profile = rekindle.profile(step, clock=time.process_time_ns)
    memory = measure(lambda: (step(), step(), None)[-1])
    held = sum(profile.at_peak.categories.values())
    results["peak"] = {
        "tracked": memory.peak,
        "profiled": profile.peak,
        "sum_of_categories": held,
        "categories_over_tracked": round(held / memory.peak, 5),
    }
    results["bookkeeping_ns"] = prices()._asdict()
    for fraction in FRACTIONS:
        budget = memory.budget(fraction)
        measured = [ratio(step, budget) for _ in range(options.rounds)]
        foretold = profile.slowdown(budget)
        row = {
            "budget": budget,
            "measured": spread(measured),
            "predicted": round(foretold, 4),
            "error": round(foretold / spread(measured)["median"] - 1, 4),
        }
        results[f"{fraction:.0%}"] = row
        print(f"{fraction:.0%}", row, flush=True)
    write("prediction", results, options.out)


if __name__ == "__main__":
    main()
