"""Access to the engine of a run in the native core: its counts and its budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.native._module import Core, Handle


class Numbers(NamedTuple):
    """All counts of a run at one moment, read from its engine in a single call to save time."""

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
    rejoined: int


class SwappedBytes(NamedTuple):
    """Bytes swapped out and in so far, and the most bytes on the host at once."""

    swapped_out: Bytes
    swapped_in: Bytes
    peak: Bytes


@final
class EngineHandle:
    """Access to the engine of one run in the native core. Each property is one call of the core."""

    def __init__(
        self, core: Core, handle: Handle, budget: Bytes | None, *, swaps: bool = False
    ) -> None:
        self._core = core
        self._swaps = swaps
        self._handle = handle
        self._budget = budget

    @property
    def budget(self) -> Bytes | None:
        """The budget in bytes, or None without a limit."""
        return self._budget

    @budget.setter
    def budget(self, nbytes: Bytes) -> None:
        self._core.set_budget(self._handle, nbytes)
        self._budget = nbytes

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Inside the block, evict nothing, even if memory exceeds the budget."""
        self._core.set_budget(self._handle, -1)
        try:
            yield
        finally:
            self._core.set_budget(self._handle, -1 if self._budget is None else self._budget)

    @property
    def host(self) -> SwappedBytes | None:
        """Bytes swapped so far, or None if swapping is off."""
        return SwappedBytes(*self._core.swapped(self._handle)) if self._swaps else None

    def now(self) -> Numbers:
        """Return all counts of the run, in one call of the core."""
        return Numbers(*self._core.numbers(self._handle))

    @property
    def memory(self) -> Bytes:
        """Bytes in use."""
        return self.now().memory

    @property
    def peak(self) -> Bytes:
        """The most bytes in use so far."""
        return self.now().peak

    @peak.setter
    def peak(self, nbytes: Bytes) -> None:
        self._core.set_peak(self._handle, nbytes)

    @property
    def clock(self) -> Nanoseconds:
        """The engine's clock (ns): the sum of the costs of all operators that ran."""
        return self.now().clock

    @property
    def compute_ns(self) -> Nanoseconds:
        """Time (ns) that the first runs of all operators took."""
        return self.now().compute_ns

    @property
    def recompute_ns(self) -> Nanoseconds:
        """Time (ns) that recomputations of operators took."""
        return self.now().recompute_ns

    @property
    def unlisted(self) -> Bytes:
        """Bytes that count toward the budget, but belong to no storage that the engine tracks."""
        return self.now().unlisted

    def has_room(self, needed: Bytes) -> bool:
        """Return True if `needed` more bytes would fit after evicting all that may be evicted.

        This evicts nothing.
        """
        return self._core.has_room(self._handle, needed)

    @property
    def storages(self) -> Iterator[int]:
        """Return an iterator with one (meaningless) item per storage of the engine's graph."""
        return iter(range(self.now().storages))

    def take_samples(self) -> bytes:
        """Return the samples since the last call.

        A sample is three 64-bit integers: the engine's clock (ns), memory in use (bytes) and time
        lost (ns).
        """
        return self._core.take_samples(self._handle)

    def space_samples(self, due: Nanoseconds, every: Nanoseconds) -> None:
        """Sample the memory in use when the engine's clock is at `due`, then every `every` ns.

        The engine's clock is the sum of the costs of all operators that ran.
        """
        self._core.space_samples(self._handle, due, every)

    def check(self) -> None:
        """Assert every invariant of the engine."""
        self._core.check(self._handle)
