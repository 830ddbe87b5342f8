"""Run a program in this process as `python` would: as __main__, with its own sys.argv and sys.path.

`rekindle run` uses this module, and opens the budget itself.
"""

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
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, final

import click

from rekindle._files import what_is

#: Files are refused if their description by `what_is` begins with one of these texts. All other
#: files are passed to the interpreter, which may raise a SyntaxError.
_NO_PROGRAMS = (
    "a checkpoint", "a picture", "a PDF", "a gzip", "an array", "an HDF5", "compiled", "a pickle",
    "a zip file", "a report", "a trace", "a web page",
)  # fmt: skip
_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


@final
@dataclass(frozen=True, slots=True)
class MainProgram:
    """A program to run as `python PLACE ARGUMENTS`; if `is_module`, as `python -m PLACE ...`."""

    place: str
    arguments: Sequence[str]
    is_module: bool

    def prepare(self) -> None:
        """Set sys.argv and sys.path as the interpreter does before it runs a program.

        Raises:
            click.UsageError: The program does not exist, or the file is not a program.
        """
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
        """Run the whole program. Exceptions of it, including `SystemExit`, are not caught."""
        if self.is_module:
            self._run_module()
        elif self._is_archive or self.place.endswith(".pyc"):
            runpy.run_path(self.place, run_name="__main__")
        else:
            self._run_script()

    @property
    def _is_archive(self) -> bool:
        """True for a folder or zip file that has a __main__.py."""
        # a pipe is not opened here, because its text can be read only once
        is_zip = os.path.isfile(self.place) and zipfile.is_zipfile(self.place)
        return os.path.isdir(self.place) or is_zip

    def _refuse_what_is_no_program(self) -> None:
        """Raise `click.UsageError` if the place is no program.

        Examples are a picture, or a folder without __main__.py.
        """
        path = Path(self.place)
        if path.is_dir():
            kind = None if (path / "__main__.py").exists() else "a folder without a __main__.py"
        else:
            kind = what_is(path) if path.is_file() else ""
            kind = kind if kind.startswith(_NO_PROGRAMS) and path.suffix != ".pyc" else None
        if kind is not None:
            raise click.UsageError(
                f"{self.place}: wanted a program, got {kind}; write rekindle run SCRIPT.py"
            )

    def _enter_folder(self, folder: str) -> None:
        """Put `folder` first on `sys.path`, in place of the folder of the `rekindle` command."""
        if not sys.flags.safe_path:
            sys.path[0] = folder

    def _find_module(self) -> None:
        try:
            found = importlib.util.find_spec(self.place)
        except (ImportError, ValueError) as error:
            raise click.UsageError(f"-m {self.place}: {error}") from None
        if found is None:
            raise click.UsageError(
                f"-m {self.place}: there is no module of that name; write rekindle run -m MODULE, "
                "as for python -m MODULE"
            )

    def _run_script(self) -> None:
        path = os.path.abspath(self.place)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        _run_as_main(code, path, SourceFileLoader("__main__", path), None)

    def _run_module(self) -> None:
        """Run a module, or the module `__main__` of a package."""
        spec = importlib.util.find_spec(self.place)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{self.place}.__main__")
        loader = None if spec is None else spec.loader
        code = loader.get_code(spec.name) if spec and isinstance(loader, InspectLoader) else None
        if spec is None or code is None:
            runpy.run_module(self.place, run_name="__main__", alter_sys=True)  # raises an error
            return
        sys.argv[0] = spec.origin or self.place
        _run_as_main(code, spec.origin, spec.loader, spec)


def _run_as_main(code: CodeType, path: str | None, loader: Any, spec: ModuleSpec | None) -> None:
    """Run `code` in a new __main__ module.

    The module stays in sys.modules, because threads, workers and exit handlers of the program may
    still use it after the last line. The functions of `runpy` would remove it.
    """
    main = ModuleType("__main__")
    main.__loader__ = loader
    main.__spec__ = spec
    main.__package__ = None if spec is None else spec.parent
    if path is not None:
        main.__file__ = path
    vars(main).update(__builtins__=builtins, __cached__=None if spec is None else spec.cached)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def show(error: BaseException) -> int:
    """Print the exception that ended a program as the interpreter would.

    Frames of `rekindle run` are left out of the traceback. After Ctrl-C the process ends by SIGINT.

    Returns:
        The exit code.
    """
    shown = error.with_traceback(_of_the_program(error.__traceback__))
    sys.excepthook(type(shown), shown, shown.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        atexit.register(_die_of, signal.SIGINT)
    return 1


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's first frame on, or all of it without such a frame."""
    rest = traceback
    while rest is not None:
        name = rest.tb_frame.f_code.co_filename
        if not (name.startswith((_PACKAGE, "<frozen runpy")) or name == runpy.__file__):
            return rest
        rest = rest.tb_next
    return traceback


def _die_of(number: signal.Signals) -> None:
    """Kill this process by a signal, so that the shell that started it sees the signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
