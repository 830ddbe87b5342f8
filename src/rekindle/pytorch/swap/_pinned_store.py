"""Store swapped-out values of a CUDA budget in page-locked host memory, by two side streams.

One CUDA stream copies values out, another one copies them back. The host never waits for a copy.
Instead, the program's streams wait on the device for the CUDA event that ends the copy. So device
memory can be freed as soon as its copy is queued: work that reuses the memory is queued behind the
copy.

PyTorch's allocator of page-locked memory rounds up to powers of two, is slow because it locks pages
at once, and never returns memory. Therefore the store allocates slabs, whose sizes are powers of
two, and packs several values into a slab. A freed part of a slab is reused at once. That is safe,
because each copy is queued behind all of the program's streams, and these wait for earlier copies.
Slabs are freed with the store. PyTorch's allocator reuses them once all copies from and to them
have ended.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple, final

import torch

from rekindle import _clock
from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.devices import accelerator, is_out_of_memory
from rekindle.pytorch.swap._space import PAGE, Space, pages
from rekindle.pytorch.swap._store import Store, Transfer
from rekindle.pytorch.swap._streams import Streams
from rekindle.pytorch.tensors import whole

LEAST_SLAB: Final[Bytes] = 8 << 20
SLAB: Final[Bytes] = 64 << 20
"""Least and largest size of a new slab. Between them, a new slab doubles the total.

A larger value gets a slab of its own.
"""


@final
class PinnedStore(Store):
    """Store of swapped-out values of `device` in at most `limit` bytes of page-locked memory."""

    probe = 64 * 1024**2  # with fewer bytes, latency would dominate a test transfer
    latency_ns = 20_000  # small, because CUDA events measure the time of a transfer on the device

    def __init__(self, limit: Bytes, device: torch.device, streams: Streams) -> None:
        """Make a store that has no slabs yet.

        Args:
            limit: The most bytes of host memory to use.
            device: The device of the swapped values.
            streams: The program's streams on `device`.
        """
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
        """Total bytes of all slabs: page-locked host memory."""
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
        """Reserve `nbytes` in an old or new slab. Return None if the host has no room."""
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
            return None  # the system cannot lock as many pages as `limit` allows
        self._slabs.append(_Slab(memory, Space(size)))
        return self._slabs[-1].take(nbytes)

    def new_home(self, nbytes: Bytes) -> torch.UntypedStorage:
        home = torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self.streams.keep_until_read(home)
        return home

    def close(self) -> None:
        """Do nothing, because Python frees the slabs together with the store and its keys."""

    def _copy(
        self, into: torch.Tensor, source: torch.Tensor, stream: Any, home: torch.UntypedStorage
    ) -> Transfer:
        """Queue a copy from `source` to `into` on `stream`, behind all of the program's streams."""
        # Work that is queued on the program's streams may still write `source` or read `into`.
        self.streams.wait_on(stream)
        with accelerator.on_stream(stream):
            start = _now()
            into.copy_(source, non_blocking=True)
            end = _now()
        return _Copy(start, end, home, self.streams)


class _Block(NamedTuple):
    """The part of a slab of page-locked memory that holds one value."""

    memory: torch.Tensor
    space: Space
    offset: int


class _Slab(NamedTuple):
    """A slab: a piece of page-locked host memory, and the table of its free parts."""

    memory: torch.Tensor
    space: Space

    def take(self, nbytes: Bytes) -> _Block | None:
        """Reserve `nbytes` in this slab, or return None if they do not fit."""
        offset = self.space.take(max(1, nbytes))
        if offset is None:
            return None
        return _Block(self.memory[offset : offset + nbytes], self.space, offset)


def _power_of_two(nbytes: Bytes) -> Bytes:
    """Return the smallest power of two that is at least `nbytes` and at least a page."""
    return 1 << (pages(max(1, nbytes)) - 1).bit_length()


def _in_slabs(limit: Bytes) -> Bytes:
    """Return `limit` rounded down to a number of bytes that slabs can fill."""
    if limit >= SLAB:
        return limit // SLAB * SLAB
    return 1 << limit.bit_length() - 1 if limit >= PAGE else 0


@final
class _Copy(Transfer):
    """A copy whose start and end are marked by CUDA events.

    This object keeps the device storage alive until `wait`.
    """

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
        """Make the program's streams wait for this copy on the device. The host does not wait."""
        before = _now()
        self._streams.wait_for(self._end)
        self._wait = (before, _now())
        self._home = None

    def __del__(self) -> None:
        """Make the program's streams wait for this copy if an error prevented `wait`."""
        if self._home is not None and not sys.is_finalizing():
            self._streams.wait_for(self._end)


def _now() -> Any:
    """Record a CUDA event on the current stream, and return it."""
    event = accelerator.event()
    event.record()
    return event


def _between(start: Any, end: Any) -> Nanoseconds:
    """Wait for the event `end`, and return the time (ns) between the two events."""
    end.synchronize()
    return _clock.scaled(int(start.elapsed_time(end) * 1e6))  # ms to ns
