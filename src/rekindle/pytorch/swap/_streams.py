"""Order among a program's streams, where it has more than one (CUDA).

A program orders its streams for what it does itself: a value is read on another stream only after a
wait. Copies to the host and back come at other moments, and the program knows nothing of them. So a
copy comes after all that is queued, on every stream that was seen, and what comes later waits for
the copy. A program with one stream pays for one question.
"""

from __future__ import annotations

from typing import Any, final

import torch

from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.tensors import privately, whole


@final
class Streams:
    """The streams of `device` that the program was seen to use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[int, Any] = {}

    def see(self) -> int:
        """An operator is about to run, on the current stream; returns which that is."""
        found = accelerator.current_stream_id(self._device)
        if found not in self._seen:
            self._seen[found] = accelerator.current_stream(self._device)
        return found

    def add(self, stream: Any) -> None:
        """Somebody else saw that it uses `stream`."""
        self._seen.setdefault(stream.stream_id, stream)

    def wait_on(self, copying: Any) -> None:
        """The stream `copying`, which is not the program's, comes after all that is queued."""
        self.see()
        for stream in self._seen.values():
            copying.wait_stream(stream)

    def wait_for(self, event: Any) -> None:
        """All that comes later on any of them comes after `event`."""
        self.see()
        for stream in self._seen.values():
            stream.wait_event(event)

    def keep_until_read(self, home: torch.UntypedStorage) -> None:
        """When `home` is freed its block stays until all has run that was queued by then."""
        if len(self._seen) > 1 and home.device.type == self._device.type:
            with privately():
                memory = whole(home)
                for stream in self._seen.values():
                    memory.record_stream(stream)
