"""Report PyTorch's profilers to the native core, because they read tensors that may be evicted."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch.autograd import profiler

from rekindle.pytorch.online import Current, replace


class ReadByProfilers(Protocol):
    """The native core, as this file uses it."""

    def profiler_starts(self) -> None:
        """Let the profiler of this thread read evicted tensors, at a null address."""
        ...

    def profiler_stops(self) -> None:
        """Undo `profiler_starts`."""
        ...

    def profilers_are_over(self) -> None:
        """Forget the profilers that are still running."""
        ...


_core = Current[ReadByProfilers]()


@contextmanager
def profilers_seen(core: ReadByProfilers) -> Iterator[None]:
    """Report the start and stop of profilers to `core` inside the block.

    A profiler that is already running is reported at once.
    """

    def starts(original: Any) -> Any:
        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            started = original(*args, **kwargs)
            if _core.now is not None:
                _core.now.profiler_starts()
            return started

        return start

    def stops(original: Any) -> Any:
        @functools.wraps(original)
        def stop(*args: Any, **kwargs: Any) -> Any:
            if _core.now is not None:
                _core.now.profiler_stops()
            return original(*args, **kwargs)

        return stop

    with _core.during(core), ExitStack() as stack:
        replace(stack, profiler, "_enable_profiler", starts)
        replace(stack, profiler, "_disable_profiler", stops)
        stack.callback(core.profilers_are_over)
        if profiler._is_profiler_enabled:
            core.profiler_starts()
        yield
