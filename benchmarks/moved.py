"""Measure training steps whose weights, gradients and optimizer state move to a file.

    scripts/bench moved [--shares 0.5 0.25] [--optimizers fused ...]

A GPT trains within a budget that is a share of its weights, gradients and AdamW state. Two copies
of the model train alternately, in blocks of steps (A B A B): one in plain PyTorch without a budget,
one within it. Both see the same batches, and their weights are compared bit for bit. Beside each
block, as many bytes as a step copied are written to a file in the same directory and read back.
On a CPU the program waits for each copy, so a step takes at least the time of the plain step and
of these copies together; `over` is the time of a step divided by this sum. `least` divides the
bytes copied by those that any order copies: what does not fit is written once and read once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from _common import ROOT, answers, conditions, earlier_by, spread, write
from _trainer import block, nbytes
from tests.pytorch import networks
from torch import Tensor, nn

import rekindle

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("optimizer", "share")
SHARES = (0.5, 0.25)  #: budgets, as shares of weights, gradients and optimizer state
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for-loop": partial(torch.optim.AdamW, lr=1e-4, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
}
WIDTH, LAYERS, WORDS, TOKENS, BATCH = 384, 8, 2000, 64, 4
STEPS, ROUNDS = 3, 3
WARM_STEPS = 2  # Rekindle learns the order of the state in them
PIECE = 4 << 20
MOST_SECONDS = 300.0  # time limit for one process (one row of the results)


class Trainer:
    """A GPT, its optimizer, and the same batch in each step."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(20)
        self.model: nn.Module = networks.GPT(
            vocabulary=WORDS, width=WIDTH, heads=WIDTH // 64, layers=LAYERS, context=TOKENS
        )
        self.words = torch.randint(WORDS, (BATCH, TOKENS + 1))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.steps = 0

    def step(self) -> None:
        torch.manual_seed(self.steps)  # both copies of the model draw the same random numbers
        self.steps += 1
        self.optimizer.zero_grad()
        scores: Tensor = self.model(self.words[:, :-1])
        wanted = self.words[:, 1:].flatten()
        nn.functional.cross_entropy(scores.flatten(0, 1), wanted).backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        """Return parameters, buffers, gradients and the optimizer's state."""
        found = [*self.model.parameters(), *self.model.buffers()]
        found += [each.grad for each in self.model.parameters() if each.grad is not None]
        states = self.optimizer.state.values()
        return found + [each for s in states for each in s.values() if isinstance(each, Tensor)]


def copies(out: int, back: int, file: IO[bytes]) -> float:
    """Return the seconds to write `out` bytes to a file, and to read `back` bytes from it.

    The file has `out` bytes before, so that no blocks are allocated, as in a step.
    """
    memory = memoryview(bytearray(max(out, back)))  # larger than the caches of the processor
    pieces = range(0, max(1, out), PIECE)
    for at in pieces:
        os.pwrite(file.fileno(), memory[at : at + PIECE], at)
    start = time.perf_counter()
    for at in pieces:
        os.pwrite(file.fileno(), memory[at : at + PIECE], at)
    for at in range(0, back, PIECE):
        os.preadv(file.fileno(), [memory[at : at + PIECE]], at % out)
    return time.perf_counter() - start


def copied(run: rekindle.Run) -> tuple[int, int]:
    """Return the bytes that a run has copied to the file, and back."""
    figures = run.report().swapped
    return (figures.out, figures.back) if figures else (0, 0)


def measure(optimizer: str, share: float, directory: Path) -> dict[str, Any]:
    plain, moved = Trainer(optimizer), Trainer(optimizer)
    for trainer in (plain, moved):
        trainer.step()  # makes the gradients and the optimizer's state
    state = nbytes(plain.state())
    budget = int(share * state)
    ratios: dict[str, list[float]] = {"time": [], "over": []}
    row: dict[str, Any] = {}
    file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115, it ends with the process
    for _ in range(ROUNDS):
        for _ in range(WARM_STEPS):
            plain.step()
        free = block(plain.step, STEPS, "cpu")
        with rekindle.budget(
            budget, evict="anything", swap="8GiB", swap_directory=directory
        ) as run:
            for _ in range(WARM_STEPS):
                moved.step()
            first = copied(run)
            taken = block(moved.step, STEPS, "cpu")
            last = copied(run)
        out, back = ((now - then) // STEPS for now, then in zip(last, first, strict=True))
        ratios["time"].append(taken / free)
        ratios["over"].append(taken / (free + copies(out, back, file)))
        row |= {"out": out, "back": back, "plain_s": round(free, 4)}
        row["peak_over_budget"] = run.peak / budget
    row["least"] = (row["out"] + row["back"]) / (2 * (state - budget))
    row |= {name: spread(each, 3) for name, each in ratios.items()}
    same = all(map(torch.equal, plain.state(), moved.state()))
    return row | {"state": state, "budget": budget, "same": same}


def worker(optimizer: str, share: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            return measure(optimizer, share, Path(directory))
        except rekindle.OutOfBudget as error:
            return {"infeasible": str(error).splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", nargs="+", type=float, default=[*SHARES])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--out", type=Path, default=RESULTS / "moved.json")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    now = conditions()
    if options.worker:
        optimizer, share = options.worker
        print(json.dumps(worker(optimizer, float(share))))
        return
    rows = earlier_by(options.out, KEY)
    for optimizer in options.optimizers:
        for share in options.shares:
            command = [sys.executable, __file__, "--worker", optimizer, str(share)]
            row = dict(zip(KEY, (optimizer, share), strict=True))
            row |= [*answers(command, MOST_SECONDS)][-1] | {"commit": now["commit"]}
            rows[optimizer, share] = row
            print({key: each for key, each in row.items() if key != "commit"}, flush=True)
            write("moved", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
