"""Which threads there are that might read a tensor while its memory is freed.

Operators of a thread that started inside `rekindle.budget(..., evict="anything")` are seen, and
lock what they read. Those of one that ran before are not, nor those of one that was started amid an
operator. As long as there is such a thread, nothing that
the program holds is let go; but for threads of libraries that are known to touch no tensor of the
program's, or only by ways that are seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

#: The names of the runtime's own threads begin so; they know addresses, and no tensors.
OURS = "rekindle-"
#: Modules whose threads are harmless. They compile, or move lists of indices, sources or pickles,
#: which read through storages; or have nothing to do with tensors.
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


#: Modules that start the threads of others: where these come from, another frame tells. (The second
#: puts a thread that starts within a budget into it. After that budget it is in none.)
_STARTERS = ("threading", "rekindle.pytorch.context._threads")


@final
class Threads:
    """The threads of the process, as seen by the one that made this."""

    def __init__(self) -> None:
        self._known = {threading.get_ident()}
        self._last: frozenset[int] = frozenset()
        self.unknown: list[str] = []  #: the modules that unknown threads came from

    def changed(self) -> bool:
        """Whether there are others than when this was last asked; then `unknown` is up to date."""
        # No variable keeps the frames: one is that of this function, and has those of its callers.
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
        """Inside, the thread that runs this is no unknown one: its operators are seen."""
        ident = threading.get_ident()
        self._known.add(ident)
        try:
            yield
        finally:
            self._known.discard(ident)


def _is_harmless(origin: str) -> bool:
    return any(origin == name or origin.startswith(f"{name}.") for name in HARMLESS)


def _origin(ident: int) -> str:
    """The module of the outermost function of a thread that did not start it."""
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
    """Whether Inductor compiles in it. Its pool is made once and stays; its threads look like
    those of any other `ThreadPoolExecutor`."""
    module: Any = sys.modules.get("torch._inductor.async_compile")
    if module is None or not module.AsyncCompile.pool.cache_info().currsize:
        return False
    return any(thread.ident == ident for thread in module.AsyncCompile.pool()._threads)
