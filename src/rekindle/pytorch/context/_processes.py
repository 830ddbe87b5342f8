"""Warn when a program starts training processes inside a budget, which does not limit them.

`torch.multiprocessing.spawn` starts ranks that train. Without the warning, users would believe that
the budget limits their memory. Workers of a `DataLoader` and other processes of `multiprocessing`
are outside a budget by design, and start without a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from warnings import warn


@contextmanager
def spawn_warns() -> Iterator[None]:
    """While open, have `torch.multiprocessing.spawn` warn that its processes have no budget."""
    # The name `torch.multiprocessing.spawn` is a function as well as a module. Only the import
    # gives the module, in which the function is replaced.
    starting: Any = import_module("torch.multiprocessing.spawn")
    start: Any = starting.start_processes

    def start_outside(*args: Any, **kwargs: Any) -> Any:
        warn(
            "processes that torch.multiprocessing.spawn starts are outside of this budget: each "
            "of them needs a budget of its own. Write `with rekindle.budget(...):` in the "
            "function that they run, or torchrun --nproc-per-node 2 -m rekindle run ...",
            stacklevel=2,
        )
        return start(*args, **kwargs)

    starting.start_processes = start_outside
    try:
        yield
    finally:
        starting.start_processes = start
