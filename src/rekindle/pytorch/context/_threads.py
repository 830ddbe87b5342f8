"""A thread that starts inside a budget is inside as well: what is seen belongs to a thread.

So does `torch.nn.DataParallel`, so do pools of threads that were made inside. Not a thread that is
started amid an operator (by the body of a custom one): what happens there, nobody sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rekindle.pytorch.held import OURS


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
