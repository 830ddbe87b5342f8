"""Read the clocks with which Rekindle measures operators, copies and searches.

Tests must pass at any speed of the machine. For them, the environment variable
`REKINDLE_TEST_CLOCK` lets these clocks run at another speed in all processes: `slow` multiplies
each measured duration by 10, `fast` by 0.1, and `random:SEED` by random factors from 0.1 to 10. The
clock of the C++ core (`native/base/clock.h`) then runs at the same speed. Progress displays and
timeouts that wait for other processes use the machine's own time.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from rekindle._types import Nanoseconds

SETTING: Final = "REKINDLE_TEST_CLOCK"
_FACTORS: Final = {"slow": 10.0, "fast": 0.1}
_RANDOM: Final = "random:"
_RANDOM_FACTORS: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@final
@dataclass(frozen=True, slots=True)
class Speed:
    """How much faster than the machine's clocks the measuring clocks run."""

    factor: float
    seed: int = -1  #: of random factors; negative: there are none

    @staticmethod
    def of(text: str) -> Speed | None:
        """Parse a value of `REKINDLE_TEST_CLOCK`. Return None for an empty text.

        Raises:
            ValueError: `text` is not `slow`, `fast` or `random:SEED`.
        """
        if not text:
            return None
        if text in _FACTORS:
            return Speed(_FACTORS[text])
        seed = text.removeprefix(_RANDOM)
        if seed != text and seed.isdecimal():
            return Speed(1.0, int(seed))
        raise ValueError(f"{SETTING}={text!r}; write slow, fast, or random:1")


@final
class _Scaled:
    """A clock that multiplies the time between two of its readings."""

    def __init__(self, clock: Callable[[], Nanoseconds], factor: Callable[[], float]) -> None:
        self._clock, self._factor = clock, factor
        self._real = clock()
        self._shown = self._real
        self._lock = threading.Lock()

    def __call__(self) -> Nanoseconds:
        with self._lock:
            real = self._clock()
            # a thread's processor time can be less than that of the thread that read it before
            self._shown += int(max(0, real - self._real) * self._factor())
            self._real = real
            return self._shown


SPEED: Final = Speed.of(os.environ.get(SETTING, ""))  #: None, except in tests
now: Callable[[], Nanoseconds] = time.perf_counter_ns
"""Return the time (ns). Only differences have a meaning."""
thread_now: Callable[[], Nanoseconds] = time.thread_time_ns
"""Return the processor time (ns) of this thread. Only differences have a meaning."""


def seconds() -> float:
    """Return the time of `now` in seconds."""
    return now() / 1e9


def scaled(elapsed: Nanoseconds) -> Nanoseconds:
    """Return a duration that another clock measured, such as a device's events."""
    return elapsed if SPEED is None else int(elapsed * _factor())


if SPEED is not None:
    _drawn = random.Random(SPEED.seed) if SPEED.seed >= 0 else None

    def _factor(constant: float = SPEED.factor) -> float:
        return constant if _drawn is None else constant * _drawn.choice(_RANDOM_FACTORS)

    now, thread_now = _Scaled(now, _factor), _Scaled(thread_now, _factor)
