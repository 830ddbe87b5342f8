"""Processes that a program starts inside a budget are outside of it: said where they train.

Workers of a `DataLoader` are meant to be outside, and so are those of `multiprocessing` in general.
`torch.multiprocessing.spawn` starts ranks that train: their memory would have no limit in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from warnings import warn


@contextmanager
def spawned_said() -> Iterator[None]:
    """Inside, `torch.multiprocessing.spawn` warns that its processes have no budget."""
    starting: Any = import_module("torch.multiprocessing.spawn")  # a function has the same name
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
