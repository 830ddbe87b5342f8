"""Search for the plan of a training step in another process, so that training goes on.

The other process runs `python -m rekindle._route`, which makes plans. `multiprocessing` is not
used, because it would run a user's script again if the script has no `__main__` guard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final, final

from rekindle._types import Bytes
from rekindle.engine import Route
from rekindle.policies import Swap
from rekindle.trace import Trace
from rekindle.trace.formats import native

MODULE = "rekindle._route"

SECONDS: Final = 20.0
"""Longest time (s) of a search for the plan of a training step."""
NICENESS: Final = 10
"""Niceness of the planning process: the system prefers the training process."""


@final
class Planning:
    """The search for the plan of one recorded training step, in a separate process.

    The planning process ends when this object is freed, or earlier. Both processes exchange data by
    files without a name, so nothing is left on the disk, however the program ends.
    """

    def __init__(
        self, trace: Trace, budget: Bytes, seconds: float = SECONDS, swap: Swap | None = None
    ) -> None:
        """Start the planning process.

        Args:
            trace: The recorded step.
            budget: The budget in bytes.
            seconds: The longest time (s) of the search.
            swap: Size of the host memory and bandwidths, if the plan may swap. None: it may not.

        Raises:
            OSError: No process can be started.
        """
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("sys.executable is not a Python interpreter that can run a module")
        self._taken = 0
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # `-P` keeps Python from searching the current folder for modules, where a file of the user
        # might hide a module.
        command = [sys.executable, "-P", "-m", MODULE, str(budget), str(seconds), str(NICENESS)]
        if swap is not None:
            host = -1 if swap.host is None else swap.host
            command += map(str, (host, swap.out_bytes_per_s, swap.in_bytes_per_s))
        with ExitStack() as files:
            written = files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            self._plans = files.enter_context(tempfile.TemporaryFile())
            self._errors = files.enter_context(tempfile.TemporaryFile())
            written.writelines(native.write(trace))
            written.seek(0)
            self._process = subprocess.Popen(
                command,
                cwd=os.sep,  # A relative path in $PYTHONPATH must not name a folder of the user.
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=written,
                stdout=self._plans,
                stderr=self._errors,
            )
            self._end = weakref.finalize(self, _end, self._process, files.pop_all(), os.getpid())

    @property
    def running(self) -> bool:
        """True while the planning process runs and may find a better plan."""
        return self._process.poll() is None

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the search. Return True if it has ended."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def newest(self) -> Route | None:
        """Return the best plan so far, or None if the last call has already returned it."""
        # The text after the last line break is a plan that is not completely written yet.
        *plans, _ = _content(self._plans).split(b"\n")
        if len(plans) <= self._taken:
            return None
        self._taken = len(plans)
        return Route.from_numbers(json.loads(plans[-1]))

    def error(self) -> str:
        """Return the last line of the planning process's error output."""
        lines = _content(self._errors).decode("utf-8", "replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no plan was found")

    def stop(self) -> None:
        """End the planning process, and close its files."""
        self._end()


def _content(file: IO[bytes]) -> bytes:
    """Return what the planning process wrote to `file`, without moving the file position."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def _end(process: subprocess.Popen[bytes], files: ExitStack, owner: int) -> None:
    """Close the files, and end the planning process unless a forked process calls this."""
    if os.getpid() == owner and process.poll() is None:
        process.kill()
        process.wait()
    files.close()
