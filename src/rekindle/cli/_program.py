"""Find the program that a command line names: a script, or a function of a script or a module.

The commands `profile`, `capture` and `verify` use this module; `rekindle run` uses `_main_program`.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def script(place: str) -> Path:
    """Return the path of a script, and put its folder first on `sys.path`."""
    path = Path(place)
    if not path.is_file():
        raise click.UsageError(f"there is no file {place}")
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
        there = ", ".join(key for key, value in found.items() if callable(value) and key[0] != "_")
        raise click.UsageError(
            f"'{place}:{name}': {place} has no function {name!r}; there is: {there or 'none'}"
        )
    return step


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
        raise click.UsageError(f"{program!r}: write SCRIPT.py or MODULE:FUNCTION")
    path = script(place)
    return lambda: runpy.run_path(str(path), run_name="__main__"), False
