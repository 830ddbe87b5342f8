"""A run that happened, simulated or real: the same type, so that either explains the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.schedule._actions import Action, Compute, Free
from rekindle.schedule._schedule import Schedule


@final
@dataclass(frozen=True, slots=True)
class Record:
    """What was done, and what it cost.

    `clock[i]` (ns) and `memory[i]` (bytes) are as action i begins: what a `Compute` makes is not
    there yet, what a `Free` lets go is gone.
    """

    actions: tuple[Action, ...]
    clock: tuple[Nanoseconds, ...]
    memory: tuple[Bytes, ...]
    budget: Bytes | None
    peak: Bytes
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds
    evictions: int
    recomputations: int
    made_by: str = ""

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.actions, self.made_by)

    @property
    def overhead(self) -> float:
        """Recomputation over the cost of running everything once (0.0: nothing recomputed)."""
        return self.recompute_ns / self.compute_ns if self.compute_ns else 0.0


@final
class Recorder:
    """Collects the actions of a running engine, with its clock and memory after each."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.clock: list[Nanoseconds] = []
        self.memory: list[Bytes] = []

    def acted(self, action: Compute | Free, clock: Nanoseconds, memory: Bytes) -> None:
        self.actions.append(action)
        self.clock.append(clock)
        self.memory.append(memory)
