"""Define the result of a planner: a status, a schedule with its cost, and a lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.schedule import Schedule


@final
class Status(Enum):
    """Outcome of a planner. The value of each member is the message for the user."""

    OPTIMAL = "proven optimal: no schedule with this order of first computations costs less"
    FEASIBLE = "a valid plan, not proven optimal: its cost is above the lower bound"
    INFEASIBLE = "no schedule fits: the budget is below what a single operator needs at once"
    NOT_FOUND = "no plan found within the budget, and no proof that there is none"
    UNSUITED = "this planner cannot plan a program of this shape"

    def __str__(self) -> str:
        return self.value


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running planner, for a progress line.

    Attributes:
        seconds: Seconds since the start.
        incumbent_ns: The cost (ns) of the best plan so far, or None.
        bound_ns: The lower bound (ns) so far.
        note: Where the last improvement comes from, such as "keep all".
    """

    seconds: float
    incumbent_ns: Nanoseconds | None
    bound_ns: Nanoseconds
    note: str = ""


@final
@dataclass(frozen=True)
class Plan:
    """Result of one planner. Times are in ns, memory in bytes.

    A cost is the time of running everything once, recomputing, and waiting for copies.
    """

    planner: str
    status: Status
    budget: Bytes
    compute_ns: Nanoseconds
    """The cost of running everything once."""
    bound_ns: Nanoseconds
    """The lower bound of the cost of any schedule within the budget; at least `compute_ns`."""
    seconds: float
    schedule: Schedule | None = None
    recompute_ns: Nanoseconds | None = None
    peak: Bytes | None = None
    smallest_budget: Bytes | None = None
    """If no schedule was found, the smallest budget for which this planner knows one."""
    needed: Bytes = 0
    """The budget below which provably no schedule exists."""
    waiting_ns: Nanoseconds = 0
    """Time that the program waits for copies to and from the host; 0 without swapping."""
    swapped_out: Bytes = 0
    """Bytes that the schedule copies to the host."""
    detail: str = ""
    progress: tuple[Progress, ...] = ()

    @property
    def cost_ns(self) -> Nanoseconds | None:
        """The cost of the plan, or None without a schedule."""
        if self.recompute_ns is None:
            return None
        return self.compute_ns + self.recompute_ns + self.waiting_ns

    @property
    def overhead(self) -> float | None:
        """Time of recomputing and waiting, as a share of `compute_ns`; None without a schedule."""
        if self.recompute_ns is None:
            return None
        lost = self.recompute_ns + self.waiting_ns
        return lost / self.compute_ns if self.compute_ns else 0.0

    @property
    def lower_bound(self) -> float:
        """The lower bound of the overhead of any schedule within the budget."""
        return self.bound_ns / self.compute_ns - 1 if self.compute_ns else 0.0

    @property
    def gap(self) -> float | None:
        """Largest share of the cost that a better schedule could save; None if there is none."""
        if self.cost_ns is None:
            return None
        return (self.cost_ns - self.bound_ns) / self.cost_ns if self.cost_ns else 0.0

    @property
    def message(self) -> str:
        """The status in words; without a schedule, with budgets to try."""
        parts = [str(self.status), self.detail]
        if self.schedule is None and self.smallest_budget is not None:
            parts.append(f"the smallest budget with a known plan is {self.smallest_budget} bytes")
        if self.schedule is None and self.needed:
            parts.append(f"no schedule exists below {self.needed} bytes")
        return "; ".join(part for part in parts if part)
