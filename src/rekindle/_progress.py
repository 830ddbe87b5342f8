"""Show the progress of a slow function as one line on a terminal.

The planners, `rekindle.max_batch` and `rekindle.sequential` use it. Nothing is shown if standard
error is not a terminal.
"""

from __future__ import annotations

import sys
import time
from typing import Final, final

SECONDS: Final = 2.0
"""Work that takes less than this shows no line."""


@final
class ProgressLine:
    """Progress line on a terminal: it appears after `SECONDS` of work, and `done()` erases it.

    Call the object with a text to update the line.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._shown = 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now - self._began > SECONDS and now - self._shown > 0.2:
            self._show(text)

    def stages(self, done: int, stages: int) -> None:
        if done < stages:
            self(f"measuring stages: {done} of {stages}")
        else:
            self.done()

    def done(self) -> None:
        """Erase the line. The next text is again shown only after `SECONDS`."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._began, self._shown = None, 0.0

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            self._shown = time.monotonic()
            sys.stderr.write(f"\r\x1b[Krekindle: {text[:100]}")
            sys.stderr.flush()
