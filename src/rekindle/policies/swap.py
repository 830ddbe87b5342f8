"""Swap or recompute, whichever keeps the program waiting for less.

After DELTA (Tang et al. 2022, arXiv 2203.15980, section 4: one component chooses what to let go,
another one whether to swap or to recompute it), Capuchin (Peng et al., ASPLOS 2020, section 4: a
swap costs what does not overlap with computation) and POET (Patil et al., ICML 2022). Letting go a
storage s of m(s) bytes at time t keeps the program waiting for

    swap(s)      = out(s) + in(s)
    out(s)       = max(0, busy_out - t) + m(s) / rate_out         its memory is wanted now
    in(s)        = max(0, (m(s) + before(s)) / rate_in - (t - last(s)))
    recompute(s) = c(s) + what the policy knows of its evicted ancestors

and it is swapped if swap(s) < recompute(s). A backward pass retraces the forward pass: what was
used last is wanted first. So the time that remains until s is wanted is at least that since it was
used, t - last(s), and before(s), the bytes on the host that were used later than s, come in before
it.

Which storage goes is the policy's choice, by its own score, in which what has a copy on the host
counts as if it were computed from nothing, in m(s) / rate_in or by its own operator if that is
quicker. When it is wanted, it is copied back or computed, whichever is quicker then.

Copies ahead (Capuchin's proactive eviction): while the way out is idle, a copy is made of what is
dearest to compute for its bytes, c(s) / m(s), so that cheap values are recomputed and dear ones
swapped; out(s) is 0 then. In the backward pass copies come back ahead while there is room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from rekindle import _checks as checks
from rekindle._errors import InvalidArgument
from rekindle._types import Bytes, Nanoseconds

SECOND: Final = 1_000_000_000


@final
@dataclass(frozen=True, slots=True)
class Swap:
    """Let values go to the host's memory (or a disk) instead of being recomputed.

    Args:
        host: The most bytes on the host. Default: no limit.
        out_bytes_per_s: The bandwidth to the host. A running program measures and corrects it.
        in_bytes_per_s: The bandwidth back.
        only: Always swap while the host has room, and never recompute.
    """

    host: Bytes | None = None
    out_bytes_per_s: int = 12_000_000_000  # what 16 lanes of PCIe 3 bring in practice
    in_bytes_per_s: int = 12_000_000_000
    only: bool = False

    def __post_init__(self) -> None:
        if self.out_bytes_per_s <= 0 or self.in_bytes_per_s <= 0:
            raise InvalidArgument(
                f"Swap: bandwidths are positive, got {self.out_bytes_per_s} and "
                f"{self.in_bytes_per_s} bytes per second; without swapping write swap=None"
            )
        if self.host is not None:
            checks.number(self.host, 0, "rekindle.policies.Swap(host={})", "32 * 2**30")
        checks.switch(self.only, "rekindle.policies.Swap(only={})")


def speed(swap: Swap | None, line: str) -> Swap | None:
    """`swap`, where it is to say how fast the ways are: an amount of memory does not.

    Raises `InvalidArgument` for anything else; `line` is what the user wrote.
    """
    instead = "rekindle.policies.Swap(host=32 * 2**30)"
    return checks.kind(swap, (Swap, type(None)), "a rekindle.policies.Swap", line, instead)


@final
class Ways:
    """The ways to the host and back during one run, by the clock of the engine."""

    def __init__(self, swap: Swap) -> None:
        self._out_rate = swap.out_bytes_per_s
        self._in_rate = swap.in_bytes_per_s
        self._busy_out: Nanoseconds = 0  # until then
        self._busy_in: Nanoseconds = 0
        self._asked: Nanoseconds = 0

    def measured(self, out_bytes_per_s: int | None, in_bytes_per_s: int | None) -> None:
        """What copies really took; None: nothing new is known."""
        self._out_rate = max(1, out_bytes_per_s or self._out_rate)
        self._in_rate = max(1, in_bytes_per_s or self._in_rate)

    def out_ns(self, nbytes: Bytes) -> Nanoseconds:
        """Time of one copy to the host, alone."""
        return -(-nbytes * SECOND // self._out_rate)

    def in_ns(self, nbytes: Bytes) -> Nanoseconds:
        """Time of one copy back, alone."""
        return -(-nbytes * SECOND // self._in_rate)

    def idle_out(self, now: Nanoseconds) -> bool:
        """Whether the way to the host will be idle soon, judged by how often that is asked."""
        return self._busy_out - now <= now - self._asked

    def idle_in(self, now: Nanoseconds) -> bool:
        """Whether a copy back would begin at once."""
        return self._busy_in <= now

    def asked(self, now: Nanoseconds) -> None:
        """The next time is now."""
        self._asked = now

    def send(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """A copy to the host begins as soon as it can. Returns when it ends."""
        self._busy_out = max(self._busy_out, now) + self.out_ns(nbytes)
        return self._busy_out

    def fetch(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """A copy back begins as soon as it can. Returns when it ends."""
        self._busy_in = max(self._busy_in, now) + self.in_ns(nbytes)
        return self._busy_in

    def waiting_now(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """What a copy back keeps the program waiting for that wants it at once."""
        return max(0, self._busy_in - now) + self.in_ns(nbytes)

    def waiting_out(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """out(s) for a storage of `nbytes`."""
        return max(0, self._busy_out - now) + self.out_ns(nbytes)

    def waiting_in(self, nbytes: Bytes, before: Bytes, unused: Nanoseconds) -> Nanoseconds:
        """in(s) for a storage of `nbytes` that was used `unused` ns ago."""
        return max(0, self.in_ns(nbytes + before) - unused)
