"""A thread that starts inside a budget is inside as well: modes and hooks belong to a thread.

So does `torch.nn.DataParallel`, so do pools of threads that were made inside. Not a thread that is
started amid an operator (by the body of a custom one): what happens there, no mode sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from rekindle.pytorch.held import OURS
from rekindle.pytorch.online import kept, unpack_kept

Unpack = Callable[[Any], Tensor]


@contextmanager
def inherited(
    inside: Callable[[], bool], within: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Until this is left, threads that are started while `inside()` run within `within()`.

    `within` is for threads that go on after it was left, too.
    """
    start, begin = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    children: set[threading.Thread] = set()
    enter = [within]  # a child's own frames keep this list, and it may outlive the budget
    del within

    def start_inside(thread: threading.Thread) -> None:
        if inside() and not thread.name.startswith(OURS):
            children.add(thread)
        try:
            start(thread)
        except BaseException:
            children.discard(thread)
            raise

    def begin_within(thread: threading.Thread) -> None:
        if thread not in children or not enter:
            begin(thread)
            return
        children.discard(thread)
        with enter[0]():
            begin(thread)

    threading.Thread.start = start_inside  # type: ignore[method-assign]
    threading.Thread._bootstrap_inner = begin_within  # type: ignore[attr-defined]
    try:
        yield
    finally:
        enter.clear()
        threading.Thread.start = start  # type: ignore[method-assign]
        threading.Thread._bootstrap_inner = begin  # type: ignore[attr-defined]


@final
class Hooks:
    """Saved-tensor hooks of a thread, which may outlive the budget: from then on they do nothing.

    What was saved before knows how it is unpacked, so that nothing of the budget has to be kept.
    """

    def __init__(self, within: Any) -> None:
        """`within`: has the hooks of the budget."""
        self.within: Any = within  #: None: the budget is over, and this thread goes on

    def pack(self, tensor: Tensor) -> _Saved:
        if self.within is None:
            return _Saved(kept(tensor), unpack_kept)
        return _Saved(self.within.pack(tensor), self.within.unpack)

    def unpack(self, saved: _Saved) -> Tensor:
        return saved.unpack(saved.handle)


@final
@dataclass(frozen=True, slots=True)
class _Saved:
    handle: Any
    unpack: Unpack
