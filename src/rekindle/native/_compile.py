"""Compile C++ sources into object files, in parallel and with a progress display.

Parsing PyTorch's headers takes longer than compiling any one source, so sources are joined into a
few translation units of similar size. One compiler process runs per processor core. The caller,
`_build`, decides which units to compile, and links them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final, TextIO, final

from rekindle._interrupts import interrupts_deferred

_UNIT_BYTES: Final = 240_000  # most bytes of source text to put into one translation unit
_POLL_S: Final = 0.05
_LINE_EVERY_S: Final = 5.0  # interval of progress lines if the output is not a terminal
_BAR: Final = 20  # width of the progress bar in characters

# Seconds on one core of an AMD EPYC with g++ 12, to estimate how long units take relative to each
# other. The first finished unit scales the estimate to this machine.
_HEADERS_S: Final = 15.0  # time to parse PyTorch's headers
_PER_BYTE_S: Final = 5e-5


@final
class CompilerError(Exception):
    """A compiler failed; the message is its first error, in one line."""


@final
@dataclass(frozen=True, slots=True)
class Unit:
    """Sources that are compiled as one translation unit."""

    sources: tuple[Path, ...]
    with_torch: bool  # True if the sources include PyTorch's headers

    @property
    def text(self) -> str:
        """Text of the translation unit."""
        return "".join(f'#include "{source}"\n' for source in self.sources)

    @property
    def cost(self) -> float:
        """Estimated seconds to compile the unit on the machine where `_HEADERS_S` was measured."""
        size = sum(source.stat().st_size for source in self.sources)
        return _HEADERS_S * self.with_torch + _PER_BYTE_S * size


def units_of(sources: Sequence[Path], without_torch: Sequence[str]) -> list[Unit]:
    """Group sources into few units of about equal size.

    Args:
        sources: Source files; those without PyTorch's headers must be consecutive.
        without_torch: Names of folders whose sources do not include PyTorch's headers.
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
    """One compiler command to run."""

    command: tuple[str, ...]
    cost: float = 0.0  # estimated seconds (`Unit.cost`)


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(jobs: Sequence[Job], folder: Path, progress: Progress) -> None:
    """Run compilers in parallel, one per processor core.

    An exception, Ctrl-C included, kills all running compilers at once.

    Args:
        jobs: Commands, in the order in which they start.
        folder: An empty folder for the compilers' output.
        progress: Display to update.

    Raises:
        CompilerError: A command failed.
    """
    waiting = list(reversed(jobs))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < cores():
                log = folder / f"{len(waiting)}.log"
                # Ctrl-C must not interrupt this block, or a compiler could be left running.
                with interrupts_deferred():
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


@final
class _Running:
    """A running compiler, in its own process group, because `g++` starts the real compiler."""

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
        """Kill the process group, and wait for the compiler."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(command: Sequence[str]) -> str:
    """Run one short command, and return its output.

    Raises:
        CompilerError: The command cannot be run, or failed.
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
    """Raise `CompilerError` with the first error line of `output` unless `status` is 0."""
    if status == 0:
        return
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    complaint = (errors or lines or [f"it ends with {status}"])[0][:300]
    raise CompilerError(f"{Path(command[0]).name} fails: {complaint}")


@final
@dataclass(slots=True)
class Progress:
    """Progress display: a bar on a terminal, otherwise a line every few seconds."""

    folder: Path  # folder that will contain the extension
    stream: TextIO | None  # where to write; None: show nothing
    costs: Sequence[float]  # `Unit.cost` of each unit to compile
    stage: str = ""  # part of a longer build; "": the whole build
    began: float = field(default_factory=time.monotonic)
    _done: int = 0
    _cost: float = 0.0  # sum of `Unit.cost` of the finished units
    _seconds: float = 0.0  # time that the finished units took
    _said: float = 0.0

    @property
    def seconds_in_all(self) -> float:
        """Estimated duration of the build, corrected by the duration of the finished units."""
        spread = max(max(self.costs, default=0.0), sum(self.costs) / cores())
        return spread * (self._seconds / self._cost if self._cost else 1.0)

    def unit_done(self, cost: float, seconds: float) -> None:
        """Count one finished unit: its `Unit.cost` and the seconds that it took."""
        self._done += 1
        self._cost += cost
        self._seconds += seconds

    def begin(self) -> None:
        """Announce the build, its duration, and how to avoid it. Write nothing on a terminal."""
        self._said = time.monotonic()
        if self.stream is None or self.stream.isatty():
            return
        if self.stage:
            self._write(f"rekindle: {self.stage}: about {max(self.seconds_in_all, 1):.0f} s\n")
        else:
            self._write(
                f"rekindle: compiling the native core, once for this PyTorch and compiler: about "
                f"{max(self.seconds_in_all, 1):.0f} s. It is kept in {self.folder}. `rekindle "
                "build` compiles it ahead of time; a wheel made by scripts/wheels has it inside.\n"
            )

    def show(self) -> None:
        """Update the bar, or write a line if one is due."""
        if self.stream is None:
            return
        now = time.monotonic()
        elapsed, units = now - self.began, f"{self._done} of {len(self.costs)} units"
        if self.stream.isatty():
            in_all = max(self.seconds_in_all, elapsed + 1)
            filled = int(_BAR * elapsed / in_all)
            bar = "#" * filled + "-" * (_BAR - filled)
            self._write(
                f"\r\x1b[Krekindle: {self.stage or 'compiling the native core, once'} [{bar}] "
                f"{units}, about {in_all - elapsed:.0f} s left"
            )
        elif now - self._said >= _LINE_EVERY_S:
            self._said = now
            self._write(f"rekindle: {units} compiled after {elapsed:.0f} s\n")

    def end(self) -> None:
        """Remove the bar, or, without a terminal, write a line with the duration."""
        if self.stream is None:
            return
        elapsed = time.monotonic() - self.began
        terminal = self.stream.isatty()
        what = f"{self.stage}: done" if self.stage else "compiled the native core"
        finished = f"rekindle: {what} in {elapsed:.0f} s\n"
        self._write("\r\x1b[K" if terminal else finished)

    def _write(self, text: str) -> None:
        assert self.stream is not None
        with contextlib.suppress(OSError, ValueError):  # A closed stream must not stop the build.
            self.stream.write(text)
            self.stream.flush()


@contextlib.contextmanager
def shown_progress(folder: Path, costs: Sequence[float], stage: str = "") -> Generator[Progress]:
    """Show the progress of a build on standard error. Show nothing if `costs` is empty."""
    progress = Progress(folder, sys.stderr if costs else None, costs, stage)
    progress.begin()
    try:
        yield progress
    except BaseException:
        if progress.stream is not None and progress.stream.isatty():
            progress.end()
        raise
    progress.end()


def included(sources: Sequence[Path], headers: Mapping[Path, bytes]) -> list[Path]:
    """Return the `headers` that `sources` include directly or indirectly, sorted."""
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
