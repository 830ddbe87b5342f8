"""Count the bytes that the CPU's allocator returns, by the profiler's memory events.

The count includes the workspace of operators and the memory of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocated(NamedTuple):
    """Bytes allocated in addition to those in use before."""

    peak: int
    left: int


def allocated(step: Callable[[], object]) -> Allocated:
    """Return the peak of the bytes that `step` allocates, and the bytes still in use afterwards."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        step()
    events = [e for e in observed.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return Allocated(peak, alive)
