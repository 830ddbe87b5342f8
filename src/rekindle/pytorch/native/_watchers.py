"""Describe the objects that other packages give to a `Driver`, which calls them."""

from __future__ import annotations

from typing import Protocol


class KnowsThreads(Protocol):
    """The object that knows which threads of the process may read the program's tensors."""

    def all_threads_are_known(self) -> bool:
        """Return True if each thread was started within the budget or uses no tensors."""
        ...


class StepUndo(Protocol):
    """The object that restores all tensors that a failed step of an optimizer wrote."""

    @property
    def running(self) -> bool:
        """True until the optimizer's step is over."""
        ...

    def marked(self, *, entering: bool) -> None:
        """Record that a profiler range begins (`entering`) or ends. Each step is such a range."""
        ...

    def move_copies_out(self) -> bool:
        """Move all copies of weights out of the budget. Return True if that freed memory."""
        ...


class Watcher(Protocol):
    """The learner of plans, as far as the driver notifies it of the steps of the program."""

    def begins(self, op_id: int) -> None:
        """Load learned plans of steps whose first operator is `op_id`."""
        ...

    def step(self) -> None:
        """Handle the end of a step of the program, which is the start of the next one."""
        ...

    def close(self) -> None:
        """Handle the end of the budget."""
        ...
