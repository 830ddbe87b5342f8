"""Plan a step in another process, so that training does not wait.

The process runs `python -m rekindle._route`, which makes the plans. `multiprocessing` is not used,
because it would run a user's script again if the script has no `__main__` guard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Final, final

from rekindle._types import Bytes
from rekindle.engine import Route
from rekindle.trace import Trace
from rekindle.trace.formats import native

MODULE = "rekindle._route"

SECONDS: Final = 20.0
"""Longest time (s) of a search for better plans."""
NICENESS: Final = 10
"""Niceness of the planning process, so that it yields the processor to training."""


@final
class Planning:
    """The search for the plan of one trace.

    The planning process ends when this object is freed, or earlier. It writes each better plan to
    a file in a temporary folder.
    """

    def __init__(self, trace: Trace, budget: Bytes, seconds: float = SECONDS) -> None:
        """Start the planning process.

        Args:
            trace: The recorded step.
            budget: The budget in bytes.
            seconds: The longest time for the search.

        Raises:
            OSError: No process can be started.
        """
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("this program is no Python that could be asked to run a module")
        folder = tempfile.TemporaryDirectory(prefix="rekindle-")
        self._folder = Path(folder.name)
        self._taken = 0
        written = self._folder / "trace.jsonl"
        with written.open("w", encoding="utf-8") as file:
            file.writelines(native.write(trace))
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", MODULE]
        with (self._folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, str(self._folder), str(budget), str(seconds), str(NICENESS)],
                cwd=folder.name,  # so that no file of the user shadows an import
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self._end = weakref.finalize(self, _end, self._process, folder, os.getpid())

    @property
    def running(self) -> bool:
        """True while the planning process runs and may find a better plan."""
        return self._process.poll() is None

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds (None: forever). Return True if the search has ended."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def newest(self) -> Route | None:
        """Return the best plan so far, or None if there is no better one since the last call."""
        found = max(self._folder.glob("route-*.json"), default=None, key=_number)
        if found is None or _number(found) <= self._taken:
            return None
        self._taken = _number(found)
        return Route.from_numbers(json.loads(found.read_text(encoding="utf-8")))

    def error(self) -> str:
        """Return the last line of the planning process's error output."""
        lines = (self._folder / "errors").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no plan was found")

    def stop(self) -> None:
        """End the planning process, and remove its files."""
        self._end()


def _number(path: Path) -> int:
    """Return the number of a plan in its file name."""
    return int(path.stem.partition("-")[2])


def _end(
    process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str], owner: int
) -> None:
    """End the planning process and remove its folder, unless this is a fork of the program."""
    if os.getpid() != owner:  # a fork, which owns neither the process nor the folder
        folder._finalizer.detach()  # type: ignore[attr-defined]
        return
    if process.poll() is None:
        process.kill()
        process.wait()
    folder.cleanup()
