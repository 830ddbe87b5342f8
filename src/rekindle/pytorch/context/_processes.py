"""Warn when a program starts training processes inside a budget, where they have none.

Workers of a `DataLoader` and processes of `multiprocessing` are outside a budget by design, and no
warning is given. `torch.multiprocessing.spawn` starts ranks that train: without the warning, their
memory would silently have no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from warnings import warn


@contextmanager
def spawned_said() -> Iterator[None]:
    """While open, have `torch.multiprocessing.spawn` warn that its processes have no budget."""
    # By name: `torch.multiprocessing.spawn` as an attribute is the function, not the module.
    starting: Any = import_module("torch.multiprocessing.spawn")
    start: Any = starting.start_processes

    def start_outside(*args: Any, **kwargs: Any) -> Any:
        warn(
            "the processes of torch.multiprocessing.spawn are outside of this budget: each needs "
            "one of its own. Write `with rekindle.budget(...):` in the function that they run, or "
            "torchrun --nproc-per-node 2 -m rekindle run ...",
            stacklevel=2,
        )
        return start(*args, **kwargs)

    starting.start_processes = start_outside
    try:
        yield
    finally:
        starting.start_processes = start
