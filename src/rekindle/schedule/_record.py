"""Define `Record`, the actions and the cost of a run of a program within a budget.

Simulated and real runs have records of the same type, so that they can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.schedule._actions import Action, Schedule


@final
@dataclass(frozen=True, slots=True)
class Record:
    """One run as data, simulated or real: its actions and their cost.

    Attributes:
        actions: All actions, in order.
        clock: The time (ns) at which each action begins.
        memory: The bytes in use when each action begins.
        budget: The budget in bytes, or None.
        peak: The most bytes in use at once.
        compute_ns: Time (ns) in operators that the program called.
        recompute_ns: Time (ns) in recomputed operators.
        evictions: The number of evicted storages.
        recomputations: The number of recomputed operators.
        made_by: The policy or planner that decided.
        swapped_out: Bytes copied to the host.
        swapped_in: Bytes copied back from the host.
        host_peak: The most bytes on the host at once.
        transfer_ns: Time (ns) that the copies took.
        waiting_ns: Time (ns) that the program waited for copies.
        allocated_peak: With a simulated allocator, the most bytes in blocks at once.
        reserved_peak: With a simulated allocator, the most bytes reserved from the device at once.
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
        """The actions as a schedule, for the verifier."""
        return Schedule(self.actions, self.made_by)

    @property
    def overhead(self) -> float:
        """Time lost to recomputing and waiting, as a share of `compute_ns`."""
        lost = self.recompute_ns + self.waiting_ns
        return lost / self.compute_ns if self.compute_ns else 0.0

    @property
    def rounding(self) -> Bytes:
        """Bytes by which the simulated allocator rounded sizes up, at the peak; 0 without one."""
        return self.allocated_peak - self.peak if self.reserved_peak else 0

    @property
    def fragmentation(self) -> Bytes:
        """Bytes that the allocator reserved but could not use at the peak; 0 without one."""
        return self.reserved_peak - self.allocated_peak


@final
class Recorder:
    """Collector of the actions of a running engine, with the clock and the memory of each."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.clock: list[Nanoseconds] = []
        self.memory: list[Bytes] = []

    def acted(self, action: Action, clock: Nanoseconds, memory: Bytes) -> None:
        self.actions.append(action)
        self.clock.append(clock)
        self.memory.append(memory)
