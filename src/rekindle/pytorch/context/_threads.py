"""Extend a budget to Python threads that the program starts inside it.

Saved-tensor hooks and dispatch state belong to one thread, so a new thread needs its own. This
covers `torch.nn.DataParallel` and thread pools made inside the budget. It does not cover threads
that a custom operator starts while it runs: the budget does not track operators in them.
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
        inside: Returns True if the calling thread is inside the budget. Threads that it starts
            then are inside too.
        within: Makes the context in which a new thread runs. A thread that runs on after the budget
            stays in that context.
    """
    start, begin = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    children: set[threading.Thread] = set()
    # A list that is emptied when the budget ends. A thread that lives on may still refer to the
    # list, but must not keep `within` and thus the budget alive.
    enter = [within]
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
