"""Define what all planners share: the protocol, the state of a search, and simple sequences.

A sequence is a list of nodes (operators) in the order in which they run (`_sequence.py`). `demand`
and `recompute_all` make simple sequences. `Search` remembers the best sequence that a planner
finds, and converts it to the final plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from math import isfinite
from typing import Protocol, final

from rekindle import _clock
from rekindle._types import Bytes, Nanoseconds, StorageId
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan, Progress, Status
from rekindle.planners._sequence import Timeline, prune, settle, timeline
from rekindle.planners._writer import timed_schedule, to_schedule
from rekindle.policies.swap import Swap
from rekindle.schedule import Action, Cost, Discard, Free, Schedule, SwapIn, SwapOut, verify

Watch = Callable[[Progress], None]


class Planner(Protocol):
    """Protocol of planners. A planner holds only settings, so `plan` may be called many times."""

    @property
    def name(self) -> str: ...

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan: ...


@final
class Search:
    """State of one call of `Planner.plan`: the best sequence and lower bound so far, and the time.

    Args:
        problem: The operators and storages to plan, made from a trace.
        budget: The budget in bytes.
        name: The name of the planner.
        watch: A function that is called with a `Progress` when the plan or the bound improves.
        time_limit: Seconds after which `left` is 0.
        swap: The bandwidth to the host, if values may be swapped.
    """

    def __init__(
        self,
        problem: Problem,
        budget: Bytes,
        name: str,
        watch: Watch | None = None,
        time_limit: float = float("inf"),
        swap: Swap | None = None,
    ) -> None:
        self.problem = problem
        self.budget = budget
        self.name = name
        self.swap = swap
        self.best: Timeline | None = None
        #: if values may be swapped, the time (ns) at which the best sequence ends
        self.best_ns: Nanoseconds = 0
        #: the fastest schedule with swapping so far, and its cost
        self.taken: tuple[Schedule, Cost] | None = None
        self.bound: Nanoseconds = problem.compute_ns
        self.smallest: Bytes | None = None
        self.time_limit = time_limit
        self._watch = watch
        self._began = _clock.seconds()
        self._log: list[Progress] = []

    @property
    def seconds(self) -> float:
        return _clock.seconds() - self._began

    @property
    def left(self) -> float:
        """Seconds until the time limit of the planner; 0 after the limit."""
        return max(0.0, self.time_limit - self.seconds)

    @property
    def impossible(self) -> bool:
        return self.budget < self.problem.floor

    @property
    def cost(self) -> Nanoseconds | None:
        """The cost (ns) of the best plan so far, or None."""
        if self.taken is not None:
            return self.taken[1].total_ns
        return None if self.best is None else self.best.cost

    @property
    def solved(self) -> bool:
        return self.cost is not None and self.cost <= self.bound

    def offer(self, steps: Iterable[int], note: str = "") -> Timeline:
        """Keep a sequence of nodes as the best one, if it fits and is the cheapest so far.

        Args:
            steps: Numbers of nodes, in the order in which they run.
            note: Where the sequence comes from, for the progress line.

        Returns:
            The timeline of the sequence, even if the sequence is not kept.
        """
        line = settle(timeline(self.problem, prune(self.problem, list(steps))))
        peak = line.peak
        if self.smallest is None or peak < self.smallest:
            self.smallest = peak
        if peak <= self.budget and (self.best is None or line.cost < self.best.cost):
            self.best = line
            self.report(note)
        return line

    def time(self, line: Timeline, note: str = "") -> Nanoseconds:
        """Keep a sequence with swap-ins as the best one, if it ends earliest so far.

        Args:
            line: The timeline of a sequence that fits the budget.
            note: Where the sequence comes from, for the progress line.

        Returns:
            The time (ns) at which the sequence ends, even if the sequence is not kept.
        """
        schedule, end = timed_schedule(line, self.name, budget=self.budget, swap=self.swap)
        if self.best is None or end < self.best_ns:
            cost = self.take(schedule, note)
            if cost is not None:
                self.best, self.best_ns = line, cost.total_ns
        return end

    def take(self, schedule: Schedule, note: str = "") -> Cost | None:
        """Keep a schedule with copies to the host as the best one, if it is the fastest so far.

        Copies that no swap-in reads are removed from the schedule first.

        Args:
            schedule: A schedule that is valid within the budget.
            note: Where the schedule comes from, for the progress line.

        Returns:
            The cost of the schedule, or None if its copies exceed the limit of the host's memory.
        """
        assert self.swap is not None
        schedule = _without_idle_copies(schedule)
        ways = replace(self.swap, host=None)
        judged = verify(self.problem.trace, schedule, self.budget, swap=ways)
        if self.swap.host is not None and judged.host_peak > self.swap.host:
            return None
        if self.taken is None or judged.total_ns < self.taken[1].total_ns:
            self.taken = schedule, judged
            self.report(note)
        return judged

    def raise_bound(self, bound: float, note: str = "") -> None:
        """Raise the proven lower bound of the cost to `bound`, if `bound` is higher.

        Args:
            bound: A bound in ns. It is rounded up to a multiple of `problem.grain`, which divides
                all costs. If values may be swapped, it is rounded down to whole ns.
            note: Where the bound comes from, for the progress line.
        """
        if self.cost is not None:
            bound = min(bound, self.cost)
        if not isfinite(bound):  # the solver had no time to prove a bound
            return
        grain = self.problem.grain
        if self.swap is not None:
            rounded = int(bound)
        else:
            # The solver is exact only up to a relative tolerance. So a bound slightly above a
            # multiple of the grain counts as that multiple, and is not rounded up to the next
            # multiple.
            rounded = -int(-(bound / grain - 1e-6 * max(1.0, bound / grain * 1e-3)) // 1) * grain
        if rounded > self.bound:
            self.bound = rounded
            self.report(note)

    def report(self, note: str = "") -> None:
        step = Progress(self.seconds, self.cost, self.bound, note)
        self._log.append(step)
        if self._watch is not None:
            self._watch(step)

    def conclude(self, *, detail: str = "", status: Status | None = None) -> Plan:
        """Convert the best sequence to a plan, with figures computed by the verifier."""
        seconds = self.seconds
        problem = self.problem
        if self.best is None and self.taken is None:
            if status is None:
                status = Status.INFEASIBLE if self.impossible else Status.NOT_FOUND
            return Plan(
                self.name,
                status,
                self.budget,
                problem.compute_ns,
                self.bound,
                seconds,
                smallest_budget=self.smallest,
                needed=problem.floor,
                detail=detail,
                progress=tuple(self._log),
            )
        if self.taken is not None:
            schedule = replace(self.taken[0], made_by=self.name)
        else:
            assert self.best is not None
            schedule = to_schedule(self.best, self.name)
        judged = verify(problem.trace, schedule, self.budget, swap=self.swap)
        optimal = judged.total_ns <= self.bound
        return Plan(
            self.name,
            status or (Status.OPTIMAL if optimal else Status.FEASIBLE),
            self.budget,
            judged.compute_ns,
            min(self.bound, judged.total_ns),
            seconds,
            schedule,
            judged.recompute_ns,
            judged.peak,
            needed=problem.floor,
            waiting_ns=judged.waiting_ns,
            swapped_out=judged.swapped_out,
            detail=detail,
            progress=tuple(self._log),
        )


def demand(problem: Problem, keep: Set[int]) -> list[int]:
    """Make a sequence that evicts all items but `keep`, and recomputes each when first needed.

    The items are evicted at the end of the forward pass.

    Args:
        problem: The operators and storages to plan, made from a trace.
        keep: Numbers of items that stay in memory until their last reader.

    Returns:
        Numbers of nodes, in the order in which they run.
    """
    backward = backward_start(problem)
    gone = droppable(problem, keep)
    steps = list(range(backward))
    for node in range(backward, len(problem)):
        bring_back(problem, problem.reads[node], gone, steps)
        steps.append(node)
        gone.update(problem.overwrites[node])
    return steps


def recompute_all(problem: Problem) -> list[int]:
    """Return a sequence of operators that recomputes as much as possible.

    It evicts each recomputed storage right after the next operator that reads it. Such a sequence
    needs little memory and is slow.
    """
    backward = backward_start(problem)
    steps = list(range(backward))
    gone = droppable(problem, set())
    for node in range(backward, len(problem)):
        before = set(gone)
        bring_back(problem, problem.reads[node], gone, steps)
        steps.append(node)
        gone |= before
        gone.update(problem.overwrites[node])
    return steps


def droppable(problem: Problem, keep: Set[int]) -> set[int]:
    """Return the items (storages) to evict at the end of the forward pass, and those overwritten.

    The evicted items are all that can be recomputed, except `keep` and items that are pinned or
    user-held in the backward pass. The overwritten items are those that the forward pass overwrites
    in place.
    """
    backward = backward_start(problem)
    gone = {
        item
        for item, maker in enumerate(problem.maker)
        if maker < backward and problem.replayable[maker] and item not in keep
    }
    gone -= {hold.item for hold in problem.holds if hold.last >= backward}
    return gone | {item for items in problem.overwrites[:backward] for item in items}


def bring_back(problem: Problem, items: Iterable[int], gone: set[int], steps: list[int]) -> None:
    """Append to `steps` the nodes that recompute the evicted ones of `items`.

    Args:
        problem: The operators and storages to plan, made from a trace.
        items: Numbers of the items that the next node reads.
        gone: Numbers of the evicted items. The recomputed items are removed from this set.
        steps: The sequence of nodes so far.
    """
    stack = [item for item in items if item in gone]
    while stack:
        item = stack[-1]
        node = problem.maker[item]
        missing = [source for source in problem.reads[node] if source in gone]
        if item not in gone:
            stack.pop()
        elif missing:
            stack += missing
        else:
            steps.append(node)
            gone.difference_update(problem.makes[node])


def backward_start(problem: Problem) -> int:
    """Return the number of the first node (operator) of the backward pass.

    If the trace does not mark the backward pass, return the node at which memory is highest when
    nothing is evicted.
    """
    for node, op in enumerate(problem.op):
        if op is not None and problem.trace.ops[op].is_backward:
            return node
    memory = timeline(problem, range(len(problem))).memory
    return int(memory.argmax()) if len(memory) else 0


def _without_idle_copies(schedule: Schedule) -> Schedule:
    """Return `schedule` without the copies to the host that no swap-in reads."""
    copy: dict[StorageId, int] = {}  # storage on the host -> index of the `SwapOut` that copied it
    read: set[int] = set()  # indices of copies that a swap-in reads
    # index of a `Discard` action -> index of the `SwapOut` whose copy it frees
    of: dict[int, int] = {}
    for index, action in enumerate(schedule.actions):
        match action:
            case SwapOut(storage):
                copy[storage] = index
            case SwapIn(storage):
                read.add(copy[storage])
            case Discard(storage):
                of[index] = copy.pop(storage)
            case _:
                pass
    actions: list[Action] = []
    for index, action in enumerate(schedule.actions):
        if isinstance(action, SwapOut | Discard) and of.get(index, index) not in read:
            if isinstance(action, SwapOut) and not action.keep:
                actions.append(Free(action.storage))
            continue
        actions.append(action)
    return Schedule(tuple(actions), schedule.made_by)
