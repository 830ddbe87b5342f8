"""Find the line of the user's program that is running: the innermost one outside of packages."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Final, Literal

import torch

_HERE: Final = str(Path(__file__).parents[2])
_TORCH: Final = str(Path(torch.__file__).parent)
_PACKAGES: Final = ("site-packages", "dist-packages")
Owner = Literal["user", "library", "nobody"]


def users_line() -> str:
    """Return the innermost line of the user's own code, as "file:line".

    If that line called a library, the library's line follows: "train.py:12
    (transformers/activations.py:33)". Lines of torch and of Rekindle are skipped. If no code of the
    user is running, the library's line is returned alone.
    """
    frame = sys._getframe(1)
    library, number = "", 0
    while frame is not None:
        name = frame.f_code.co_filename
        owner = owner_of_file(name)
        if owner == "user":
            return line_in_words(name, frame.f_lineno, library, number)
        if owner == "library" and not library:
            library, number = name, frame.f_lineno
        frame = frame.f_back
    return line_in_words("", 0, library, number)


def line_in_words(file: str, number: int, library: str, number_in_library: int) -> str:
    """Format the line of the user's own code and the library's line, if any."""
    inner = f"{_in_package(library)}:{number_in_library}" if library else ""
    if not file:
        return inner
    return f"{file}:{number} ({inner})" if inner else f"{file}:{number}"


@functools.cache
def owner_of_file(name: str) -> Owner:
    """Return whose code is in the file `name`: "nobody" means Python, torch or Rekindle."""
    if name.startswith("<"):
        notebook = name.startswith("<ipython") or name == "<stdin>"
        return "user" if notebook else "nobody"
    if _is_in(name, (_HERE, _TORCH)) or _is_in(os.path.realpath(name), _real_folders()):
        return "nobody"
    if not set(_PACKAGES).isdisjoint(name.split(os.sep)):
        return "library"
    return "library" if _is_in(name, _installed()) else "user"


def _is_in(name: str, folders: tuple[str, ...]) -> bool:
    """Return whether one of `folders` contains the file `name`, by their paths.

    `pathlib` would take a large part of the time of a program's first step.
    """
    return name.startswith(tuple(folder + os.sep for folder in folders))


@functools.cache
def _real_folders() -> tuple[str, ...]:
    """Return the folders of Rekindle and torch with all symbolic links resolved."""
    return (os.path.realpath(_HERE), os.path.realpath(_TORCH))


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of Python's standard library and of installed commands.

    They are `sysconfig.get_paths()`, which would load a large module in a program's first step.
    """
    major, minor, *_ = sys.version_info
    folders = (
        os.path.dirname(os.__file__),
        os.path.join(sys.exec_prefix, sys.platlibdir, f"python{major}.{minor}"),
        os.path.dirname(sys.executable or ""),
    )
    return tuple(filter(None, folders))  # an embedded Python may have no executable


def _in_package(name: str) -> str:
    """Return the path of a file relative to the folder that contains its package."""
    parts = Path(name).parts
    for number in range(len(parts) - 1, -1, -1):
        if parts[number] in _PACKAGES:
            return "/".join(parts[number + 1 :])
    for folder in _installed():
        if _is_in(name, (folder,)):
            return Path(name).relative_to(folder).as_posix()
    return name
