"""The interfaces of one run within a budget, which `pytorch/native` implements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.pytorch.online._explain import Snapshot
from rekindle.pytorch.online._owners import Owners
from rekindle.pytorch.online._steps import Counting, Steps


class Engine(Counting, Protocol):
    """The engine of one run."""

    @property
    def budget(self) -> Bytes | float: ...

    @budget.setter
    def budget(self, nbytes: Bytes | float) -> None: ...

    def has_room(self, needed: Bytes) -> bool:
        """Return True if `needed` bytes more would fit once all that may be evicted is."""
        ...


class Driver(Protocol):
    """The part of a run that manages its memory."""

    lock: RLock
    device: torch.device
    owners: Owners
    steps: Steps
    #: `operators_run` at the last `OutOfBudget`, and a copy of the error
    refused: tuple[int, OutOfBudget] | None

    @property
    def stepping(self) -> bool:
        """True while an optimizer's step runs."""
        ...

    @stepping.setter
    def stepping(self, on: bool) -> None: ...

    @property
    def written_down(self) -> bool:
        """True while a recording is active."""
        ...

    @property
    def engine(self) -> Engine: ...

    @property
    def operators_run(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def recomputations(self) -> int: ...

    @property
    def at_peak(self) -> Snapshot:
        """The snapshot of the memory at the peak."""
        ...

    def make_room(self, needed: Bytes, who: str) -> None:
        """Evict until `needed` bytes fit, or raise `OutOfBudget` in the name of `who`."""
        ...

    def tensors_within(self, value: object) -> list[Tensor]:
        """Return the tensors in nested containers.

        A tensor made of others (a DTensor) is replaced by those.
        """
        ...

    def begin_step(self, optimizer: Any, *, saves: bool) -> tuple[bool, bytes]:
        """Prepare the step of `optimizer`: count what it reads, and make sources of what it writes.

        Args:
            optimizer: The optimizer.
            saves: Do what `save_before_step` does as well, if all its tensors are plain.

        Returns:
            True if all tensors are plain, with dense gradients; and bytes that identify the kind of
            the step.
        """
        ...

    def save_before_step(self, optimizer: Any) -> None:
        """Recompute and pin what depends on the contents that the step will overwrite (R4)."""
        ...

    def forget_sources(self) -> bool:
        """Free sources kept only to recompute resident values. Return True if there were any."""
        ...


class KnowsThreads(Protocol):
    """The object that knows which threads may read the program's tensors."""

    def all_threads_are_known(self) -> bool:
        """Return True if each thread started within the budget or touches no tensor."""
        ...


class StepUndo(Protocol):
    """The object that restores what a failed step of an optimizer wrote."""

    @property
    def running(self) -> bool:
        """True until the step is over."""
        ...

    def marked(self, *, entering: bool) -> None:
        """Note that a range of the profiler begins (`entering`) or ends."""
        ...

    def move_copies_out(self) -> bool:
        """Move all copies out of the budget. Return True if any copy was in it."""
        ...


class Runtime(Protocol):
    """One run, as used by the steps of optimizers."""

    @property
    def driver(self) -> Driver: ...

    def record_without_grad(self, record: bool) -> None:
        """Add or remove a reason not to record operators while grad mode is off.

        Args:
            record: True removes one reason, False adds one.
        """
        ...

    def not_of_the_program(self) -> AbstractContextManager[object]:
        """Hide operators of this thread from the runtime inside the block."""
        ...

    def unseen(self, func: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Run an operator of Rekindle itself, whose result is counted and never evicted."""
        ...

    def undoes(self, undo: StepUndo) -> None:
        """Report to `undo` when the step ends, and when memory is short."""
        ...

    def stepped(self, optimizer: Any) -> None:
        """Note that one step of the program is over."""
        ...
