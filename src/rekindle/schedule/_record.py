"""A run that happened, simulated or real: the same type, so that either explains the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.schedule._actions import Action
from rekindle.schedule._schedule import Schedule


@final
@dataclass(frozen=True, slots=True)
class Record:
    """What was done, and what it cost.

    `clock[i]` (ns) and `memory[i]` (bytes) are as action i begins: what a `Compute` makes is not
    there yet, nor what a `SwapIn` brings; what a `Free` or a `SwapOut` lets go is gone.

    swapped_out, swapped_in: bytes that were copied to the host and back.
    host_peak: the most bytes that were on the host at once.
    waiting_ns: what the program waited for copies; of `transfer_ns` the rest was hidden behind
        computation.

    Where an allocator was simulated:
    allocated_peak: the most bytes of blocks in use at once: `peak`, as it rounds sizes up.
    reserved_peak: the most that it had taken from the device at once.
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
    swapped_out: Bytes = 0
    swapped_in: Bytes = 0
    host_peak: Bytes = 0
    transfer_ns: Nanoseconds = 0
    waiting_ns: Nanoseconds = 0
    allocated_peak: Bytes = 0
    reserved_peak: Bytes = 0

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.actions, self.made_by)

    @property
    def overhead(self) -> float:
        """Recomputing and waiting over the cost of running everything once (0.0: neither)."""
        lost = self.recompute_ns + self.waiting_ns
        return lost / self.compute_ns if self.compute_ns else 0.0

    @property
    def rounding(self) -> Bytes:
        """What blocks had at the peak beyond what was asked for; 0 without an allocator."""
        return self.allocated_peak - self.peak if self.reserved_peak else 0

    @property
    def fragmentation(self) -> Bytes:
        """What the device had to have beyond all that was in use at the peak: free, but in pieces
        that nothing fitted into, or kept for later. 0 without an allocator."""
        return self.reserved_peak - self.allocated_peak


@final
class Recorder:
    """Collects the actions of a running engine, with its clock and memory after each."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.clock: list[Nanoseconds] = []
        self.memory: list[Bytes] = []

    def acted(self, action: Action, clock: Nanoseconds, memory: Bytes) -> None:
        self.actions.append(action)
        self.clock.append(clock)
        self.memory.append(memory)
