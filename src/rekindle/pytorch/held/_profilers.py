"""Report PyTorch's profilers to the native core, because they inspect evicted tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.autograd import profiler

from rekindle.pytorch.native import Core
from rekindle.pytorch.online import Current, replace

_core = Current[Core]()


@contextmanager
def profilers_seen(core: Core) -> Iterator[None]:
    """Inside the block, report each start and stop of a profiler to `core`.

    If a profiler is already running, its start is reported now.
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
