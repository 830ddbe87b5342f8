"""The interfaces of one run within a budget, as `Protocol`s. `pytorch/native` implements them."""

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


class EngineInterface(Counting, Protocol):
    """The engine of one run within a budget: its budget in bytes, and its counts."""

    @property
    def budget(self) -> Bytes | None:
        """The budget in bytes, or None without a limit."""
        ...

    def without_limit(self) -> AbstractContextManager[None]:
        """Inside the block, evict nothing, even if memory exceeds the budget."""
        ...

    def has_room(self, needed: Bytes) -> bool:
        """Return True if `needed` more bytes would fit after evicting all that may be evicted."""
        ...


class DriverInterface(Protocol):
    """The object that manages the memory of one run within a budget."""

    lock: RLock
    device: torch.device
    owners: Owners
    steps: Steps
    #: `operators_run` at the last `OutOfBudget`, and a copy of that error. None: no such error yet.
    refused: tuple[int, OutOfBudget] | None

    @property
    def stepping(self) -> bool:
        """True while an optimizer's step runs."""
        ...

    @stepping.setter
    def stepping(self, on: bool) -> None: ...

    @property
    def moves_state(self) -> bool:
        """True if weights, gradients and optimizer state may move to the host."""
        ...

    @property
    def is_recorded(self) -> bool:
        """True while a trace is recorded."""
        ...

    @property
    def engine(self) -> EngineInterface: ...

    @property
    def operators_run(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def recomputations(self) -> int: ...

    @property
    def at_peak(self) -> Snapshot:
        """The snapshot of what held the memory at the peak."""
        ...

    def make_room(self, needed: Bytes, who: str) -> None:
        """Evict until `needed` bytes fit, or raise `OutOfBudget` that names the operator `who`."""
        ...

    def about_to_write_unseen(self, home: torch.UntypedStorage) -> None:
        """Make the storage `home`, which code that is no operator is about to write, resident."""
        ...

    def tensors_within(self, value: object) -> list[Tensor]:
        """Return the tensors in nested containers.

        A tensor that wraps others (a DTensor) is replaced by the wrapped ones.
        """
        ...

    def begin_step(self, optimizer: torch.optim.Optimizer, *, saves: bool) -> tuple[bool, bytes]:
        """Prepare the step of `optimizer`: count what it reads, and pin what it writes.

        Tensors that the step writes lose their recipes (how to recompute them), because recomputing
        them would need all earlier steps.

        Args:
            optimizer: The optimizer.
            saves: Also do what `save_before_step` does, if all tensors of the optimizer are plain.

        Returns:
            True if all tensors are plain, with dense gradients; and a key that is equal for steps
            with equal gradients.
        """
        ...

    def save_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Recompute and pin evicted values that need contents which the step overwrites.

        This is rule R4, sources.
        """
        ...

    def release_recompute_sources(self) -> bool:
        """Free values that are kept only to recompute other values, all of which are in memory.

        Returns:
            True if any value was freed.
        """
        ...


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


class RuntimeInterface(Protocol):
    """The methods of one run that `OptimizerSteps` uses."""

    @property
    def driver(self) -> DriverInterface: ...

    def record_without_grad(self, record: bool) -> None:
        """Begin or end a scope in which operators with grad mode off get no recipes.

        Args:
            record: False begins such a scope, True ends it.
        """
        ...

    def not_of_the_program(self) -> AbstractContextManager[object]:
        """Inside the block, hide operators of this thread from the runtime."""
        ...

    def unseen(self, func: Callable[..., Any], *args: Tensor) -> Any:
        """Run the operator `func` for Rekindle itself, not for the program.

        The result counts against the budget, but is never evicted.
        """
        ...

    def undoes(self, undo: StepUndo) -> None:
        """Set the undo of the running step, and call it when the step ends or memory is short."""
        ...

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that one step of the program is over."""
        ...
