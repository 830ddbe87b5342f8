"""Values of a CUDA device in pinned host memory: a side stream for each way, ordered by events.

The host never waits: whoever comes after on the device waits for an event there. So memory may go
as soon as its copy is queued and the program's stream has been told to wait for it, since whatever
takes its place is queued behind.

PyTorch's allocator of pinned memory rounds up to powers of two, pins at once, which is slow, and
keeps for good. So slabs of such sizes are taken, and values lie in them side by side. A place that
is free goes to another value at once: its copy is queued behind all of the program's streams, and
those wait for the copies that were there before. Slabs go back to PyTorch, which hands them on when
all copies from and to them are done.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple, final

import torch

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.devices import accelerator, is_out_of_memory
from rekindle.pytorch.swap._space import PAGE, Space, pages
from rekindle.pytorch.swap._store import Store, Transfer
from rekindle.pytorch.swap._streams import Streams
from rekindle.pytorch.tensors import whole

LEAST_SLAB: Final[Bytes] = 8 << 20
SLAB: Final[Bytes] = 64 << 20
"""Pinned at once, as much as there is already: between these. What is larger has one of its own."""


@final
class PinnedStore(Store):
    """At most `limit` bytes of pinned host memory for what is on `device`."""

    probe = 64 * 1024**2  # less tells of latency
    latency_ns = 20_000  # events are the device's own

    def __init__(self, limit: Bytes, device: torch.device, streams: Streams) -> None:
        """`streams`: those of the program on `device`."""
        self.limit = _in_slabs(limit)
        self.streams = streams
        self._device = device
        self._slabs: list[_Slab] = []
        self._out: Any = accelerator.new_stream(device)
        self._back: Any = accelerator.new_stream(device)

    @property
    def used(self) -> Bytes:
        return sum(slab.space.used for slab in self._slabs)

    @property
    def pinned(self) -> Bytes:
        """Bytes that PyTorch's allocator gave for it."""
        return sum(slab.memory.nbytes for slab in self._slabs)

    def write(self, home: torch.UntypedStorage) -> tuple[object, Transfer] | None:
        block = self._place(home.nbytes())
        if block is None:
            return None
        return block, self._copy(block.memory, whole(home), self._out, home)

    def read(self, key: object, home: torch.UntypedStorage) -> Transfer:
        assert isinstance(key, _Block)
        return self._copy(whole(home), key.memory, self._back, home)

    def release(self, key: object) -> None:
        assert isinstance(key, _Block)
        key.space.give_back(key.offset, max(1, key.memory.nbytes))

    def _place(self, nbytes: Bytes) -> _Block | None:
        for slab in self._slabs:
            block = slab.take(nbytes)
            if block is not None:
                return block
        size = max(_power_of_two(nbytes), min(SLAB, max(LEAST_SLAB, self.pinned)))
        while size > self.limit - self.pinned:
            size //= 2
        if size < pages(max(1, nbytes)):
            return None
        try:
            memory = accelerator.pinned(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None  # the machine has less to pin than the limit says
        self._slabs.append(_Slab(memory, Space(size)))
        return self._slabs[-1].take(nbytes)

    def new_home(self, nbytes: Bytes) -> torch.UntypedStorage:
        home = torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self.streams.keep_until_read(home)
        return home

    def close(self) -> None:
        """Nothing is left to do: slabs go with the store and the keys."""

    def _copy(
        self, into: torch.Tensor, source: torch.Tensor, stream: Any, home: torch.UntypedStorage
    ) -> Transfer:
        self.streams.wait_on(stream)  # it was written there, and may be read there still
        with accelerator.on_stream(stream):
            start = _now()
            into.copy_(source, non_blocking=True)
            end = _now()
        return _Copy(start, end, home, self.streams)


class _Block(NamedTuple):
    """Where a value is."""

    memory: torch.Tensor
    space: Space
    offset: int


class _Slab(NamedTuple):
    """Pinned memory, and which parts of it are taken."""

    memory: torch.Tensor
    space: Space

    def take(self, nbytes: Bytes) -> _Block | None:
        offset = self.space.take(max(1, nbytes))
        if offset is None:
            return None
        return _Block(self.memory[offset : offset + nbytes], self.space, offset)


def _power_of_two(nbytes: Bytes) -> Bytes:
    """The least that holds `nbytes`, and no less than a page."""
    return 1 << (pages(max(1, nbytes)) - 1).bit_length()


def _in_slabs(limit: Bytes) -> Bytes:
    """What of `limit` bytes slabs can take."""
    if limit >= SLAB:
        return limit // SLAB * SLAB
    return 1 << limit.bit_length() - 1 if limit >= PAGE else 0


@final
class _Copy(Transfer):
    """Two events around a copy. It keeps the device's memory until somebody has waited for it."""

    def __init__(self, start: Any, end: Any, home: torch.UntypedStorage, streams: Streams) -> None:
        self._start = start
        self._end = end
        self._home: torch.UntypedStorage | None = home
        self._streams = streams
        self._wait: tuple[Any, Any] | None = None

    @property
    def ns(self) -> Nanoseconds:
        return _between(self._start, self._end)

    @property
    def waiting_ns(self) -> Nanoseconds:
        return 0 if self._wait is None else _between(*self._wait)

    def ended(self) -> bool:
        return self._end.query() and (self._wait is None or self._wait[1].query())

    def wait(self) -> None:
        """The program's streams wait, on the device; the host goes on."""
        before = _now()
        self._streams.wait_for(self._end)
        self._wait = (before, _now())
        self._home = None

    def __del__(self) -> None:
        """Nobody waited (an exception, a budget that is over): whoever gets that memory does."""
        if self._home is not None and not sys.is_finalizing():
            self._streams.wait_for(self._end)


def _now() -> Any:
    """An event of the current stream."""
    event = accelerator.event()
    event.record()
    return event


def _between(start: Any, end: Any) -> Nanoseconds:
    end.synchronize()
    return int(start.elapsed_time(end) * 1e6)  # ms to ns
