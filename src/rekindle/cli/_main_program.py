"""Runs a program as `python` does: as __main__, with its own arguments and folder, to its end."""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import os
import runpy
import signal
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import final

import click

from rekindle._files import what_is

#: How they are told by `what_is`. Anything else the interpreter judges.
_NO_PROGRAMS = (
    "a checkpoint", "a picture", "a PDF", "a gzip", "an array", "an HDF5", "compiled", "a pickle",
    "a zip file", "a report", "a trace", "a web page",
)  # fmt: skip
_PACKAGE = str(Path(__file__).resolve().parents[1])


@final
@dataclass(frozen=True, slots=True)
class MainProgram:
    """`python PLACE ARGUMENTS`, or `python -m PLACE ARGUMENTS`."""

    place: str
    arguments: Sequence[str]
    is_module: bool

    def prepare(self) -> None:
        """What the interpreter does before the first line. Refuses what is not there."""
        if self.is_module:
            self._enter_folder(os.getcwd())
            self._find_module()
        elif not os.path.exists(self.place):
            raise click.UsageError(
                f"there is no file {self.place}; write rekindle run SCRIPT.py, or rekindle run -m "
                "MODULE"
            )
        else:
            self._refuse_what_is_no_program()
        if not (self.is_module or self._is_archive):
            self._enter_folder(str(Path(self.place).resolve().parent))
        sys.argv = [self.place, *self.arguments]
        sys.stdout.flush()

    def run(self) -> None:
        """All of the program; what it raises comes out, `SystemExit` too."""
        if self.is_module:
            runpy.run_module(self.place, run_name="__main__", alter_sys=True)
        elif self._is_archive:
            runpy.run_path(self.place, run_name="__main__")
        else:
            self._run_script()

    @property
    def _is_archive(self) -> bool:
        """A folder or a zip file with a __main__.py in it, or compiled code."""
        return (
            os.path.isdir(self.place)
            or self.place.endswith(".pyc")
            or zipfile.is_zipfile(self.place)
        )

    def _refuse_what_is_no_program(self) -> None:
        """Nor a folder or an archive with one."""
        path = Path(self.place)
        if path.is_dir():
            kind = None if (path / "__main__.py").exists() else "a folder without a __main__.py"
        else:
            kind = what_is(path)
            kind = kind if kind.startswith(_NO_PROGRAMS) and path.suffix != ".pyc" else None
        if kind is not None:
            raise click.UsageError(
                f"{self.place}: wanted a program, got {kind}; write rekindle run SCRIPT.py"
            )

    def _enter_folder(self, folder: str) -> None:
        """Where imports are looked for first, in the place of where this command itself lies."""
        if not sys.flags.safe_path:
            sys.path[0] = folder

    def _find_module(self) -> None:
        try:
            found = importlib.util.find_spec(self.place)
        except (ImportError, ValueError) as error:
            raise click.UsageError(f"-m {self.place}: {error}") from None
        if found is None:
            raise click.UsageError(f"-m {self.place}: there is no module of that name")

    def _run_script(self) -> None:
        """As its own module: what its last threads, workers and exit handlers see stays there."""
        path = os.path.abspath(self.place)
        main = ModuleType("__main__")
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__spec__ = None
        vars(main)["__builtins__"] = builtins
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        sys.modules["__main__"] = main
        exec(code, vars(main))


def show(error: BaseException) -> int:
    """Shows what ended a program as the interpreter would. Returns the exit code.

    Of the traceback what is this command's own is left out.
    """
    shown = error.with_traceback(_of_the_program(error.__traceback__))
    sys.excepthook(type(shown), shown, shown.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        atexit.register(_die_of, signal.SIGINT)
    return 1


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """From its first line on; all of it if that cannot be told."""
    rest = traceback
    while rest is not None:
        name = rest.tb_frame.f_code.co_filename
        if not (name.startswith((_PACKAGE, "<frozen runpy")) or name == runpy.__file__):
            return rest
        rest = rest.tb_next
    return traceback


def _die_of(number: signal.Signals) -> None:
    """So that whoever waits for this process sees what ended it, as a shell script does."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
