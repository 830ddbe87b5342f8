"""Extend a budget to threads that start inside it: hooks and dispatch state belong to a thread.

This covers `torch.nn.DataParallel` and thread pools made inside. It does not cover a thread that an
operator starts while it runs, such as the body of a custom one: operators inside are not tracked.
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
    """While the context is open, run new threads within the budget.

    Args:
        inside: Returns True if the calling thread is inside the budget. Its new threads join.
        within: Makes the context that the body of such a thread runs in. A thread may run on after
            the budget; it then stays in that context.
    """
    start, begin = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    children: set[threading.Thread] = set()
    enter = [within]  # cleared at the end: frames of a child may outlive the budget
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
