"""Enters and leaves the native core: what is to be arranged in Python around it."""

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
    """Everything that belongs to one `rekindle.budget(...)`."""

    def __init__(self, driver: NativeDriver) -> None:
        self.driver = driver
        self._never_recompute = 0

    @property
    def never_recompute(self) -> int:
        """Depth of `rekindle.never_recompute()`."""
        return self._never_recompute

    @never_recompute.setter
    def never_recompute(self, depth: int) -> None:
        self.driver.core.never_recompute(self.driver.handle, depth - self._never_recompute)
        self._never_recompute = depth

    # -- an optimizer's step (as `OptimizerSteps` asks for it) ----------------------------------

    def record_without_grad(self, record: bool) -> None:
        """One reason less, or one more, that what is made with grad mode off has no recipe."""
        self.driver.record_without_grad(record)

    def not_of_the_program(self) -> AbstractContextManager[Any]:
        """Inside, operators pass: a mode of our own has what they do, which before torch 2.13 would
        come after the core."""
        return hidden()

    def unseen(self, func: Any, *args: Tensor) -> Tensor:
        """Runs an operator of our own, whose result stays and counts."""
        self.never_recompute += 1
        try:
            with torch.no_grad():
                return func(*args)
        finally:
            self.never_recompute -= 1

    def undoes(self, undo: StepUndo) -> None:
        """Tell `undo` when the step that has begun ends, and when memory is short."""
        self.driver.undo = undo
        self.driver.core.tell_ranges(self.driver.handle, True)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer made a step: one step of the program is over."""
        driver = self.driver
        driver.undo_no_more()
        driver.owners.optimizers.add(optimizer)
        driver.peak.note_states()
        if driver.watcher is not None:
            driver.watcher.step()
        driver.steps.over()


@contextmanager
def seen(driver: NativeDriver) -> Iterator[None]:
    """Inside, operators of this thread and what autograd saves are the driver's."""
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
    """For a thread that was started inside. When the budget is over, what it runs just passes."""
    core = driver.core
    core.see(driver.handle)
    del driver  # which the thread may outlive
    try:
        yield
    finally:
        core.see(None)
