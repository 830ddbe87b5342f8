"""List the modes of the hunt: settings of the budget within which a random loop runs."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

import rekindle
from rekindle import policies
from tests.pytorch import cores
from tests.pytorch.fuzz.check import evicting_before_every_operator
from tests.pytorch.tracker import Tracker

ROOMY = 1 << 32


class TooLong(BaseException):
    """Raised when a run takes too long; the result is then unknown."""


class _Watch(Tracker):
    def __init__(self, contexts: Contexts, mode: Mode) -> None:
        super().__init__(resized=mode.resized)
        self._contexts = contexts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._contexts.operators += 1
        if self._contexts.operators > self._contexts.most_operators and self._contexts.inside:
            raise TooLong
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True)
class Mode:
    """The settings of a budget.

    Attributes:
        arguments: Arguments of `rekindle.budget`.
        amount: The size of the budget: "roomy" evicts nothing, "tight" is as little as works.
        everything: True to evict all that may be evicted before each operator, and before autograd
            unpacks each saved tensor.
        planned: True to use `rekindle.plan`, with as little memory as works, in place of a budget.
        weight: How often the mode is drawn, relative to the others.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    amount: Literal["roomy", "tight"] = "tight"
    everything: bool = False
    planned: bool = False
    weight: float = 1.0

    @property
    def resized(self) -> bool:
        """Return True if user-held values may be evicted.

        The memory tracker must then check the size of every storage after each operator.
        """
        return self.arguments.get("evict") != "saved" and "swap" not in self.arguments

    @contextmanager
    def around(self) -> Iterator[None]:
        everything = evicting_before_every_operator() if self.everything else nullcontext()
        with cores.counting(), cores.fixed_prices(), everything:
            yield


_SAVED = {"evict": "saved"}
_ANYTHING = {"evict": "anything"}
MODES = {
    mode.name: mode
    for mode in (
        Mode("unlimited", amount="roomy", weight=0.5),
        Mode("everything evicted", amount="roomy", everything=True, weight=2),
        Mode("tight", weight=4),
        Mode("saved, tight", _SAVED, weight=2),
        Mode("anything, roomy", _ANYTHING, "roomy", weight=0.3),
        Mode("anything, everything evicted", _ANYTHING, "roomy", everything=True, weight=2),
        Mode("anything, tight", _ANYTHING, weight=3),
        Mode("swap", {"swap": "1GiB"}),
        Mode("swap, everything evicted", {"swap": "1GiB"}, "roomy", everything=True),
        Mode("learned", {"learn": "wait"}, weight=1.5),
        Mode("recorded", {"record": True}, weight=0.5),
        Mode("LRU", {"policy": policies.LRU()}, weight=0.5),
        Mode("random", {"policy": policies.Random()}, weight=0.7),
        Mode("DTR", {"policy": policies.DTR()}, weight=0.7),
        Mode("largest", {"policy": policies.Largest()}, weight=0.3),
        Mode("anything, recorded", {**_ANYTHING, "record": True}, weight=0.5),
        Mode("anything, random", {**_ANYTHING, "policy": policies.Random()}, weight=0.5),
        Mode("planned", planned=True, weight=0.1),
        Mode("anything, learned", {**_ANYTHING, "learn": "wait"}, weight=0.7),
    )
}


class Contexts:
    """The meaning of the names `budget` and `planned` in a program that runs in a mode.

    If `mode` is None, the program runs in plain PyTorch. If `below` is True as well, its `budget`
    is a dispatch mode that does nothing.
    """

    def __init__(
        self, mode: Mode | None, amount: int = 0, *, counting: bool = False, below: bool = False
    ) -> None:
        #: The run is stopped after this many operators, recomputed ones included. If everything is
        #: evicted, a program with n operators runs n**2 of them or, at the smallest budget, more.
        self.most_operators: float = math.inf
        self.mode, self.amount, self.counting = mode, amount, counting
        self.below = below
        self.peak = 0
        self.operators = 0
        self.runs: list[Any] = []
        self.marks: list[tuple[int, int]] = []
        self._run: Any = None

    @contextmanager
    def budget(self) -> Iterator[None]:
        """Return the context that the program enters as its budget."""
        if self.mode is None or self.mode.planned:
            with Tracker() if self.below else nullcontext():
                yield
            return
        tracker = _Watch(self, self.mode)
        with tracker:
            try:
                with rekindle.budget(self.amount, **self.mode.arguments) as run:
                    self._run = run
                    self.runs.append(run)
                    try:
                        yield
                    finally:
                        self._run = None
                        # After the budget all evicted values are in memory again.
                        self.peak = max(self.peak, tracker.peak)
            finally:
                if not self.mode.resized:
                    self.peak = max(self.peak, tracker.peak)

    @property
    def inside(self) -> bool:
        """Return True if the mode runs the program within a budget."""
        return self._run is not None

    def planned(self, net: nn.Module, example: torch.Tensor) -> nn.Module:
        if self.mode is None or not self.mode.planned:
            return net
        return rekindle.plan(net, (example,), budget=self.amount).apply()

    def mark(self) -> None:
        """Note at the end of a step how many storages the budget tracks, and their bytes."""
        if self.counting and self._run is not None:
            gc.collect()
            memory = self._run.memory
            self.marks.append((sum(1 for _ in self._run._driver.engine.storages), memory))
