"""Figures of each training step (time, peak, evictions), and samples of the memory in use.

A step of the program ends with a step of its optimizer. The engine takes the samples, about
`A_STEP` per step. In a long step, samples are hundreds of operators apart. In a short one, there is
one after every operator. `Steps` collects the samples from the engine now and then.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final, NamedTuple, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.native._engine import EngineHandle, Numbers

SHOWN: Final = 3
"""Number of finished steps whose samples are kept, in addition to the current step."""
A_STEP: Final = 200
"""Approximate number of samples per step."""
MOST: Final = 4 * SHOWN * A_STEP

#: Figures of a recording: time (ns) in first runs of operators, time (ns) in recomputation, number
#: of evictions, number of recomputed operators.
Figures = tuple[Nanoseconds, Nanoseconds, int, int]


class Counts(NamedTuple):
    """Totals of a run from its beginning to the end of a step."""

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
        evictions: Number of evictions of values that could still be needed.
        recomputations: Number of recomputed operators.
        compute_ns: Time (ns) in operators that the program called.
        recompute_ns: Time (ns) in recomputed operators.
        lost_ns: Time lost to the budget (ns): in recomputed operators, and in the bookkeeping of
            evictions.
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
    """Samples: the engine's clock (ns), memory (bytes) and time lost so far (ns)."""

    clock: list[Nanoseconds]
    memory: list[Bytes]
    recompute_ns: list[Nanoseconds]


@final
class Steps:
    """The steps of one run, and the samples that its engine takes."""

    def __init__(self, engine: EngineHandle) -> None:
        self.last: Step | None = None
        self.listeners: list[Callable[[Step], None]] = []
        self._engine = engine
        self._number = 0
        self._before = Counts()
        self._peak_before: Bytes = 0
        self._every: Nanoseconds = 0
        self._starts: deque[Nanoseconds] = deque([0], maxlen=SHOWN + 1)
        self._clock, self._memory, self._lost = array("q"), array("q"), array("q")
        # Several threads can finish a step at the same time. Never wait for an engine lock while
        # holding this lock, or two threads could deadlock.
        self._lock = Lock()

    @property
    def number(self) -> int:
        """The number of finished steps."""
        return self._number

    @property
    def peak(self) -> Bytes:
        """The most bytes in use at any moment of the run."""
        return max(self._peak_before, self._engine.peak)

    def forget_peak(self) -> None:
        """Restart the measurement of the peak."""
        self._peak_before, self._engine.peak = 0, self._engine.now().memory

    def over(self) -> None:
        """Finish a step: store its figures and call the listeners."""
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
        """Begin a step: drop samples of old steps, and derive the interval from the last step."""
        with self._lock:
            self._every = (clock - self._starts[-1]) // A_STEP
            self._starts.append(clock)
            old = bisect_left(self._clock, self._starts[0]) if len(self._starts) > SHOWN else 0
            for samples in (self._clock, self._memory, self._lost):
                del samples[:old]

    def sample(self) -> None:
        """Take a sample of the memory in use now."""
        numbers = self._engine.now()
        self._collect(numbers)
        self._space(numbers.clock)

    def _collect(self, now: Numbers | None = None) -> None:
        """Collect the samples that the engine took, and add `now` as a sample."""
        taken = array("q", self._engine.take_samples())
        if now is not None:
            taken.extend((now.clock, now.memory, now.recompute_ns))
        with self._lock:
            for place, samples in enumerate((self._clock, self._memory, self._lost)):
                samples.extend(taken[place::3])
            if len(self._clock) > MOST:
                self._thin()

    def _space(self, clock: Nanoseconds) -> None:
        """Tell the engine when to take the next sample."""
        self._engine.space_samples(clock + self._every, self._every)

    def _thin(self) -> None:
        """Halve the samples: of each two neighbors, keep the one with more memory."""
        memory = self._memory
        chosen = [i + (memory[i + 1] > memory[i]) for i in range(0, len(memory) - 1, 2)]
        for samples in (self._clock, self._memory, self._lost):
            samples[:] = array("q", [samples[i] for i in chosen])
        self._every = (self._clock[-1] - self._clock[0]) // len(chosen)

    def samples(self) -> Samples:
        """Return the samples of the last steps and of the current one."""
        self._collect()
        with self._lock:
            return Samples(list(self._clock), list(self._memory), list(self._lost))
