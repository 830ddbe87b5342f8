"""Measure long eager loops in little memory. benchmarks/README.md has more.

    python benchmarks/loops.py [--rounds 3] [--steps 10000 20000]

The program repeats `x = normalize(c @ x)` n times, and computes the gradient of a weight in `c`
(pytorch/pytorch#125591). It runs in plain PyTorch, within a budget that is a share of its
activations, and with `torch.utils.checkpoint` around each sqrt(n) consecutive iterations. These
three ways take turns in one process. Times are processor times.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import conditions, spread, write
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rekindle

WIDTH = 64
SHARES = {
    2_000: (0.1, 0.02),
    10_000: (0.02, 0.01),
    20_000: (0.02, 0.005),
    100_000: (0.001,),
}


def steps_of(matrix: Tensor, x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        x = matrix @ x
        x = x / x.norm()
    return x


def loop(steps: int, piece: int | None = None) -> float:
    """Run the loop and its backward pass, and return the gradient of the weight.

    Args:
        steps: The number of iterations.
        piece: Wrap each group of this many consecutive iterations in `torch.utils.checkpoint`.
            None: wrap nothing.
    """
    generator = torch.Generator().manual_seed(0)
    first, second, x = (
        torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    matrix = first / first.norm() + weight * (second / second.norm())
    if piece is None:
        x = steps_of(matrix, x, steps)
    else:
        for begun in range(0, steps, piece):
            some = min(piece, steps - begun)
            x = checkpoint(steps_of, matrix, x, some, use_reentrant=False)
    (second.t() @ x).norm().backward()
    assert weight.grad is not None
    return weight.grad.item()


def timed(call: Callable[[], float]) -> tuple[float, float]:
    """Return the processor time (s) of `call`, and what it returned."""
    gc.collect()
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def rows_of(steps: int, rounds: int) -> list[dict[str, Any]]:
    with rekindle.budget.unlimited() as run:
        loop(steps)
    activations = run.peak
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: loop(steps),
        "checkpoint": lambda: loop(steps, math.isqrt(steps)),
    }
    runs: dict[str, rekindle.Run] = {}

    def within(share: float, name: str) -> float:
        with rekindle.budget(int(share * activations)) as runs[name]:
            return loop(steps)

    for share in SHARES[steps]:
        name = f"budget of {share:.1%}"
        ways[name] = lambda share=share, name=name: within(share, name)  # type: ignore[misc]
    took: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, float] = {}
    for _ in range(rounds):
        for name, call in ways.items():
            seconds, gradients[name] = timed(call)
            took[name].append(seconds)
    plain = min(took["plain"])
    return [
        {
            "steps": steps,
            "way": name,
            "activations": activations,
            "seconds": spread(each),
            "over plain": round(min(each) / plain, 3),
            "same bits": gradients[name] == gradients["plain"],
            "peak": runs[name].peak if name in runs else None,
            "recomputations": runs[name].recomputations if name in runs else None,
        }
        for name, each in took.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", choices=[*SHARES], default=[*SHARES])
    arguments = parser.parse_args()
    results = conditions()
    results["rows"] = []
    for steps in arguments.steps:
        for row in rows_of(steps, arguments.rounds):
            results["rows"].append(row | {"commit": results["commit"]})
            print(row, flush=True)
        write("loops", results)


if __name__ == "__main__":
    main()
