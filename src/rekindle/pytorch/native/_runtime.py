"""Enter and leave the native core, with what has to be set up in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor

from rekindle.pytorch.native._driver import NativeDriver
from rekindle.pytorch.native._higher import (
    compiled_regions_seen,
    hidden,
    higher_order_operators_taught,
)
from rekindle.pytorch.online import StepUndo


@final
class NativeRuntime:
    """One `rekindle.budget(...)`, as `OptimizerSteps` and the context use it."""

    def __init__(self, driver: NativeDriver) -> None:
        self.driver = driver
        self._never_recompute = 0

    @property
    def never_recompute(self) -> int:
        """The nesting depth of `rekindle.never_recompute()`."""
        return self._never_recompute

    @never_recompute.setter
    def never_recompute(self, depth: int) -> None:
        self.driver.core.never_recompute(self.driver.handle, depth - self._never_recompute)
        self._never_recompute = depth

    # -- for the steps of optimizers (`OptimizerSteps`) -------------------------------------------

    def record_without_grad(self, record: bool) -> None:
        """Add or remove a reason not to record operators while grad mode is off.

        Args:
            record: True removes one reason, False adds one.
        """
        self.driver.record_without_grad(record)

    def not_of_the_program(self) -> AbstractContextManager[Any]:
        """Hide operators of this thread from the core inside the block.

        A dry run sees them in a dispatch mode, which would come after the core in torch before
        2.13.
        """
        return hidden()

    def unseen(self, func: Any, *args: Tensor) -> Tensor:
        """Run an operator of Rekindle itself, whose result is counted and never evicted."""
        self.never_recompute += 1
        try:
            with torch.no_grad():
                return func(*args)
        finally:
            self.never_recompute -= 1

    def undoes(self, undo: StepUndo) -> None:
        """Report to `undo` when the step ends, and when memory is short."""
        self.driver.undo = undo
        self.driver.core.tell_ranges(self.driver.handle, True)

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer made a step, so one step of the program is over."""
        driver = self.driver
        driver.undo_no_more()
        driver.owners.optimizers.add(optimizer)
        driver.peak.note_states()
        if driver.watcher is not None:
            driver.watcher.step()
        driver.steps.over()


@contextmanager
def seen(driver: NativeDriver) -> Iterator[None]:
    """Let the core see operators and saved tensors of this thread inside the block."""
    core = driver.core
    core.enter(driver.handle)
    before = torch._C._dispatch_tls_local_include_set()
    core.see(driver.handle)
    try:
        keys = torch._C._dispatch_tls_local_include_set() - before
        with higher_order_operators_taught(core, keys), compiled_regions_seen():
            yield
    finally:
        core.see(None)


@contextmanager
def seen_in_thread(driver: NativeDriver) -> Iterator[None]:
    """Let the core see a thread that was started inside the budget.

    After the end of the budget, operators of the thread run unseen.
    """
    core = driver.core
    core.see(driver.handle)
    del driver  # the thread may outlive the driver
    try:
        yield
    finally:
        core.see(None)
