"""Train two copies of a model alternately, to compare the memory and the time of their steps.

The *plain* copy trains in plain PyTorch, the *changed* copy with the method that is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _methods import Point
from _workloads import Workload
from tests.pytorch.allocations import allocated


class Trainer:
    """A model, its optimizer, and the same batch in each step."""

    def __init__(self, workload: Workload, device: str) -> None:
        torch.manual_seed(20)
        self.workload = workload
        sizes = workload.sizes(device)
        self.model = workload.build(**sizes)
        self.batch = workload.batch(**sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.called: Any = self.model  # what the steps call: the model, or the model compiled

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.workload.loss(self.called, self.batch).backward()
        self.optimizer.step()

    def constants(self) -> int:
        """Return the bytes of parameters, buffers, gradients and optimizer state."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [each.grad for each in self.model.parameters() if each.grad is not None]
        return nbytes(tensors) + self.state()

    def state(self) -> int:
        """Return the bytes of the optimizer's state."""
        return nbytes(
            each
            for state in self.optimizer.state.values()
            for each in state.values()
            if isinstance(each, torch.Tensor)
        )


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each storage once."""
    homes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(homes.values())


def activations(trainer: Trainer, device: str) -> int:
    """Return the bytes at the peak of a step, minus the bytes that remain at its end."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    trainer.step()
    peak, left = allocated(trainer.step)
    return peak - left


def block(step: Callable[[], None], count: int, device: str) -> float:
    """Return the seconds of a step, averaged over `count` steps."""
    gc.collect()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


@contextmanager
def warm(point: Point, changed: Trainer, constants: int, peak: int) -> Iterator[None]:
    """Run training steps in the context of `point` until its plans and caches are ready.

    The context stays open until the `with` block ends.
    """
    with point.around(constants, peak) as run:
        for _ in range(point.warm_up):
            changed.step()
        if hasattr(run, "wait_for_plan"):
            run.wait_for_plan(60.0)
            for _ in range(2):
                changed.step()
        yield


def in_turn(
    plain: tuple[Trainer, int],
    changed: tuple[Trainer, int],
    around: tuple[Point, int, int],
    *,
    rounds: int,
    device: str,
) -> list[tuple[float, float]]:
    """Time steps of the plain and of the changed model alternately, in blocks of several steps.

    Args:
        plain: The trainer of the plain model, and the number of its steps in a block.
        changed: The same for the changed model.
        around: The setting to measure, and the constants and the peak (bytes) of the plain model.

    Returns:
        For each pair of blocks: seconds of one plain step, and of one changed step.
    """
    point, constants, peak = around
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        free = block(plain[0].step, plain[1], device)
        with point.around(constants, peak):
            if point.method.startswith("rekindle"):
                # Not timed: a new budget first registers the parameters and finds its plan.
                for _ in range(3):
                    changed[0].step()
            found.append((free, block(changed[0].step, changed[1], device)))
    return found
