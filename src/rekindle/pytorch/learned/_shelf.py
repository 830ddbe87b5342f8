"""Lessons of other processes, earlier ones and such as run now: a file for each shape of a step.

A file is there as a whole or not at all, and what is broken is none. Processes that learn the same
shape at once, as the ranks of one job do, share one search: whoever holds the claim makes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch

from rekindle._types import Bytes
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.learned._lesson import Lesson
from rekindle.pytorch.learned._walk import GRAPH

try:
    import fcntl
except ImportError:  # Windows: each process makes its own search
    fcntl: Any = None

FORMAT: Final = "rekindle lesson 3"
"""Another number where those of storages or operators in a trace come to mean another thing."""
MOST_FILES: Final = 256
MOST_BYTES: Final = 64 << 20
LESS: Final = 0.95
"""A plan for this share of a budget will do: "auto" is never the same twice."""
ENDING: Final = ".lesson"


@final
class Claim:
    """The right to search for the plan of one shape; of a process, and ends with it."""

    def __init__(self, path: Path | None, descriptor: int = -1) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Others may have it."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # in what was forked meanwhile as well
            os.close(self._descriptor)
            self._path = None


@final
class Shelf:
    """Lessons within about `budget` on `device`, in `folder`; None: nowhere."""

    def __init__(self, folder: Path | None, budget: Bytes, device: torch.device) -> None:
        self._folder = None if folder is None else folder / "lessons"
        self._budget = budget
        self._about = f"{FORMAT} torch {torch.__version__} {_name_of(device)}"
        #: Names of files, by how they start.
        self._unread: dict[str, list[str]] = {}
        for name in self._names():
            self._unread.setdefault(name.partition("-")[0], []).append(name)

    def beginning_with(self, met: int) -> list[Lesson]:
        """Those that begin with this operator and were not taken before, the best fit first."""
        if not self._unread:
            return []
        found = self._unread.pop(self._start(met), [])
        fitting = [name for name in found if self._fits(_budget_in(name))]
        fitting.sort(key=_budget_in, reverse=True)
        return [lesson for name in fitting if (lesson := self._read(name)) is not None]

    def same(self, lesson: Lesson) -> Lesson | None:
        """What another process learned of that very shape, if its search is over."""
        found = self._read(self._name(lesson))
        return found if found is not None and found.finished else None

    def keep(self, lesson: Lesson) -> None:
        """A lesson that has a route, for other processes. What cannot be written is not."""
        if self._folder is None:
            return
        body = json.dumps(lesson.as_numbers(), separators=(",", ":"))
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / self._name(lesson)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(f"{_digest(body)}\n{body}", encoding="utf-8")
            unfinished.replace(path)
            self._make_room()

    def claim(self, lesson: Lesson) -> Claim | None:
        """The right to search for a plan of this shape; None: another process has it."""
        if self._folder is None or fcntl is None:
            return Claim(None)
        path = self._folder / self._name(lesson).replace(ENDING, ".claim")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return Claim(None)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks
            os.close(descriptor)
            return Claim(None)
        return Claim(path, descriptor)

    def _names(self) -> list[str]:
        if self._folder is not None:
            with suppress(OSError):
                return [name for name in os.listdir(self._folder) if name.endswith(ENDING)]
        return []

    def _name(self, lesson: Lesson) -> str:
        graph = [met for met in lesson.met if met & GRAPH]
        return f"{self._start(lesson.met[0])}-{_digest(repr(graph))}-{self._budget}{ENDING}"

    def _start(self, met: int) -> str:
        return _digest(f"{self._about} {met}")

    def _fits(self, budget: Bytes) -> bool:
        return LESS * self._budget <= budget <= self._budget

    def _read(self, name: str) -> Lesson | None:
        if self._folder is None:
            return None
        path = self._folder / name
        with suppress(OSError, ValueError, TypeError, KeyError):
            digest, _, body = path.read_text(encoding="utf-8").partition("\n")
            if digest == _digest(body):
                os.utime(path)  # it was of use
                numbers = json.loads(body)
                return Lesson.from_numbers(numbers)
        return None

    def _make_room(self) -> None:
        """What was of no use for longest goes."""
        assert self._folder is not None
        files: list[tuple[float, int, str]] = []
        for entry in os.scandir(self._folder):
            with suppress(OSError):
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        files.sort(reverse=True)
        nbytes = 0
        for number, (_, size, path) in enumerate(files):
            nbytes += size
            if number >= MOST_FILES or nbytes > MOST_BYTES:
                with suppress(OSError):
                    os.unlink(path)


def _name_of(device: torch.device) -> str:
    if is_accelerator(device):
        return accelerator.name_of(device)
    return f"{device.type} {platform.machine()}"


def _budget_in(name: str) -> Bytes:
    text = name.removesuffix(ENDING).rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
