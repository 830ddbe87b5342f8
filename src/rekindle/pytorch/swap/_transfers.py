"""Statistics and errors of the swap transfers of one store."""

from __future__ import annotations

import os
import warnings
from typing import Final, NamedTuple, final

from rekindle._errors import OutOfBudget, SwapFailed
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes
from rekindle.pytorch.swap._bandwidth import Pace
from rekindle.pytorch.swap._store import Bandwidth, Store, Transfer

MOST_NOT_ADDED: Final = 100
"""Most transfers whose times are not yet in the totals. A GPU reports times only later."""


class _Moved(NamedTuple):
    """A transfer that was waited for, and the `Pace` for its direction (out or back), if any."""

    nbytes: Bytes
    transfer: Transfer
    pace: Pace | None


@final
class Transfers:
    """Statistics of the swap transfers of one store, and the first failed transfer."""

    def __init__(self, store: Store, believed: Bandwidth | None) -> None:
        """Begin statistics for a store that has made no transfers.

        Args:
            store: The store that makes the transfers.
            believed: The expected bandwidth. None: the user gave it, so it is never corrected.
        """
        self._out = None if believed is None else Pace(believed.out, store.latency_ns)
        self._back = None if believed is None else Pace(believed.back, store.latency_ns)
        # Bandwidths (bytes per second) of swap-outs and swap-ins, if they fell; 0: they did not.
        self._slower = [0, 0]
        self._moved: list[_Moved] = []  # transfers whose times are not yet in the totals
        self._transfer_ns: Nanoseconds = 0
        self._waiting_ns: Nanoseconds = 0
        self._complaint = ""  # text about the first failed transfer
        self._reported = False
        self._process = os.getpid()

    @property
    def transfer_ns(self) -> Nanoseconds:
        """Total duration (ns) of all ended transfers."""
        self._add_up()
        return self._transfer_ns

    @property
    def waiting_ns(self) -> Nanoseconds:
        """Time (ns) that the program waited for transfers."""
        self._add_up()
        return self._waiting_ns

    def wait(self, transfer: Transfer, nbytes: Bytes, *, out: bool) -> None:
        """Wait until `transfer`, which copies `nbytes`, has ended.

        Args:
            transfer: The transfer to wait for.
            nbytes: Number of bytes that it copies.
            out: True for a swap-out.

        Raises:
            Lost: The transfer failed.
        """
        pace = self._out if out else self._back
        self._moved.append(_Moved(nbytes, transfer, pace))
        try:
            transfer.wait()
        finally:
            if pace is not None or len(self._moved) > MOST_NOT_ADDED:
                self._add_up()

    def _add_up(self) -> None:
        """Add the times of the transfers that have ended to the totals."""
        under_way: list[_Moved] = []
        for moved in self._moved:
            if moved.transfer.ended():
                self._transfer_ns += moved.transfer.ns
                self._waiting_ns += moved.transfer.waiting_ns
                self._watch(moved)
            else:
                under_way.append(moved)
        self._moved = under_way

    def _watch(self, moved: _Moved) -> None:
        """Store the bandwidth of the direction of `moved` if it fell well below the expected."""
        nbytes, transfer, pace = moved
        slower = pace.slower(nbytes, transfer.ns) if pace is not None and transfer.ns else None
        if slower is not None:
            self._slower[pace is self._back] = slower

    def take_slower(self) -> tuple[int, int]:
        """Return the bandwidths of swap-outs and swap-ins that fell since the last call, or 0."""
        out, back = self._slower
        self._slower = [0, 0]
        return out, back

    # -- failed transfers -------------------------------------------------------------------------

    def failed(self, nbytes: Bytes, site: str, why: str) -> None:
        """Record that a value made by the operator `site` was not swapped, if it is the first."""
        if not self._complaint:
            self._complaint = f"{format_bytes(nbytes)} of {site} could not be {why}"

    def complaint(self) -> str:
        """Return the text about the first failed transfer once, and "" in later calls."""
        reported, self._reported = self._reported, self._reported or bool(self._complaint)
        return "" if reported else self._complaint

    def add_note_to(self, out: OutOfBudget) -> None:
        """Add a note about the first failed transfer to `out`, an error it may have caused."""
        if complaint := self.complaint():
            out.add_note(f"Swapping did not help: {complaint}")

    def lost(self, site: str, *, moved: bool) -> SwapFailed:
        """Return the error for a value that can be neither swapped in nor recomputed.

        Args:
            site: The operator that made the value.
            moved: True if weights and optimizer state may be among the lost values.
        """
        advice = (
            "Rekindle reads it again at its next use, and when the budget ends. If that fails too, "
            "a weight or a part of the optimizer's state may be lost: load a checkpoint, and "
            if moved
            else "Weights and optimizer state are unchanged: "
        )
        what = self.complaint() or f"{site} could not be read back"
        if os.getpid() != self._process:
            return SwapFailed(
                f"{what}, and it cannot be recomputed. Write run.keep(tensor) before the fork, or "
                "read the tensor in the forked process at once"
            )
        return SwapFailed(
            f"{what}, and it cannot be recomputed. {advice}"
            "run this step again, with swap_directory= on another disk, or without swap="
        )

    def complain(self) -> None:
        """Warn about the first failed transfer, if it has not been reported yet."""
        complaint = self.complaint()
        if complaint:
            warnings.warn(
                f"swapping: {complaint}. No value is lost: values that cannot be swapped are "
                "recomputed or stay in memory",
                RuntimeWarning,
                stacklevel=3,
            )
