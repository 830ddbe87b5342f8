"""Find threads that may read a tensor while its memory is evicted.

Operators of threads that started inside `rekindle.budget(..., evict="anything")` are seen, and lock
their operands. Operators of older threads are not seen, nor those of a thread that was started
inside an operator. While such a thread exists, nothing that the program holds is evicted. Threads
of some libraries are exempt, because they touch no tensor of the program, or only in ways that are
seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

#: Prefix of the names of Rekindle's own threads, which know addresses but no tensors.
OURS = "rekindle-"
#: Modules whose threads are harmless. They compile, or move indices, sources or pickles (which read
#: through storages), or do not use tensors.
HARMLESS = (
    "IPython",
    "concurrent.futures.process",
    "execnet",
    "ipykernel",
    "multiprocessing",
    "rekindle",
    "torch._inductor",
    "torch.utils.data",
    "tornado",
    "tqdm",
    "zmq",
)


#: Modules that start threads for others, so another frame tells the origin. (The second one brings
#: a thread that starts within a budget into it. After the budget the thread is in none.)
_STARTERS = ("threading", "rekindle.pytorch.context._threads")


@final
class Threads:
    """The threads of the process, as seen by the thread that made this object."""

    def __init__(self) -> None:
        self._known = {threading.get_ident()}
        self._last: frozenset[int] = frozenset()
        self.unknown: list[str] = []  #: modules that unknown threads came from

    def changed(self) -> bool:
        """Return True if the set of threads has changed since the last call. Updates `unknown`."""
        # The frames are not stored in a variable: one of them is this function's, and would keep
        # all callers alive.
        idents = frozenset(sys._current_frames())
        if idents == self._last:
            return False
        self._last = idents
        known = {*self._known, threading.get_ident()}
        origins = [_origin(ident) for ident in idents - known]
        self.unknown = [origin for origin in origins if not _is_harmless(origin)]
        return True

    @contextmanager
    def this_one_known(self) -> Iterator[None]:
        """Mark the current thread as known inside the block, because its operators are seen."""
        ident = threading.get_ident()
        self._known.add(ident)
        try:
            yield
        finally:
            self._known.discard(ident)


def _is_harmless(origin: str) -> bool:
    """Return True if threads that come from this module are exempt."""
    return any(origin == name or origin.startswith(f"{name}.") for name in HARMLESS)


def _origin(ident: int) -> str:
    """Return the module of a thread's outermost function, without those that started the thread."""
    if _compiles(ident):
        return "torch._inductor"
    if any(each.ident == ident and each.name.startswith(OURS) for each in threading.enumerate()):
        return "rekindle"
    names: list[str] = []
    each: FrameType | None = sys._current_frames().get(ident)
    while each is not None:
        names.append(each.f_globals.get("__name__", ""))
        each = each.f_back
    return next((name for name in reversed(names) if name not in _STARTERS), "threading")


def _compiles(ident: int) -> bool:
    """Return True if the thread belongs to Inductor's compile pool.

    The pool is made once and stays. Its threads look like those of any other `ThreadPoolExecutor`.
    """
    module: Any = sys.modules.get("torch._inductor.async_compile")
    if module is None or not module.AsyncCompile.pool.cache_info().currsize:
        return False
    return any(thread.ident == ident for thread in module.AsyncCompile.pool()._threads)
