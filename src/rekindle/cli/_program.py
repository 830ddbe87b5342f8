"""Finds what to run: a script as a whole, or a function of a script or of a module."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def step_of(program: str) -> tuple[Callable[[], Any], bool]:
    """What to run, and whether it is a function, which may run more than once."""
    place, _, name = program.partition(":")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise click.UsageError(f"there is no file {place}")
    if not name:
        if not is_file:
            raise click.UsageError(f"{program!r}: write SCRIPT.py or MODULE:FUNCTION")
        sys.path.insert(0, str(Path(place).resolve().parent))
        return lambda: runpy.run_path(place, run_name="__main__"), False
    if is_file:
        sys.path.insert(0, str(Path(place).resolve().parent))
        found = runpy.run_path(place)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            found = vars(importlib.import_module(place))
        except ModuleNotFoundError as error:
            raise click.UsageError(f"{program!r}: {error}") from None
    step = found.get(name)
    if not callable(step):
        raise click.UsageError(f"{program!r}: {place} has no function {name!r}")
    return step, True
