"""What may be asked of the engine of a native driver."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.online import Numbers


class NativeHost(NamedTuple):
    """Bytes that went to the host, and that came back, in all; most at once."""

    swapped_out: Bytes
    swapped_in: Bytes
    peak: Bytes


@final
class NativeEngine:
    """What may be asked of an engine."""

    def __init__(
        self, core: ModuleType, handle: Any, budget: Bytes | None, *, swaps: bool = False
    ) -> None:
        self._core = core
        self._swaps = swaps
        self._handle = handle
        self._budget: Bytes | float = float("inf") if budget is None else budget

    @property
    def budget(self) -> Bytes | float:
        return self._budget

    @budget.setter
    def budget(self, nbytes: Bytes | float) -> None:
        self._budget = nbytes
        self._core.set_budget(self._handle, -1 if nbytes == float("inf") else nbytes)

    @property
    def host(self) -> NativeHost | None:
        """What went to the host so far; None: nothing is swapped."""
        return NativeHost(*self._core.swapped(self._handle)) if self._swaps else None

    def now(self) -> Numbers:
        return Numbers(*self._core.numbers(self._handle))

    @property
    def memory(self) -> Bytes:
        return self.now().memory

    @property
    def peak(self) -> Bytes:
        return self.now().peak

    @peak.setter
    def peak(self, nbytes: Bytes) -> None:
        self._core.set_peak(self._handle, nbytes)

    @property
    def clock(self) -> Nanoseconds:
        return self.now().clock

    @property
    def compute_ns(self) -> Nanoseconds:
        return self.now().compute_ns

    @property
    def recompute_ns(self) -> Nanoseconds:
        return self.now().recompute_ns

    @property
    def unlisted(self) -> Bytes:
        return self.now().unlisted

    def has_room(self, needed: Bytes) -> bool:
        """Whether `needed` bytes more would fit if all that may be let go went; nothing does."""
        return self._core.has_room(self._handle, needed)

    @property
    def storages(self) -> Iterator[int]:
        """As many as there are in the graph."""
        return iter(range(self.now().storages))

    def take_samples(self) -> bytes:
        """Those since the last time: clock, memory and time lost, 8 bytes each."""
        return self._core.take_samples(self._handle)

    def space_samples(self, due: Nanoseconds, every: Nanoseconds) -> None:
        """The next one is taken at `due`, and others `every` so often."""
        self._core.space_samples(self._handle, due, every)

    def check(self) -> None:
        """Asserts every invariant."""
        self._core.check(self._handle)
