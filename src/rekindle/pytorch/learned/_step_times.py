"""Compare the time of steps that follow a learned plan with that of equal steps without it.

A plan is made from measured costs of operators. Whether it saves time also depends on what the
recording does not show, such as the time that the core needs to follow a plan, or today's speed of
the machine. So a plan is followed only while its steps are not slower than steps without it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, final

from rekindle._types import Nanoseconds

COMPARED: Final = 3
"""Number of steps with the plan, and without it, that are compared."""
SLOWER: Final = 1.02
"""A plan is left if the fastest of its steps takes this many times the fastest without it.

Between this and its inverse, times are equal. Then a plan is left if it recomputes for longer.
"""
FIRST_INTERVAL: Final = 16
LONGEST_INTERVAL: Final = 1024
"""Number of steps from one comparison to the next: it doubles up to the longest."""
UPKEEP: Final = 0.01
"""Most time of the learner itself, divided by the time of the program."""
CREDIT: Final = 20
"""Number of steps during which the learner may take more time, because a plan saves it later."""


class StepTime(NamedTuple):
    """The time of a step (ns), with its parts."""

    total: Nanoseconds
    recomputing: Nanoseconds
    waiting: Nanoseconds
    """Time of waiting for copies to and from the host, which is a part of `total`."""

    def __str__(self) -> str:
        """Return the total in milliseconds, with its parts."""
        total, recomputing, waiting = (f"{each / 1e6:.1f}" for each in self)
        waits = f", {waiting} waiting" if self.waiting else ""
        return f"{total} ms ({recomputing} recomputing{waits})"


@final
class Comparison:
    """Times of the latest equal steps with and without a plan, and whether to follow the plan.

    If steps with the plan seem slower, or for a regular comparison, a few steps run without it.
    These show its worth at the speed that the machine has now. A plan that is left is tried again
    after some steps.

    Attributes:
        follows: True if the next step should follow the plan, if there is one.
        verdict: Why the plan was left when it was compared last; empty if it was kept.
    """

    def __init__(self) -> None:
        self.follows = True
        self.verdict = ""
        self._with = deque[StepTime](maxlen=COMPARED)
        self._without = deque[StepTime](maxlen=COMPARED)
        self._on_trial = True  # the plan is new, or is tried again after it was left
        self._compares = False  # steps run without the plan to compare them with it
        self._since = 0  # number of steps since the last decision
        self._interval = FIRST_INTERVAL

    def begin(self) -> None:
        """Begin to follow a plan with which no step has run yet."""
        self.verdict = ""
        self._interval = FIRST_INTERVAL
        self._try_plan()

    def ran_with_plan(self, time: StepTime) -> None:
        """Record a step that followed the plan to its end."""
        self._with.append(time)
        self._since += 1
        if len(self._with) < COMPARED:
            return
        # After a comparison that the plan has won, a step that seems slower is likely to be noise.
        compares = self._on_trial or self._since >= FIRST_INTERVAL
        if self._since >= self._interval or (compares and self._is_slower()):
            self.follows, self._compares = False, True
            self._without.clear()
        self._on_trial = False

    def ran_without_plan(self, time: StepTime) -> None:
        """Record a step that ran without the plan."""
        self._without.append(time)
        if self._compares:
            if len(self._without) == COMPARED:
                self._decide()
        elif not self.follows:
            self._since += 1
            if self._since >= self._interval:
                self._try_plan()

    def _try_plan(self) -> None:
        self._with.clear()
        self.follows = self._on_trial = True
        self._compares, self._since = False, 0

    def _is_slower(self) -> bool:
        """Return True if steps with the plan are slower than those without it.

        Return False if this is unknown, as for a plan of an earlier process.
        """
        if len(self._without) < COMPARED:
            return False
        planned, alone = min(self._with), min(self._without)
        noise = (SLOWER - 1) * alone.total
        # Recomputation is counted at the same cost of each operator, so it has less noise.
        recomputes_more = planned.recomputing - alone.recomputing > noise
        return planned.total - alone.total > (-noise if recomputes_more else noise)

    def _decide(self) -> None:
        """Decide whether to follow the plan until the next comparison."""
        slower = self._is_slower()
        self.follows, self._compares, self._since = not slower, False, 0
        self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        self.verdict = (
            f"{min(self._with)} a step with the plan, {min(self._without)} without it"
            if slower
            else ""
        )


@final
class Upkeep:
    """Time that the learner takes between steps, such as to read a recording.

    Programs whose steps never repeat gain nothing from it, so it is limited.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._spent = self._program = 0

    def add(self, spent: Nanoseconds, program: Nanoseconds) -> None:
        """Add a step: time of the learner at its end, and time of the program during the step."""
        self._steps += 1
        self._spent += spent
        self._program += program

    @property
    def affordable(self) -> bool:
        """True if the learner may observe and record more steps."""
        return self._steps < CREDIT or self._spent <= UPKEEP * self._program
