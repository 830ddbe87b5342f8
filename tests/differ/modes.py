"""Define modes, which are settings of a budget, and what a program's budget means in a mode."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import torch
from torch import nn

import rekindle
from tests.pytorch import cores
from tests.pytorch.tracker import Tracker

ROOMY = 1 << 32  #: a budget in bytes that evicts nothing
#: What makes room in a budget: values that may be evicted, tensors that move to a file and back
#: ("moved"), or operators that run in slices ("split").
Evict = Literal["saved", "auto", "anything", "moved", "split", "anything, split", "moved, split"]
MOVED = {"evict": "anything", "swap": "1GiB"}
SPLIT = {"split": "equal"}
WHOLE = {"split": "never"}  #: in all modes but those: their budgets are those of whole operators


def evicting(evict: Evict) -> dict[str, Any]:
    """Return the arguments of `rekindle.budget` for a way to make room."""
    ways = {"moved": MOVED, "split": SPLIT}
    return {
        name: value
        for way in evict.split(", ")
        for name, value in ways.get(way, {"evict": way}).items()
    }


class TooLong(BaseException):
    """Raised when a run takes too long; the result is then unknown."""


@dataclass(frozen=True)
class Mode:
    """The settings of a budget.

    Attributes:
        arguments: Arguments of `rekindle.budget`.
        amount: The size of the budget. "roomy" evicts nothing, "tight" is as little as works, and
            "peak" is what plain PyTorch needs. "creeping" is as little as works as well, but each
            next try is a little larger than the last, whatever `OutOfBudget` suggests. A number is
            a share of the peak that a budget without a limit measures; "unlimited" is that budget.
        everything: True to evict all that may be evicted before each operator, and before autograd
            unpacks each saved tensor.
        planned: True to use `rekindle.plan`, with as little memory as works, in place of a budget.
        counted: About as many operators are only counted at first (memory/room/only_counting.h).
        weight: How often the mode is drawn, relative to the others.
        fixed: True to give each operator the same cost, so that each run evicts the same.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    amount: Literal["unlimited", "roomy", "tight", "creeping", "peak"] | float = "tight"
    everything: bool = False
    planned: bool = False
    counted: int = 0
    weight: float = 1.0
    fixed: bool = True

    @property
    def ample(self) -> bool:
        """Return True if the budget must suffice for every program."""
        return self.amount in ("unlimited", "roomy")

    @property
    def resized(self) -> bool:
        """Return True if user-held values may be evicted.

        The memory tracker must then check the size of every storage after each operator.
        """
        evict = self.arguments.get("evict", "saved" if "swap" in self.arguments else "auto")
        return evict != "saved"

    @contextmanager
    def around(self, seed: int = 0) -> Iterator[None]:
        """Apply the settings that are no arguments of a budget to all budgets made inside."""
        with ExitStack() as stack:
            if self.fixed:
                stack.enter_context(cores.fixed_prices())
            stack.enter_context(cores.counting())
            if self.counted:
                operators = Random(seed).randrange(self.counted)
                cores.tune(lambda driver: driver.core.count_only(driver.handle, operators))
            if self.everything:
                stack.enter_context(cores.evicting_before_every_operator())
            yield


def by_name(*modes: Mode) -> dict[str, Mode]:
    return {mode.name: mode for mode in modes}


def drawn(
    modes: Mapping[str, Mode], rng: Random, count: int, only: Sequence[str] = ()
) -> list[Mode]:
    """Draw `count` different modes by their weights, from those in `only` or from all."""
    possible = [mode for mode in modes.values() if mode.name in only or not only]
    found: list[Mode] = []
    while possible and len(found) < count:
        (mode,) = rng.choices(possible, [mode.weight for mode in possible])
        possible.remove(mode)
        found.append(mode)
    return found


class _Watch(Tracker):
    """A tracker that stops a run which takes too long."""

    def __init__(self, setting: Setting, *, resized: bool) -> None:
        super().__init__(resized=resized)
        self._setting = setting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        setting = self._setting
        setting.operators += 1
        if setting.operators > setting.most_operators and setting.inside:
            raise TooLong
        return super().__torch_dispatch__(func, types, args, kwargs)


class Setting:
    """The meaning of the names `budget`, `planned` and `mark` in a program that runs in a mode.

    A program enters `whole` around all that it does, and `budget` around a part of it.

    Args:
        mode: The mode; None for plain PyTorch.
        amount: The budget in bytes; None for no limit.
        measuring: True to measure the memory of the whole program by a dispatch mode.
        below: True to enter a dispatch mode that does nothing in place of each budget.
        resized: True if the program itself changes the size of storages.
        tracked: True to measure the memory within budgets by a dispatch mode.
        counting: True to note at each mark how much bookkeeping there is.
    """

    def __init__(
        self,
        mode: Mode | None,
        amount: int | None = 0,
        *,
        measuring: bool = False,
        below: bool = False,
        resized: bool = False,
        tracked: bool = True,
        counting: bool = False,
    ) -> None:
        #: The run is stopped after this many operators, recomputed ones included. If everything is
        #: evicted, a program with n operators runs n**2 of them or, at the smallest budget, more.
        self.most_operators: float = math.inf
        self.mode, self.amount, self.counting = mode, amount, counting
        self.measuring, self.below, self.tracked = measuring and tracked, below, tracked
        self.resized = resized or (mode is not None and mode.resized)
        self.peak = 0  #: the peak within budgets; of the whole program if it is only measured
        self.kept = 0  #: bytes in use at the end of a program that is measured
        self.operators = 0
        self.order: list[tuple[str, int]] = []  #: operators of a program that may be interrupted
        self.runs: list[Any] = []
        self.marks: list[tuple[int, int]] = []
        self._run: Any = None
        self._trackers: list[Tracker] = []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Return the context in which the whole program runs."""
        if not self.measuring:
            yield
            return
        tracker = self._tracker()
        try:
            with tracker:
                yield
                gc.collect()
        finally:
            self.peak, self.kept = tracker.peak, tracker.alive

    @contextmanager
    def budget(self) -> Iterator[Any]:
        """Return the context that the program enters as its budget."""
        if self.mode is None or self.mode.planned:
            with Tracker() if self.below else nullcontext():
                yield None
            return
        tracker = self._tracker() if self.tracked else None
        with tracker or nullcontext():
            try:
                nbytes = None if self.amount is None else f"{self.amount}B"
                with rekindle.budget(nbytes, **WHOLE | self.mode.arguments) as run:
                    self._run = run
                    self.runs.append(run)
                    try:
                        yield run
                    finally:
                        self._run = None
                        # After the budget all evicted values are in memory again.
                        self.peak = max(self.peak, tracker.peak if tracker else 0)
                if not tracker:
                    self.peak = max(self.peak, run.peak)
            finally:
                if tracker and not self.resized:
                    self.peak = max(self.peak, tracker.peak)

    def _tracker(self) -> Tracker:
        self._trackers.append(_Watch(self, resized=self.resized))
        return self._trackers[-1]

    @property
    def inside(self) -> bool:
        """Return True if the mode runs the program within a budget."""
        return self._run is not None

    @property
    def left(self) -> int:
        """Return the bytes that the program left in memory, also those in uncollectable cycles."""
        if any(tracker.alive for tracker in self._trackers):
            gc.collect()
        return sum(tracker.alive for tracker in self._trackers)

    @property
    def most(self) -> float:
        """Return how many bytes may be in use within the budget."""
        return math.inf if self.amount is None else self.amount

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
