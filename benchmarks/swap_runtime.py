"""Compare swapping with recomputation in real training steps. benchmarks/README.md has the claims.

On a CPU values are swapped to a file, on CUDA (`--device cuda`) to page-locked host memory. On CUDA
`torch.autograd.graph.save_on_cpu` is measured as well; on a CPU it moves nothing. Each way
alternates with plain PyTorch, in blocks of steps in one process: A B A B.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import conditions, spread, write
from _workloads import WORKLOADS, Workload
from tests.pytorch.tracker import Tracker
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import rekindle
from rekindle.native import cores
from rekindle.policies import Swap

FRACTIONS = (0.5, 0.3)
MODELS = ("gpt", "resnet50", "unet")
SEED = 3


class Trainer:
    """Trains one model, always on the same batch."""

    def __init__(self, workload: Workload, device: str) -> None:
        torch.manual_seed(SEED)
        sizes = workload.sizes(device)
        self.workload = workload
        self.model: nn.Module = workload.build(**sizes).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batch = tuple(part.to(device) for part in workload.batch(**sizes))
        self.device = device

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.workload.loss(self.model, self.batch).backward()
        self.optimizer.step()

    def seconds(self, count: int) -> tuple[float, float]:
        """Return the elapsed time and the processor time of a step, in seconds.

        The elapsed time shows whether transfers run during computation. The processor time, all
        threads included, is hardly changed by other programs on the machine.
        """
        gc.collect()
        start, process = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count, (time.process_time() - process) / count

    def memory(self, around: AbstractContextManager[Any]) -> tuple[int, int]:
        """Return the peak of two steps, and the memory in use after them, in bytes."""
        torch.manual_seed(SEED)
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with around:
                self.step()
                self.step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        with Tracker() as tracker, around:
            self.step()
            self.step()
        gc.collect()
        return tracker.peak, tracker.alive

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


Around = Callable[[], AbstractContextManager[Any]]


def ways(budget: int, device: str, directory: Path | None) -> Iterator[tuple[str, Around]]:
    where: dict[str, Any] = {"swap_directory": directory} if device == "cpu" else {}

    def swapping(swap: str | Swap) -> Around:
        return lambda: rekindle.budget(budget, device=device, swap=swap, **where)

    yield "recompute", lambda: rekindle.budget(budget, device=device, learn=False)
    yield "swap or recompute", swapping("1TiB")
    yield "swap only", swapping(Swap(only=True))


def measure(
    workload: Workload, device: str, directory: Path | None, rounds: int, steps: int
) -> dict[str, Any]:
    plain = Trainer(workload, device)
    plain.step()
    peak, constants = plain.memory(nullcontext())
    row: dict[str, Any] = {"peak": peak, "constants": constants}
    if device == "cuda":
        around: Around = lambda: save_on_cpu(pin_memory=True)  # noqa: E731
        row["save_on_cpu"] = one(workload, around, plain, rounds, steps)
        show(workload.name, "save_on_cpu", row["save_on_cpu"])
    for fraction in FRACTIONS:
        budget = constants + int(fraction * (peak - constants))
        for name, around in ways(budget, device, directory):
            try:
                found = one(workload, around, plain, rounds, steps)
            except rekindle.OutOfBudget as error:
                found = {"infeasible": True, "smallest_budget": error.smallest_budget}
            else:
                found["within"] = found["peak"] <= budget
            row[f"{name}, {fraction:.0%}"] = found
            show(workload.name, f"{name}, {fraction:.0%}", found)
    return row


def one(
    workload: Workload, around: Around, plain: Trainer, rounds: int, steps: int
) -> dict[str, Any]:
    """Measure one way: its peak, its time divided by plain PyTorch's, and figures of its run."""
    device = plain.device
    reference, trained = Trainer(workload, device), Trainer(workload, device)
    reference.memory(nullcontext())
    peak, _ = trained.memory(around())
    pairs = zip(reference.weights(), trained.weights(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    del reference
    free: list[float] = []
    ratios: list[float] = []
    process: list[float] = []
    runs: list[Any] = []
    for _ in range(rounds):
        seconds, of_process = plain.seconds(steps)
        free.append(seconds)
        with around() as entered:
            runs.append(entered)
            trained.step()  # not timed, because a new budget first registers the parameters
            mine, of_mine = trained.seconds(steps)
        ratios.append(mine / seconds)
        process.append(of_mine / of_process)
    found: dict[str, Any] = {
        "same_weights": same,
        "peak": peak,
        "plain_s": spread(free),
        "ratio": spread(ratios, 3),
        "process_ratio": spread(process, 3),
    }
    run = runs[-1]
    if run is not None:
        found["recomputations_per_step"] = round(run.recomputations / (steps + 1), 1)
        swapped = run.report().swapped
        if swapped is not None:
            found["swapped_out_per_step"] = swapped.out // (steps + 1)
            found["transfer_ms_per_step"] = round(swapped.transfer_ns / 1e6 / (steps + 1), 1)
            found["waiting_ms_per_step"] = round(swapped.waiting_ns / 1e6 / (steps + 1), 1)
    return found


def show(model: str, way: str, row: dict[str, Any]) -> None:
    parts = (
        f"{key} {value['median'] if isinstance(value, dict) else value}"
        for key, value in row.items()
    )
    print(f"{model:10} {way:24} " + "  ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--directory", type=Path, help="for the file; default: as rekindle.budget")
    parser.add_argument("--models", nargs="+", choices=[*WORKLOADS], default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks, default 5")
    parser.add_argument("--steps", type=int, default=3, help="in a block, default 3")
    parser.add_argument("--threads", type=int, default=1, help="of torch, default 1")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/swap_runtime.json")
    options = parser.parse_args()
    results = conditions(options.threads)
    results["device"] = options.device
    if options.device == "cpu":
        results["cores_allowed"] = cores()
        results["save_on_cpu"] = "not measured: on a CPU it moves nothing"
    for name in options.models:
        results[name] = measure(
            WORKLOADS[name], options.device, options.directory, options.rounds, options.steps
        )
    write("swap_runtime", results, options.out)


if __name__ == "__main__":
    main()
