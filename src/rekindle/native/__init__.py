"""The engine in C++: the same decisions as `rekindle.engine`, and why it may not be there.

`base` and `engine` know no Python and no torch; `replay` drives them with whole streams of events,
for the simulator and for tests.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Final

from rekindle.native._build import compiler as compiler
from rekindle.native._build import extension as extension
from rekindle.native._build import ship as ship
from rekindle.native._build import why_not as why_not

ENGINE = "_engine"
_SOURCES = ("engine/*.cpp", "replay/*.cpp")

REMEDIES: Final = (
    "Install a wheel that contains one, or a C++ compiler: `apt install g++` (Debian, Ubuntu), "
    "`dnf install gcc-c++` (Fedora), `xcode-select --install` (macOS), or `conda install "
    "cxx-compiler`"
)
"""The ways to have a native core where there is none."""


def engine(*, build: bool = True) -> ModuleType | None:
    """The module that replays streams of events; None: `why_not("_engine")`."""
    return extension(ENGINE, _SOURCES, build=build)


def ship_engine(folder: Path) -> None:
    """Puts that module into `folder`, as it comes with a package; no error where there is none."""
    ship(ENGINE, _SOURCES, folder)
