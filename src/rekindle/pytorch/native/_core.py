"""Find or build the native core, and start it once per process."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn import Parameter

from rekindle.native import REMEDIES, extension, ship
from rekindle.native import why_not as why_not_built
from rekindle.pytorch.native._callbacks import PythonCallbacks
from rekindle.pytorch.native._higher import ONCE
from rekindle.pytorch.operators import (
    EFFECTS,
    IN_PLACE,
    ROOMY_ON_HOST,
    SUMS_OF_PRODUCTS,
    traits,
)

NAME: Final = "_torch"
#: The source folders of the core in `src/rekindle/native`, lower layers first.
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
_SOURCES: Final = tuple(f"{room}/*.cpp" for room in _ROOMS)
_OLDEST: Final = (2, 11)
_SEES_ALL: Final = (2, 13)  # in older versions, dispatch modes hide operators from the core

_started: dict[str, Any] = {}  # "module": the module or None; "why not": the reason for None


def core(*, build: bool = True) -> ModuleType | None:
    """Return the native core's module, and start the core on first use.

    Compiling the core takes about a minute.

    Args:
        build: Compile the core if necessary. If False, use it only if it was compiled before.

    Returns:
        The module, or None if there is no core. `why_not()` then returns the reason.
    """
    if "module" in _started:
        return _started["module"]
    if _version() < _OLDEST:
        _started["why not"] = f"it needs torch 2.11, this is {torch.__version__}"
        return None
    module = extension(NAME, _SOURCES, with_torch=True, build=build)
    if module is None:
        _started["why not"] = why_not_built(NAME) or "it has not been compiled yet"
        return None
    try:
        reason = module.start(
            PythonCallbacks(module), torch.Tensor, Parameter, [*map(tuple, traits())],
            (*EFFECTS, ONCE), SUMS_OF_PRODUCTS, ROOMY_ON_HOST, [*map(tuple, IN_PLACE)],
        )  # fmt: skip
    except RuntimeError as error:  # another library has installed the same hooks before
        reason = f"it cannot be installed: {str(error).splitlines()[0]}"
    if reason:
        _started["why not"] = reason
        _started["module"] = None
        return None
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=module.about_to_fork,
            after_in_parent=module.forked_here,
            after_in_child=module.forked,
        )
    _started["module"] = module
    return module


def _version() -> tuple[int, ...]:
    """Return the version of torch as (major, minor)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def remedy() -> str:
    """Return the advice for users who have no native core (`core()` is None)."""
    return REMEDIES if _version() >= _OLDEST else "Install torch 2.11 or a later one"


def what_it_misses() -> str:
    """Return in a few words what the native core refuses with this version of torch, or ""."""
    if _version() >= _SEES_ALL:
        return ""
    return f"with torch {torch.__version__} it refuses modes and subclasses (2.13 lets it see them)"


def why_not() -> str:
    """Return in a few words why `core()` last returned None."""
    return _started.get("why not", "")


def ship_native_core(folder: Path) -> None:
    """Copy the compiled native core into `folder`, to ship it in a package, if there is a core."""
    if core() is not None:
        ship(NAME, _SOURCES, folder, with_torch=True)


def why_no_native_core() -> str:
    """Build the native core if necessary. Return "" on success, else the reason of the failure."""
    return "" if core() is not None else why_not()
