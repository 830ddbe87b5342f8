"""Defer Ctrl-C while it would leave something behind.

Python raises `KeyboardInterrupt` between any two steps of Python code in the main thread. Between a
step that installs a hook and the `try` that removes it, an interrupt would leave the hook behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final


@final
class DeferredInterrupts:
    """Notes Ctrl-C from `begin` to `end`, which then calls the program's handler."""

    def __init__(self) -> None:
        self._handler: Any = None  # the program's handler while another one is installed
        self.came = False  #: an interrupt came that `end` passes on

    def begin(self) -> None:
        """From now on note interrupts. Outside the main thread, where none arrive, do nothing."""
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.get_ident() == threading.main_thread().ident:
            signal.signal(signal.SIGINT, self._note)
            self._handler = handler

    def end(self) -> None:
        """Stop noting interrupts. If one came, call the program's handler, which may raise."""
        handler = self._handler
        if self.stop():
            handler(signal.SIGINT, None)

    def stop(self) -> bool:
        """Stop noting interrupts. Return True if one came."""
        handler, self._handler = self._handler, None
        if handler is None:
            return False
        signal.signal(signal.SIGINT, handler)
        came, self.came = self.came, False
        return came

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


@contextmanager
def interrupts_deferred() -> Generator[None]:
    """Inside the block, defer Ctrl-C. It comes at the end, also if the block raises an error."""
    deferred = DeferredInterrupts()
    deferred.begin()
    try:
        yield
    finally:
        deferred.end()
