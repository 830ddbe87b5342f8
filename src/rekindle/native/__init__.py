"""The engine in C++, which makes the same decisions as `rekindle.engine`.

This module loads the extension `_engine`, which replays streams of events for the simulator and for
tests. The extension is compiled from the folders `base`, `engine` and `replay`, which do not use
torch. Where `_engine` is missing, callers use the Python engine.

The extension `_torch` is the native core of budgets. `rekindle.pytorch.native` starts it. This
module names `_torch` because it imports only the standard library: `pip install` compiles both
extensions before the dependencies of Rekindle are installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from rekindle.native._build import Unbuildable as Unbuildable
from rekindle.native._build import compiler as compiler
from rekindle.native._build import extension as extension
from rekindle.native._build import rebuild_guided as rebuild_guided
from rekindle.native._build import ship as ship
from rekindle.native._build import why_not as why_not
from rekindle.native._compile import cores as cores

ENGINE: Final = "_engine"
_ENGINE_SOURCES: Final = ("engine/*.cpp", "replay/*.cpp")
TORCH: Final = "_torch"
#: The source folders of the extension `_torch`, lower layers first.
_ROOMS: Final = (
    "base",
    "engine",
    "allocator",
    "torch",
    "ops",
    "memory",
    "steps",
    "dispatch",
    "python",
)
_TORCH_SOURCES: Final = tuple(f"{room}/**/*.cpp" for room in _ROOMS)

REMEDIES: Final = (
    "Install a wheel of Rekindle that contains the native core, or a C++ compiler: `apt install "
    "g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora), `xcode-select --install` (macOS), or "
    "`conda install cxx-compiler`"
)
"""Advice on how to get the native core where it is missing; part of messages."""


def engine(*, build: bool = True) -> ModuleType | None:
    """Load the extension `_engine`, which replays streams of events.

    Args:
        build: Compile it if it is missing.

    Returns:
        The module, or None if it is missing. `why_not(ENGINE)` says why.
    """
    return extension(ENGINE, _ENGINE_SOURCES, build=build)


def ship_engine(folder: Path) -> None:
    """Copy the extension `_engine` into `folder`, under its name in a wheel, if it can be built."""
    ship(ENGINE, _ENGINE_SOURCES, folder)


def torch_extension(*, build: bool = True) -> ModuleType | None:
    """Load the extension `_torch`, the native core of budgets, without starting it.

    Args:
        build: Compile it if it is missing.

    Returns:
        The module, or None if it is missing. `why_not(TORCH)` says why.
    """
    return extension(TORCH, _TORCH_SOURCES, with_torch=True, build=build)


def rebuild_torch_extension(training: Sequence[str]) -> None:
    """Compile the extension `_torch` again, guided by the calls that `training` makes.

    Args:
        training: Command of a training program, see `rebuild_guided`.

    Raises:
        Unbuildable: There is no g++, a compilation fails, or the training program fails.
    """
    rebuild_guided(TORCH, _TORCH_SOURCES, training, with_torch=True)


def ship_torch_extension(folder: Path) -> None:
    """Copy the extension `_torch` into `folder`, under its name in a wheel, if it can be built."""
    ship(TORCH, _TORCH_SOURCES, folder, with_torch=True)


def build_ahead() -> str:
    """Compile both extensions for the installed PyTorch, unless they are in the cache already.

    Returns:
        An empty string if both extensions exist now, else why one is missing, in one line.
    """
    if torch_extension() is None:
        return why_not(TORCH)
    return why_not(ENGINE) if engine() is None else ""
