"""Values of a CUDA device in pinned host memory: a side stream for each way, ordered by events.

The host never waits: whoever comes after on the device waits for an event there. So memory may go
as soon as its copy is queued and the program's stream has been told to wait for it, since whatever
takes its place is queued behind. PyTorch's allocator of pinned memory hands a block on only when
the copies that were queued from and to it are done.
"""

from __future__ import annotations

import sys
from typing import Any, final

import torch

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.devices import accelerator, is_out_of_memory
from rekindle.pytorch.online import Streams
from rekindle.pytorch.swap._store import Store, Transfer
from rekindle.pytorch.tensors import whole


@final
class PinnedStore(Store):
    """At most `limit` bytes of pinned host memory for what is on `device`."""

    probe = 64 * 1024**2  # less tells of latency
    latency_ns = 20_000  # events are the device's own

    def __init__(self, limit: Bytes, device: torch.device, streams: Streams) -> None:
        """`streams`: those of the program on `device`."""
        self.limit = limit
        self.streams = streams
        self._device = device
        self._used: Bytes = 0
        self._out: Any = accelerator.new_stream(device)
        self._back: Any = accelerator.new_stream(device)

    @property
    def used(self) -> Bytes:
        return self._used

    def write(self, home: torch.UntypedStorage) -> tuple[object, Transfer] | None:
        nbytes = home.nbytes()
        if self._used + nbytes > self.limit:
            return None
        try:
            host = accelerator.pinned(nbytes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None  # the machine has less to pin than the limit says
        self._used += nbytes
        return host, self._copy(host, whole(home), self._out, home)

    def read(self, key: object, home: torch.UntypedStorage) -> Transfer:
        assert isinstance(key, torch.Tensor)
        return self._copy(whole(home), key, self._back, home)

    def release(self, key: object) -> None:
        assert isinstance(key, torch.Tensor)
        self._used -= key.nbytes

    def new_home(self, nbytes: Bytes) -> torch.UntypedStorage:
        home = torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()
        self.streams.keep_until_read(home)
        return home

    def close(self) -> None:
        """Nothing is left to do: blocks go with their keys."""

    def _copy(
        self, into: torch.Tensor, source: torch.Tensor, stream: Any, home: torch.UntypedStorage
    ) -> Transfer:
        self.streams.wait_on(stream)  # it was written there, and may be read there still
        with accelerator.on_stream(stream):
            start = _now()
            into.copy_(source, non_blocking=True)
            end = _now()
        return _Copy(start, end, home, self.streams)


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
