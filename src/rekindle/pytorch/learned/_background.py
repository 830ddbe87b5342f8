"""Plans a step in a process of its own, so that training is never held up.

Not `multiprocessing`, which would run a user's script again if it has no `__main__` guard. What is
started is `rekindle._route`, by name: nothing here knows how plans are made.
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
"""How long a plan may be improved."""
NICENESS: Final = 10
"""How far the process stands back where the processor is short."""


@final
class Planning:
    """One trace on its way to a route. The process ends with this object, at the latest."""

    def __init__(self, trace: Trace, budget: Bytes, seconds: float = SECONDS) -> None:
        """Raises `OSError` where no process can be started."""
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
                cwd=folder.name,  # nothing of the user's gets in the way of an import
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self._end = weakref.finalize(self, _end, self._process, folder, os.getpid())

    @property
    def running(self) -> bool:
        """Whether a better route may come yet."""
        return self._process.poll() is None

    def wait(self, timeout: float | None) -> bool:
        """Waits for the end; whether it came within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def newest(self) -> Route | None:
        """The best route so far; None if there is none since the last time this was asked."""
        found = max(self._folder.glob("route-*.json"), default=None, key=_number)
        if found is None or _number(found) <= self._taken:
            return None
        self._taken = _number(found)
        return Route.from_numbers(json.loads(found.read_text(encoding="utf-8")))

    def error(self) -> str:
        """The last line of what went wrong."""
        lines = (self._folder / "errors").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no plan was found")

    def stop(self) -> None:
        """Ends the process and removes the files."""
        self._end()


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _end(
    process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str], owner: int
) -> None:
    if os.getpid() != owner:  # a fork, to which neither belongs
        folder._finalizer.detach()  # type: ignore[attr-defined]
        return
    if process.poll() is None:
        process.kill()
        process.wait()
    folder.cleanup()
