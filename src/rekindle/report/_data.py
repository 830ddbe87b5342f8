"""Define the plain data of which a report consists.

The runtime and the simulator fill these classes; the other modules of this package format them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from rekindle._types import Bytes, Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Holders:
    """Uses of memory at one moment, in tables by category, module, source line and operator.

    If `memory` is known, the bytes in each table add up to it.

    Attributes:
        memory: Bytes in use.
        clock: Time (ns) of operators since the start.
        where: The source line that the program was running, as "file:line".
        categories: Bytes by category: parameters, gradients, saved for backward, ...
        modules: Bytes by module.
        lines: Bytes by source line.
        operators: Bytes by operator.
        resident: Resident memory of the process (RSS) in bytes, as the operating system counts it;
            0 if unknown.
        cached: Bytes of the resident memory that the allocator caches for the next request.
    """

    memory: Bytes = 0
    clock: Nanoseconds = 0
    where: str = ""
    categories: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    modules: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    lines: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    operators: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    resident: Bytes = 0
    cached: Bytes = 0


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory over time, as a list of points.

    Attributes:
        clock: The time (ns) of each point since the start.
        bands: For each category, the bytes in use at each point.
        evicted: Bytes evicted since the previous point. Storages that are never needed again do
            not count.
        recomputed: Time (ns) of recomputation since the previous point.
        note: The part of the run that the timeline shows; empty if it shows the whole run.
    """

    clock: tuple[Nanoseconds, ...] = ()
    bands: Mapping[str, tuple[Bytes, ...]] = field(default_factory=dict[str, tuple[Bytes, ...]])
    evicted: tuple[Bytes, ...] = ()
    recomputed: tuple[Nanoseconds, ...] = ()
    note: str = ""


@final
@dataclass(frozen=True, slots=True)
class Recomputed:
    """How many calls of one operator in one `nn.Module` were recomputed, and their time (ns)."""

    module: str
    operator: str
    times: int
    ns: Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A budget, and the predicted or measured time of a step within this budget.

    Attributes:
        budget: The budget in bytes.
        step_ns: The time of a step (ns).
        slowdown: This time divided by the time of the step without Rekindle.
        recompute_ns: Time (ns) in recomputed operators.
        recomputations: How many operators are recomputed.
        host: If weights, gradients and optimizer state move, the most bytes on the host at once.
        copied: If they move, bytes copied to the host and back in a step.
        measured: True if steps have run within this budget; False if they were simulated.
        sliced: The operators that ran in slices, because they had no room as a whole.
    """

    budget: Bytes
    step_ns: Nanoseconds
    slowdown: float
    recompute_ns: Nanoseconds
    recomputations: int
    host: Bytes = 0
    copied: Bytes = 0
    measured: bool = False
    sliced: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Swapped:
    """Figures of swapping values to the host's memory.

    Attributes:
        out: Bytes copied to the host.
        back: Bytes copied back from the host.
        host_peak: The most bytes of copies on the host at once.
        transfer_ns: Time (ns) of all copies.
        waiting_ns: Time (ns) that the program waited for copies. The rest of `transfer_ns` was
            hidden behind computation.
    """

    out: Bytes = 0
    back: Bytes = 0
    host_peak: Bytes = 0
    transfer_ns: Nanoseconds = 0
    waiting_ns: Nanoseconds = 0


@final
@dataclass(frozen=True, slots=True)
class Moved:
    """Copies of one kind of value to the host and back.

    Attributes:
        kind: The kind, such as "parameters".
        times_out: How many copies to the host.
        out: Their bytes.
        times_back: How many copies back.
        back: Their bytes.
    """

    kind: str
    times_out: int
    out: Bytes
    times_back: int
    back: Bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that a `Report` shows. Bytes and nanoseconds are integers."""

    budget: Bytes | None
    peak: Bytes
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds
    evictions: int
    recomputations: int
    title: str = "A run within a budget"
    measured: str = "step"  #: what was measured: a "step", or the whole "run" of a script
    at_peak: Holders = Holders()
    timeline: Timeline = Timeline()
    recomputed: tuple[Recomputed, ...] = ()
    choices: tuple[Choice, ...] = ()
    keep_all: Bytes | None = None  #: peak of a step in which nothing is evicted
    smallest_budget: Bytes | None = None  #: smallest budget in which the step runs
    plain_ns: Nanoseconds | None = None  #: measured time of the step without Rekindle
    swapped: Swapped | None = None  #: figures of swapping; None if nothing may be swapped
    moved: tuple[Moved, ...] = ()  #: the copies that `swapped` adds up, by kind of value
    #: With `evict="anything"` and `swap=`: bytes of what stays in memory, by name and reason.
    staying: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    advice: tuple[str, ...] = ()
    #: time lost (ns), with bookkeeping but without waiting for copies
    lost_ns: Nanoseconds | None = None

    @property
    def overhead(self) -> float:
        """Time lost to the budget, as a share of `compute_ns`; 0.0 means that nothing was lost."""
        return self.time_lost / self.compute_ns if self.compute_ns else 0.0

    @property
    def time_lost(self) -> Nanoseconds:
        """Time (ns) lost to the budget, including `swapped.waiting_ns`."""
        lost = self.recompute_ns if self.lost_ns is None else self.lost_ns
        return lost + (0 if self.swapped is None else self.swapped.waiting_ns)
