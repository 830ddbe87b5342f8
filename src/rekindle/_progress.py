"""Show the progress of a slow function: one line on a terminal, or regular lines in a log.

The planners, `rekindle.profile`, `rekindle.max_batch` and `rekindle.sequential` use this module.
"""

from __future__ import annotations

import sys
import time
from typing import Final, Self, final

SECONDS: Final = 2.0
"""Seconds of work below which no progress line is shown."""

LOG_SECONDS: Final = 10.0
"""Seconds between two lines if standard error is a file or a pipe. Shorter work writes no line."""


@final
class ProgressLine:
    """Progress line on a terminal: it appears after `SECONDS` of work, and `done()` erases it.

    Call the object with a text to update the line. If standard error is not a terminal, a new line
    is written every `LOG_SECONDS` of work, and `done()` erases nothing. As a context manager the
    object calls `done()` at the end.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._shown = 0.0
        self._logged = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.done()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = self._logged = now
        if sys.stderr.isatty():
            if now - self._began > SECONDS and now - self._shown > 0.2:
                self._shown = now
                sys.stderr.write(f"\r\x1b[Krekindle: {text[:100]}")
                sys.stderr.flush()
        elif now - self._logged > LOG_SECONDS:
            self._logged = now
            sys.stderr.write(f"rekindle: {text}\n")
            sys.stderr.flush()

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
