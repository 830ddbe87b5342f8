"""One thread at a time works with the engine, and what an operator waits for may have its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def let_others_act(lock: Any, func: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """`func`, without the re-entrant `lock` that this thread has: it may wait for other threads.

    No action of the engine is amid another then, but for recomputation: `Driver.busy` says so.
    """
    depth = lock._release_save()
    try:
        return func(*args, **kwargs)
    finally:
        lock._acquire_restore(depth)
