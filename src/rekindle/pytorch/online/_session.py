"""What the rest of this package asks of one run within a budget, whoever implements it."""

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
        """Return whether `needed` bytes more would fit once all that may be evicted is."""
        ...


class Driver(Protocol):
    """Decides about the memory of one run."""

    lock: RLock
    device: torch.device
    owners: Owners
    steps: Steps
    refused: tuple[int, OutOfBudget] | None  #: `operators_run` at the last one, and a copy of it

    @property
    def stepping(self) -> bool:
        """Whether an optimizer's step runs."""
        ...

    @stepping.setter
    def stepping(self, on: bool) -> None: ...

    @property
    def written_down(self) -> bool:
        """Whether anybody asked for what happens now."""
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
        """Who held memory when there was most of it."""
        ...

    def make_room(self, needed: Bytes, who: str) -> None:
        """Evict until `needed` bytes fit, or raise `OutOfBudget`: `who` needs them."""
        ...

    def tensors_within(self, value: object) -> list[Tensor]:
        """Return the tensors in nested containers; of one made of others (a DTensor), those."""
        ...

    def begin_step(self, optimizer: Any, *, saves: bool) -> tuple[bool, bytes]:
        """Count what the step of `optimizer` will read; what it will write is a source.

        `saves`: if all its tensors are plain, do what `save_before_step` does as well. Return
        whether they are, with dense gradients, and what tells the kind of the step.
        """
        ...

    def save_before_step(self, optimizer: Any) -> None:
        """Recompute and pin what depends on the contents that the step will overwrite (R4)."""
        ...

    def forget_sources(self) -> bool:
        """Free sources kept only to recompute what is there; return whether any memory was."""
        ...


class KnowsThreads(Protocol):
    """Who knows which threads may read what the program holds."""

    def all_threads_are_known(self) -> bool:
        """Return whether each thread either started within the budget or touches no tensor."""
        ...


class StepUndo(Protocol):
    """Puts back what one step of an optimizer wrote, if it fails."""

    @property
    def running(self) -> bool:
        """Whether the step is not over."""
        ...

    def marked(self, *, entering: bool) -> None:
        """A range of the profiler begins, or ends."""
        ...

    def move_copies_out(self) -> bool:
        """Move all copies out of the budget; return whether any copy was in it."""
        ...


class Runtime(Protocol):
    """One run, as optimizers' steps use it."""

    @property
    def driver(self) -> Driver: ...

    def record_without_grad(self, record: bool) -> None:
        """Count one reason less, or one more, to record nothing while grad mode is off."""
        ...

    def not_of_the_program(self) -> AbstractContextManager[object]:
        """Inside, no operator of this thread is seen."""
        ...

    def unseen(self, func: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Run an operator of our own, whose result stays and counts."""
        ...

    def undoes(self, undo: StepUndo) -> None:
        """Tell `undo` when the step that has begun ends, and when memory is short."""
        ...

    def stepped(self, optimizer: Any) -> None:
        """One step of the program is over."""
        ...
