"""Find the program that a command line names: a script, or a function of a script or a module.

The commands `profile`, `capture` and `verify` use this module; `rekindle run` uses `_main_program`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click


def script(place: str) -> Path:
    """Return the path of a script, and put its folder first on `sys.path`."""
    path = Path(place)
    if not path.is_file():
        raise click.UsageError(f"there is no file {place}; write SCRIPT.py or MODULE:FUNCTION")
    sys.path.insert(0, str(path.resolve().parent))
    return path


def function(place: str, name: str) -> Callable[[], Any]:
    """Return the function `name` of a module, or of a script.

    A script runs once to define the function, but not as __main__.
    """
    if place.endswith(".py"):
        found = runpy.run_path(str(script(place)), run_name=Path(place).stem)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = vars(importlib.import_module(place))
        except ModuleNotFoundError as error:
            raise click.UsageError(
                f"'{place}:{name}': {error}; write SCRIPT.py:FUNCTION or MODULE:FUNCTION"
            ) from None
    step = found.get(name)
    if not callable(step):
        there = _functions(found)
        close = difflib.get_close_matches(name, there, n=len(there) or 1)
        shown = [*close, *(other for other in there if other not in close)]
        raise click.UsageError(
            f"'{place}:{name}': {place} has no function {name!r}; its functions are: "
            f"{', '.join(shown) or 'none'}" + (f"; write {place}:{close[0]}" if close else "")
        )
    return step


def _functions(found: Mapping[str, object]) -> list[str]:
    """Return the names of functions that need no arguments; neither classes nor models."""
    names: list[str] = []
    for name, value in found.items():
        if name[0] == "_" or not inspect.isfunction(value):
            continue
        with contextlib.suppress(TypeError):
            inspect.signature(value).bind()
            names.append(name)
    return names


def step_of(program: str) -> tuple[Callable[[], Any], bool]:
    """Find the program to run.

    Args:
        program: SCRIPT.py, SCRIPT.py:FUNCTION or MODULE:FUNCTION.

    Returns:
        The function to call, and True if the user named a function. A function may be called more
        than once, a script may not.
    """
    place, _, name = program.partition(":")
    if name:
        return function(place, name), True
    if not place.endswith(".py"):
        raise click.UsageError(
            f"got {program!r}, wanted a script or a function; write SCRIPT.py or MODULE:FUNCTION"
        )
    path = script(place)

    def whole_script() -> None:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:  # of a script such as `sys.exit(main())`
            if end.code:
                raise

    return whole_script, False
