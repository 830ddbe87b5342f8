"""Compile sources into objects: a few large units, one for each core at a time, with progress.

Parsing PyTorch's headers takes longer than compiling any one source, so sources are joined into few
units. The caller, `_build`, decides which units need compiling, and links them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Final, TextIO, final

_UNIT_BYTES: Final = 240_000  # of sources in a unit, at most
_POLL_S: Final = 0.05
_LINE_EVERY_S: Final = 5.0  # where progress is written line by line
_BAR: Final = 20  # characters

# Seconds of one core of an AMD EPYC with g++ 12, which only weigh the units against each other: the
# first unit that is done corrects them for this machine.
_HEADERS_S: Final = 15.0  # PyTorch's
_PER_BYTE_S: Final = 5e-5


@final
class CompilerError(Exception):
    """The compiler failed; the message is its first complaint, in one line."""


@final
@dataclass(frozen=True, slots=True)
class Unit:
    """Sources that are compiled as one."""

    sources: tuple[Path, ...]
    with_torch: bool  # whether they include PyTorch's headers

    @property
    def text(self) -> str:
        """The translation unit."""
        return "".join(f'#include "{source}"\n' for source in self.sources)

    @property
    def cost(self) -> float:
        """About how many seconds it takes, on the machine where the constants were measured."""
        size = sum(source.stat().st_size for source in self.sources)
        return _HEADERS_S * self.with_torch + _PER_BYTE_S * size


def units_of(sources: Sequence[Path], without_torch: Sequence[str]) -> list[Unit]:
    """Group sources into few units of about equal size.

    Args:
        sources: those without PyTorch's headers stand together.
        without_torch: names of folders whose sources do not include PyTorch's headers.
    """
    units: list[Unit] = []
    for with_torch, group in groupby(sources, lambda path: path.parent.name not in without_torch):
        files = list(group)
        sizes = [path.stat().st_size for path in files]
        total = max(sum(sizes), 1)
        parts: list[list[Path]] = [[] for _ in range(-(-total // _UNIT_BYTES))]
        before = 0
        for path, size in zip(files, sizes, strict=True):
            parts[(before + size // 2) * len(parts) // total].append(path)
            before += size
        units += [Unit(tuple(part), with_torch) for part in parts if part]
    return units


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One call of the compiler."""

    command: tuple[str, ...]
    cost: float = 0.0  # `Unit.cost`


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(jobs: Sequence[Job], folder: Path, progress: Progress) -> None:
    """Run compilers, one for each core at a time.

    An exception, Ctrl-C included, ends all of them at once.

    Args:
        jobs: what to run; those that stand first start first.
        folder: an empty folder, for what the compilers print.
        progress: told what has started and ended.

    Raises:
        CompilerError: one of them failed.
    """
    waiting = list(reversed(jobs))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < cores():
                log = folder / f"{len(waiting)}.log"
                with _interrupted_afterwards():  # or nobody would end what has just started
                    running.append(_Running(waiting.pop(), log))
            time.sleep(_POLL_S)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                output = each.log.read_text(encoding="utf-8", errors="replace")
                must_succeed(each.job.command, each.process.returncode, output)
                progress.unit_done(each.job.cost, time.monotonic() - each.began)
            progress.show()
    finally:
        for each in running:
            each.kill()


@contextlib.contextmanager
def _interrupted_afterwards() -> Generator[None]:
    """Put Ctrl-C off until the end of the block."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # it is not raised here, or does not raise
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(*came[0])


@final
class _Running:
    """A compiler that runs. It has a process group of its own: `g++` starts the real compiler."""

    def __init__(self, job: Job, log: Path) -> None:
        self.job, self.log, self.began = job, log, time.monotonic()
        with log.open("wb") as file:
            try:
                self.process = subprocess.Popen(
                    job.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise CompilerError(f"{job.command[0]} cannot be run: {error}") from None

    def kill(self) -> None:
        """End it and what it started, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(command: Sequence[str]) -> str:
    """Run one command that takes a moment, and return its output.

    Raises:
        CompilerError: it cannot be run, or failed.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, errors="replace"
        )
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run: {error}") from None
    must_succeed(command, done.returncode, done.stderr + done.stdout)
    return done.stdout


def must_succeed(command: Sequence[str], status: int, output: str) -> None:
    """Raise `CompilerError` with the first complaint in `output` unless `status` is 0."""
    if status == 0:
        return
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    complaint = (errors or lines or [f"it ends with {status}"])[0][:300]
    raise CompilerError(f"{Path(command[0]).name} fails: {complaint}")


@final
@dataclass(slots=True)
class Progress:
    """Says how far the compilation is: a bar on a terminal, elsewhere a line every few seconds."""

    folder: Path  # where the result is kept
    stream: TextIO | None  # None: there is no console
    costs: Sequence[float]  # of the units to compile
    began: float = field(default_factory=time.monotonic)
    _done: int = 0
    _cost: float = 0.0  # of those done
    _seconds: float = 0.0  # that they took
    _said: float = 0.0

    @property
    def seconds_in_all(self) -> float:
        """The estimate, corrected by what the units that are done took."""
        spread = max(max(self.costs, default=0.0), sum(self.costs) / cores())
        return spread * (self._seconds / self._cost if self._cost else 1.0)

    def unit_done(self, cost: float, seconds: float) -> None:
        """Count one unit."""
        self._done += 1
        self._cost += cost
        self._seconds += seconds

    def begin(self) -> None:
        """Say what is about to happen, for how long, and how to avoid it."""
        self._said = time.monotonic()
        if self.stream is not None and not self.stream.isatty():
            self._write(
                f"rekindle: compiling the native core, once for this PyTorch and compiler: about "
                f"{max(self.seconds_in_all, 1):.0f} s. It is kept in {self.folder}. `rekindle "
                "build` compiles it ahead of time; a wheel made by scripts/wheels has it inside.\n"
            )

    def show(self) -> None:
        """Show how far it is, if it is time to."""
        if self.stream is None:
            return
        now = time.monotonic()
        elapsed, units = now - self.began, f"{self._done} of {len(self.costs)} units"
        if self.stream.isatty():
            in_all = max(self.seconds_in_all, elapsed + 1)
            filled = int(_BAR * elapsed / in_all)
            bar = "#" * filled + "-" * (_BAR - filled)
            self._write(
                f"\r\x1b[Krekindle: compiling the native core, once [{bar}] {units}, "
                f"about {in_all - elapsed:.0f} s left"
            )
        elif now - self._said >= _LINE_EVERY_S:
            self._said = now
            self._write(f"rekindle: {units} compiled after {elapsed:.0f} s\n")

    def end(self) -> None:
        """Remove the bar; say how long it took where it was announced in a line."""
        if self.stream is None:
            return
        elapsed = time.monotonic() - self.began
        terminal = self.stream.isatty()
        finished = f"rekindle: compiled the native core in {elapsed:.0f} s\n"
        self._write("\r\x1b[K" if terminal else finished)

    def _write(self, text: str) -> None:
        assert self.stream is not None
        with contextlib.suppress(OSError, ValueError):  # closed: the build goes on
            self.stream.write(text)
            self.stream.flush()


@contextlib.contextmanager
def shown_progress(folder: Path, costs: Sequence[float]) -> Generator[Progress]:
    """Announce a compilation on standard error, and its end; nothing if nothing is compiled."""
    progress = Progress(folder, sys.stderr if costs else None, costs)
    progress.begin()
    try:
        yield progress
    except BaseException:
        if progress.stream is not None and progress.stream.isatty():
            progress.end()
        raise
    progress.end()


def included(sources: Sequence[Path], headers: Mapping[Path, bytes]) -> list[Path]:
    """Return those of `headers` that `sources` include, directly or through others, sorted."""
    found: set[Path] = set()
    waiting = [(source, source.read_bytes()) for source in sources]
    while waiting:
        path, text = waiting.pop()
        for line in text.splitlines():
            if line.startswith(b'#include "'):
                target = Path(os.path.normpath(path.parent / line.split(b'"')[1].decode()))
                if target in headers and target not in found:
                    found.add(target)
                    waiting.append((target, headers[target]))
    return sorted(found)
