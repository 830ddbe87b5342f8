"""What a report is made of: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from rekindle._types import Bytes, Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds memory at one moment, in bytes. Each table adds up to `memory` if that is known.

    Attributes:
        memory: Bytes in use.
        clock: Time (ns) of operators since the start.
        where: The source line that ran, as "file:line".
        categories: Bytes by category: parameters, gradients, saved for backward, ...
        modules: Bytes by module.
        lines: Bytes by source line.
        operators: Bytes by operator.
        resident: What the process took of the machine, as the system counts it; 0 if unknown.
        cached: Bytes of that which were free, and kept for the next request.
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
    """Memory over a run: at `clock[i]` (ns) `bands[name][i]` bytes of each kind are in use.

    evicted: bytes let go that were brought back later, and recomputed: ns spent on that, since the
    point before. note: what part of the run it is of, if not of all.
    """

    clock: tuple[Nanoseconds, ...] = ()
    bands: Mapping[str, tuple[Bytes, ...]] = field(default_factory=dict[str, tuple[Bytes, ...]])
    evicted: tuple[Bytes, ...] = ()
    recomputed: tuple[Nanoseconds, ...] = ()
    note: str = ""


@final
@dataclass(frozen=True, slots=True)
class Recomputed:
    """Operators of one kind in one module that ran again: how often, and the time it took (ns)."""

    module: str
    operator: str
    times: int
    ns: Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A budget, and the predicted time of a step within it.

    Attributes:
        budget: The budget in bytes.
        step_ns: The predicted time of a step (ns).
        slowdown: That time over the time of the step without Rekindle.
        recompute_ns: Time (ns) in recomputed operators.
        recomputations: How many operators run again.
    """

    budget: Bytes
    step_ns: Nanoseconds
    slowdown: float
    recompute_ns: Nanoseconds
    recomputations: int


@final
@dataclass(frozen=True, slots=True)
class Swapped:
    """What went to the host (`out`) and came `back`, in bytes, and the most that was there at once.

    transfer_ns: what that took; waiting_ns: how long the program waited for it. The rest was hidden
    behind computation.
    """

    out: Bytes = 0
    back: Bytes = 0
    host_peak: Bytes = 0
    transfer_ns: Nanoseconds = 0
    waiting_ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that a `Report` shows. Bytes and nanoseconds are integers."""

    budget: Bytes | None
    peak: Bytes
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds
    evictions: int
    recomputations: int
    title: str = "A run within a budget"
    at_peak: Holders = Holders()
    timeline: Timeline = Timeline()
    recomputed: tuple[Recomputed, ...] = ()
    choices: tuple[Choice, ...] = ()
    keep_all: Bytes | None = None  #: the peak of a step that nothing is let go of
    smallest_budget: Bytes | None = None  #: the smallest that the simulator gets through with
    plain_ns: Nanoseconds | None = None  #: the step without Rekindle, measured
    swapped: Swapped | None = None  #: None without swapping
    advice: tuple[str, ...] = ()
    lost_ns: Nanoseconds | None = None  #: with the bookkeeping of it; None: not measured

    @property
    def overhead(self) -> float:
        """Time lost as a share of `compute_ns`; 0.0 means nothing was lost."""
        return self.time_lost / self.compute_ns if self.compute_ns else 0.0

    @property
    def time_lost(self) -> Nanoseconds:
        """Time lost (ns): `lost_ns` if it was measured, else `recompute_ns`."""
        return self.recompute_ns if self.lost_ns is None else self.lost_ns
