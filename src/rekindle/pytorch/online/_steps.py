"""What a run does from step to step, and samples of its memory: little work, little memory, always.

A step of the program ends where an optimizer's step does. Samples are taken by the engine's clock:
once in a two-hundredth of a step, which is hundreds of operators apart in a long step and every
operator in a short one. The engine takes them by itself, and hands them over now and then.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final, NamedTuple, Protocol, final

from rekindle._types import Bytes, Nanoseconds

SHOWN: Final = 3
"""Steps of which there are samples: the last ones, and what came since."""
A_STEP: Final = 200
"""Samples of one step, about."""
MOST: Final = 4 * SHOWN * A_STEP

#: Time in operators, and lost to recomputation; evictions and recomputations.
Figures = tuple[Nanoseconds, Nanoseconds, int, int]


class Numbers(NamedTuple):
    """How a run stands, as its engine gives it: all at once, for each look takes a while."""

    memory: Bytes
    peak: Bytes
    clock: Nanoseconds
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds
    lost_ns: Nanoseconds
    evictions: int
    recomputations: int
    unlisted: Bytes
    storages: int
    alive: int
    bookkeeping: Bytes


class Counting(Protocol):
    """What is asked of an engine."""

    @property
    def peak(self) -> Bytes: ...

    @peak.setter
    def peak(self, nbytes: Bytes) -> None: ...

    def now(self) -> Numbers:
        """Return how the run stands."""
        ...

    def take_samples(self) -> bytes:
        """Those since the last time: clock, memory and time lost, 8 bytes each."""
        ...

    def space_samples(self, due: Nanoseconds, every: Nanoseconds) -> None:
        """The next one is taken at `due`, and others `every` so often."""
        ...


class Counts(NamedTuple):
    """How a run stands: everything since its beginning."""

    evictions: int = 0
    recomputations: int = 0
    compute_ns: Nanoseconds = 0
    recompute_ns: Nanoseconds = 0
    lost_ns: Nanoseconds = 0


@final
@dataclass(frozen=True, slots=True)
class Step:
    """The figures of one optimizer step.

    Attributes:
        number: The number of the step, from 1.
        memory: Bytes in use at its end.
        peak: The most bytes in use during the step.
        evictions: How often a value was evicted that could still be needed.
        recomputations: How many operators ran again.
        compute_ns: Time (ns) in operators that the program called.
        recompute_ns: Time (ns) in recomputed operators.
        lost_ns: Time lost (ns): recomputed operators, and choosing, evicting and rebuilding.
    """

    number: int
    memory: Bytes
    peak: Bytes
    evictions: int
    recomputations: int
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds
    lost_ns: Nanoseconds = 0

    @property
    def overhead(self) -> float:
        """Time lost as a share of the time in operators; 0.0 means nothing was lost."""
        lost_ns = max(self.lost_ns, self.recompute_ns)
        return lost_ns / self.compute_ns if self.compute_ns else 0.0


class Samples(NamedTuple):
    """Memory (bytes) and time lost so far (ns) by the engine's clock (ns)."""

    clock: list[Nanoseconds]
    memory: list[Bytes]
    recompute_ns: list[Nanoseconds]


@final
class Steps:
    """The steps of one run, and samples of it that its engine takes."""

    def __init__(self, engine: Counting) -> None:
        self.last: Step | None = None
        self.listeners: list[Callable[[Step], None]] = []
        self._engine = engine
        self._number = 0
        self._before = Counts()
        self._peak_before: Bytes = 0
        self._every: Nanoseconds = 0
        self._starts: deque[Nanoseconds] = deque([0], maxlen=SHOWN + 1)
        self._clock, self._memory, self._lost = array("q"), array("q"), array("q")
        # Threads of one budget end steps at once. Inside nothing waits for an engine.
        self._lock = Lock()

    @property
    def number(self) -> int:
        """How many steps are over."""
        return self._number

    @property
    def peak(self) -> Bytes:
        """The most bytes in use at any moment of the run."""
        return max(self._peak_before, self._engine.peak)

    def forget_peak(self) -> None:
        """The peak is that of what comes now."""
        self._peak_before, self._engine.peak = 0, self._engine.now().memory

    def over(self) -> None:
        """A step is over."""
        numbers = self._engine.now()
        now = Counts(
            numbers.evictions,
            numbers.recomputations,
            numbers.compute_ns,
            numbers.recompute_ns,
            max(numbers.lost_ns, numbers.recompute_ns),
        )
        memory, peak = numbers.memory, numbers.peak
        with self._lock:
            before, self._before = self._before, now
            self._number += 1
            spent = (new - old for new, old in zip(now, before, strict=True))
            self.last = step = Step(self._number, memory, peak, *spent)
            self._peak_before = max(self._peak_before, peak)
        self._engine.peak = memory
        self._collect(numbers)
        self._begin(numbers.clock)
        self._space(numbers.clock)
        for listener in tuple(self.listeners):
            listener(step)

    def _begin(self, clock: Nanoseconds) -> None:
        """Samples of all but the last steps go; the next ones are as far apart as these need."""
        with self._lock:
            self._every = (clock - self._starts[-1]) // A_STEP
            self._starts.append(clock)
            old = bisect_left(self._clock, self._starts[0]) if len(self._starts) > SHOWN else 0
            for samples in (self._clock, self._memory, self._lost):
                del samples[:old]

    def sample(self) -> None:
        """Notes how much memory is in use now."""
        numbers = self._engine.now()
        self._collect(numbers)
        self._space(numbers.clock)

    def _collect(self, now: Numbers | None = None) -> None:
        """What the engine took, and then `now`."""
        taken = array("q", self._engine.take_samples())
        if now is not None:
            taken.extend((now.clock, now.memory, now.recompute_ns))
        with self._lock:
            for place, samples in enumerate((self._clock, self._memory, self._lost)):
                samples.extend(taken[place::3])
            if len(self._clock) > MOST:
                self._thin()

    def _space(self, clock: Nanoseconds) -> None:
        self._engine.space_samples(clock + self._every, self._every)

    def _thin(self) -> None:
        """Of two neighbours the one with more memory stays, and samples get twice as rare."""
        memory = self._memory
        chosen = [i + (memory[i + 1] > memory[i]) for i in range(0, len(memory) - 1, 2)]
        for samples in (self._clock, self._memory, self._lost):
            samples[:] = array("q", [samples[i] for i in chosen])
        self._every = (self._clock[-1] - self._clock[0]) // len(chosen)

    def samples(self) -> Samples:
        """What was noted of the last steps, and of what came since."""
        self._collect()
        with self._lock:
            return Samples(list(self._clock), list(self._memory), list(self._lost))
