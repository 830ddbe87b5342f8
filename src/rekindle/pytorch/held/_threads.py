"""Find threads that may read a tensor while its memory is evicted.

The core sees operators of threads that started inside `rekindle.budget(..., evict="anything")`, and
locks their operands. It does not see operators of older threads, nor of a thread that was started
inside an operator. While such an unknown thread exists, no user-held memory is evicted. Threads of
some libraries are exempt, because they access no tensor of the program, or only by functions that
Rekindle intercepts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

#: Prefix of the names of Rekindle's own threads, which read memory only by address, under a lock.
OURS = "rekindle-"
#: Python modules whose threads are harmless: they use no tensors, or they compile, or they pass
#: indices, source code or pickles (which Rekindle intercepts).
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


#: Python modules that start threads for other modules. The origin of such a thread is the next
#: frame. The second entry is Rekindle's own, whose function is the first in each thread of
#: a budget.
_STARTERS = ("threading", "rekindle.pytorch.context._threads")
#: Module and function of a thread of a ThreadPool, which runs code of the program.
_POOLED = ("multiprocessing.pool", "worker")


@final
class Threads:
    """The threads of the process: known ones, whose operators the core sees, and others."""

    def __init__(self) -> None:
        self._known = {threading.get_ident()}
        self._last: frozenset[int] = frozenset()
        #: Python modules that started the threads whose operators the core does not see
        self.unknown: list[str] = []

    def changed(self) -> bool:
        """Return True if the set of threads has changed since the last call. Updates `unknown`."""
        # Store the frames in no variable: one of them is this function's, so a variable would be a
        # reference cycle that keeps all callers alive.
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
    """Return True if threads that the module `origin` started cannot read evicted memory."""
    return any(origin == name or origin.startswith(f"{name}.") for name in HARMLESS)


def _origin(ident: int) -> str:
    """Return the Python module of a thread's outermost function, without those in `_STARTERS`."""
    if _compiles(ident):
        return "torch._inductor"
    if any(each.ident == ident and each.name.startswith(OURS) for each in threading.enumerate()):
        return "rekindle"
    frames: list[tuple[str, str]] = []
    each: FrameType | None = sys._current_frames().get(ident)
    while each is not None:
        frames.append((each.f_globals.get("__name__", ""), each.f_code.co_name))
        each = each.f_back
    for module, function in reversed(frames):
        if (module, function) == _POOLED:
            return "a multiprocessing.pool.ThreadPool"
        if module not in _STARTERS:
            return module
    return "threading"


def _compiles(ident: int) -> bool:
    """Return True if the thread belongs to Inductor's compile pool.

    The pool exists until the process ends. Its threads look like those of any other
    `ThreadPoolExecutor`.
    """
    module: Any = sys.modules.get("torch._inductor.async_compile")
    if module is None or not module.AsyncCompile.pool.cache_info().currsize:
        return False
    return any(thread.ident == ident for thread in module.AsyncCompile.pool()._threads)
