"""Which line of the user's program runs: the first that is in nobody's package."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from typing import Final, Literal

import torch

_HERE: Final = Path(__file__).parents[2]
_TORCH: Final = Path(torch.__file__).parent
_PACKAGES: Final = ("site-packages", "dist-packages")
Owner = Literal["user", "library", "nobody"]


def users_line() -> str:
    """The innermost line of the user's own code, as "file:line"; the library's beside it where it
    called one: "train.py:12 (transformers/activations.py:33)".

    Lines of torch and of this library are nobody's; where no user's code runs, the library's alone.
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
    """The line of the user's own code, if any, and that of a library which it called, if any."""
    inner = f"{_in_package(library)}:{number_in_library}" if library else ""
    if not file:
        return inner
    return f"{file}:{number} ({inner})" if inner else f"{file}:{number}"


@functools.cache
def owner_of_file(name: str) -> Owner:
    """Whose code is in the file `name`."""
    if name.startswith("<"):
        notebook = name.startswith("<ipython") or name == "<stdin>"
        return "user" if notebook else "nobody"
    path = Path(name)
    for folder in (_HERE, _TORCH):
        if path.is_relative_to(folder) or _real(path).is_relative_to(_real(folder)):
            return "nobody"
    if not set(_PACKAGES).isdisjoint(path.parts):
        return "library"
    return "library" if any(path.is_relative_to(folder) for folder in _installed()) else "user"


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


@functools.cache
def _installed() -> tuple[str, ...]:
    """Python's own library, and the commands that packages bring along."""
    paths = sysconfig.get_paths()
    return tuple(paths[name] for name in ("stdlib", "platstdlib", "scripts"))


def _in_package(name: str) -> str:
    """A file as seen from the folder that its package lies in."""
    parts = Path(name).parts
    for number in range(len(parts) - 1, -1, -1):
        if parts[number] in _PACKAGES:
            return "/".join(parts[number + 1 :])
    for folder in _installed():
        if Path(name).is_relative_to(folder):
            return Path(name).relative_to(folder).as_posix()
    return name
