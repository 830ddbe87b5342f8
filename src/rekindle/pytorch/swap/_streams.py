"""Order swap copies with respect to all CUDA streams of a program.

A program orders its streams only for its own accesses to a value. It does not know when Rekindle
copies the value to the host and back. So each copy waits for all work that is queued on any stream
of the program. All later work on these streams waits for the copy.

If the program uses a single stream, the only cost is a check per copy.
"""

from __future__ import annotations

from typing import Any, final

import torch

from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.tensors import privately, whole


@final
class Streams:
    """The CUDA streams on `device` that the program has used so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[int, Any] = {}

    def add_current(self) -> int:
        """Register the current CUDA stream as one that the program uses. Return the stream's id."""
        found = accelerator.current_stream_id(self._device)
        if found not in self._seen:
            self._seen[found] = accelerator.current_stream(self._device)
        return found

    def add(self, stream: Any) -> None:
        """Register `stream` as a CUDA stream that the program uses."""
        self._seen.setdefault(stream.stream_id, stream)

    def wait_on(self, copying: Any) -> None:
        """Make `copying`, a stream of swap copies, wait for all queued work of the program."""
        self.add_current()
        for stream in self._seen.values():
            copying.wait_stream(stream)

    def wait_for(self, event: Any) -> None:
        """Make all later work of the program wait for `event`."""
        self.add_current()
        for stream in self._seen.values():
            stream.wait_event(event)

    def keep_until_read(self, home: torch.UntypedStorage) -> None:
        """Keep the memory of `home` unused after its free until the program's earlier work has run.

        The allocator gives the memory out again only after all work that the program's streams had
        queued when the storage `home` was freed.
        """
        if len(self._seen) > 1 and home.device.type == self._device.type:
            with privately():
                memory = whole(home)
                for stream in self._seen.values():
                    memory.record_stream(stream)
