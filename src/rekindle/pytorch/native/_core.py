"""Find or build the native core, and start it once per process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast, final

import torch
from torch.nn import Parameter

from rekindle import _clock
from rekindle._types import Bytes, Nanoseconds
from rekindle.native import REMEDIES, TORCH, ship_torch_extension, torch_extension
from rekindle.native import why_not as why_not_built
from rekindle.pytorch.native._callbacks import PythonCallbacks
from rekindle.pytorch.native._higher import ONCE
from rekindle.pytorch.native._module import Core
from rekindle.pytorch.operators import (
    EFFECTS,
    IN_PLACE,
    OWN,
    ROOMY_ON_HOST,
    SUMS_OF_PRODUCTS,
    traits,
)

_OLDEST: Final = (2, 11)
# From this version of torch on, operators in a dispatch mode reach the native core.
_SEES_ALL: Final = (2, 13)


@final
class _Start:
    """The outcome of starting the native core in this process."""

    done = False  #: True once the core has started, or cannot start in this process
    core: Core | None = None
    why_not = ""  #: why the last attempt to start the native core failed


_start = _Start()


def core(*, build: bool = True) -> Core | None:
    """Return the native core's module, and start the core on first use.

    Compiling the core takes about a minute.

    Args:
        build: Compile the core if necessary. If False, use it only if it was compiled before.

    Returns:
        The core, or None if there is none. `why_not()` then returns the reason.
    """
    if _start.done:
        return _start.core
    if _version() < _OLDEST:
        _start.why_not = f"it needs torch 2.11 or later, and torch {torch.__version__} is installed"
        return None
    found = torch_extension(build=build)
    if found is None:
        _start.why_not = why_not_built(TORCH) or "it has not been compiled yet"
        return None
    module = cast("Core", found)
    if _clock.SPEED is not None:
        module.set_clock_speed(_clock.SPEED.factor, _clock.SPEED.seed)
    try:
        module.start(
            PythonCallbacks(module), torch.Tensor, Parameter, [*map(tuple, traits())],
            (*EFFECTS, ONCE), OWN, SUMS_OF_PRODUCTS, ROOMY_ON_HOST, [*map(tuple, IN_PLACE)],
        )  # fmt: skip
    except RuntimeError as error:
        _start.done, _start.why_not = True, f"it cannot be installed: {str(error).splitlines()[0]}"
        return None
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=module.about_to_fork,
            after_in_parent=module.forked_here,
            after_in_child=module.forked,
        )
    _start.done, _start.why_not, _start.core = True, "", module
    return module


def _version() -> tuple[int, ...]:
    """Return the version of torch as (major, minor)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def remedy() -> str:
    """Return the advice for users who have no native core (`core()` is None)."""
    return REMEDIES if _version() >= _OLDEST else "Install torch 2.11 or later"


def what_it_misses() -> str:
    """Return in a few words what the native core refuses with this version of torch, or ""."""
    if _version() >= _SEES_ALL:
        return ""
    return (
        f"budgets refuse dispatch modes and tensor subclasses with torch {torch.__version__}; "
        "torch 2.13 supports them"
    )


def why_not() -> str:
    """Return in a few words why `core()` last returned None."""
    return _start.why_not


def ship_native_core(folder: Path) -> None:
    """Copy the compiled native core into `folder`, to ship it in a package, if there is a core."""
    if core() is not None:
        ship_torch_extension(folder)


def why_no_native_core() -> str:
    """Build the native core if necessary. Return "" on success, else the reason of the failure."""
    return "" if core() is not None else why_not()


def signatures_seen() -> Iterator[tuple[str, tuple[tuple[int, ...], ...], Nanoseconds, Bytes]]:
    """Iterate over the signatures of all operators that ran in this process.

    Yields:
        The operator's name, the sizes of its tensors, its cost (ns) and its workspace (bytes).
    """
    module = core(build=False)
    if module is not None:
        yield from module.signatures_seen()
