"""Swapping: the cost model that decides between swapping a storage out and recomputing it.

After DELTA (Tang et al. 2022, arXiv 2203.15980, section 4: one component chooses the victim,
another one whether to swap or to recompute it), Capuchin (Peng et al., ASPLOS 2020, section 4: a
swap costs what does not overlap with computation) and POET (Patil et al., ICML 2022).

Evicting a storage s of m(s) bytes at time t makes the program wait for

    swap(s)      = out(s) + in(s)
    out(s)       = max(0, busy_out - t) + m(s) / rate_out         its memory is needed now
    in(s)        = max(0, (m(s) + before(s)) / rate_in - (t - last(s)))
    recompute(s) = c0(s) + cost of its evicted ancestors, as the policy estimates it

and s is swapped out if swap(s) < recompute(s). busy_out is the time at which the running swap-outs
end.

The term in(s) uses that a backward pass reads values in reverse order. The value used last is read
first, so at least t - last(s) remains until s is read. Storages on the host that were used later
than s, before(s) bytes in total, are transferred in before s.

The policy chooses the victim by its own score. In this score, a storage with a copy on the host
costs m(s) / rate_in, or its own operator if that is cheaper. When the program uses the storage, the
engine takes the cheaper of swapping in and recomputing at that time.

Copies are also made ahead of eviction (proactive eviction in Capuchin). While the link to the host
is idle, the storage with the greatest cost per byte, c0(s) / m(s), is copied. So costly values are
swapped, with out(s) = 0, and cheap ones recomputed. In the backward pass, storages are swapped in
ahead of their use while there is room.
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
    """Allow values to move to host memory (or a disk) instead of being recomputed.

    Args:
        host: The most bytes on the host. Default: no limit.
        out_bytes_per_s: The bandwidth of swap-outs (bytes per second). A run measures the bandwidth
            and replaces this figure.
        in_bytes_per_s: The bandwidth of swap-ins, replaced in the same way.
        only: Always swap while the host has room, and never recompute.
    """

    host: Bytes | None = None
    out_bytes_per_s: int = 12_000_000_000  # a typical figure of PCIe 3.0 with 16 lanes
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


def speed(swap: str | int | Swap | None, line: str) -> Swap | None:
    """Check an argument `swap=` that must be a `Swap` or None, not an amount of host memory.

    Args:
        swap: The user's argument.
        line: The line that the user wrote, for the error message.

    Raises:
        InvalidArgument: `swap` is neither a `Swap` nor None.
    """
    instead = "rekindle.policies.Swap(host=32 * 2**30)"
    checks.kind(swap, (Swap, type(None)), "a rekindle.policies.Swap", line, instead)
    return swap if isinstance(swap, Swap) else None


@final
class HostLink:
    """The links between device and host, one for each direction, on the engine's clock."""

    def __init__(self, swap: Swap) -> None:
        self._out_rate = swap.out_bytes_per_s
        self._in_rate = swap.in_bytes_per_s
        self._busy_out: Nanoseconds = 0  # end of the last swap-out
        self._busy_in: Nanoseconds = 0  # end of the last swap-in
        self._asked: Nanoseconds = 0  # time of the last call of `asked`

    def measured(self, out_bytes_per_s: int | None, in_bytes_per_s: int | None) -> None:
        """Replace the bandwidths by measured ones. None: keep the previous figure."""
        self._out_rate = max(1, out_bytes_per_s or self._out_rate)
        self._in_rate = max(1, in_bytes_per_s or self._in_rate)

    def out_ns(self, nbytes: Bytes) -> Nanoseconds:
        """Return the duration (ns) of a swap-out of `nbytes` on an idle link."""
        return -(-nbytes * SECOND // self._out_rate)

    def in_ns(self, nbytes: Bytes) -> Nanoseconds:
        """Return the duration (ns) of a swap-in of `nbytes` on an idle link."""
        return -(-nbytes * SECOND // self._in_rate)

    def idle_out(self, now: Nanoseconds) -> bool:
        """Return True if the link to the host will be idle before it is checked the next time.

        The next check is expected after the same interval as the last one (see `asked`).
        """
        return self._busy_out - now <= now - self._asked

    def idle_in(self, now: Nanoseconds) -> bool:
        """Return True if a swap-in would start immediately."""
        return self._busy_in <= now

    def asked(self, now: Nanoseconds) -> None:
        """Record that the link to the host was checked at `now`."""
        self._asked = now

    def send(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """Queue a swap-out of `nbytes`. Return the time (ns) at which it ends."""
        self._busy_out = max(self._busy_out, now) + self.out_ns(nbytes)
        return self._busy_out

    def fetch(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """Queue a swap-in of `nbytes`. Return the time (ns) at which it ends."""
        self._busy_in = max(self._busy_in, now) + self.in_ns(nbytes)
        return self._busy_in

    def waiting_now(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """Return the wait (ns) for a swap-in of `nbytes` that the program needs immediately."""
        return max(0, self._busy_in - now) + self.in_ns(nbytes)

    def waiting_out(self, nbytes: Bytes, now: Nanoseconds) -> Nanoseconds:
        """Return out(s), the time (ns) that the program waits for the swap-out of `nbytes`."""
        return max(0, self._busy_out - now) + self.out_ns(nbytes)

    def waiting_in(self, nbytes: Bytes, before: Bytes, unused: Nanoseconds) -> Nanoseconds:
        """Return in(s), the time (ns) that the program waits for the swap-in of a storage.

        Args:
            nbytes: The size of the storage.
            before: Bytes of other storages that are swapped in before this one.
            unused: Time (ns) since the last use of the storage.
        """
        return max(0, self.in_ns(nbytes + before) - unused)
