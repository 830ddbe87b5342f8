"""What is different on CUDA: work is queued, and the allocator knows more than the dispatcher."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, final

from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.operators import Signature

#: Events not yet looked at; more wait in vain, for a price takes three.
MOST_PENDING = 1_000


@final
class EventPrices:
    """Prices operators by pairs of events. Nothing ever waits for the device.

    Until its events have happened an operator costs what moving its results takes at 1 TB/s, and a
    microsecond for the launch: the order of things, for the first steps.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Signature, Any, Any]] = deque()

    def run(
        self, signature: Signature, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs `func`, and looks at what has happened meanwhile."""
        self._collect()
        if not signature.cost:
            signature.cost = 1_000 + max(signature.needed, 0) // 1_000
        if len(self._pending) >= MOST_PENDING:
            return func(*args, **kwargs)
        start = accelerator.event()
        end = accelerator.event()
        start.record()
        result = func(*args, **kwargs)
        end.record()
        self._pending.append((signature, start, end))
        return result

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            signature, start, end = self._pending.popleft()
            signature.sample(int(start.elapsed_time(end) * 1e6))  # ms to ns
