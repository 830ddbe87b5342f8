"""The engine in C++: makes the same decisions as `rekindle.engine`.

This module loads the extension `_engine`, which replays streams of events for the simulator and for
tests. The extension is compiled from the folders `base`, `engine` and `replay`, which use no torch.
The runtime loads an extension of its own (`rekindle.pytorch.native`). Where `_engine` is missing,
callers use the Python engine.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Final

from rekindle.native._build import compiler as compiler
from rekindle.native._build import extension as extension
from rekindle.native._build import ship as ship
from rekindle.native._build import why_not as why_not
from rekindle.native._compile import cores as cores

ENGINE = "_engine"
_SOURCES = ("engine/*.cpp", "replay/*.cpp")

REMEDIES: Final = (
    "Install a wheel that contains one, or a C++ compiler: `apt install g++` (Debian, Ubuntu), "
    "`dnf install gcc-c++` (Fedora), `xcode-select --install` (macOS), or `conda install "
    "cxx-compiler`"
)
"""How to get the native core where it is missing; part of messages."""


def engine(*, build: bool = True) -> ModuleType | None:
    """Load the extension `_engine`, which replays streams of events.

    Args:
        build: Compile it if it is missing.

    Returns:
        The module, or None if it is missing. `why_not(ENGINE)` says why.
    """
    return extension(ENGINE, _SOURCES, build=build)


def ship_engine(folder: Path) -> None:
    """Copy the extension `_engine` into `folder`, under its name in a wheel, if it can be built."""
    ship(ENGINE, _SOURCES, folder)
