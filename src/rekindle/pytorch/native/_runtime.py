"""Enter and leave a budget in the native core, with the replacements of Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from rekindle.pytorch.native._driver import Driver
from rekindle.pytorch.native._higher import (
    compiled_regions_seen,
    higher_order_operators_taught,
)
from rekindle.pytorch.native._module import Core
from rekindle.pytorch.native._watchers import StepUndo
from rekindle.pytorch.online import replace


@final
class Runtime:
    """One `rekindle.budget(...)` as steps of optimizers and the context use it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._never_recompute = 0

    @property
    def never_recompute(self) -> int:
        """The nesting depth of active `rekindle.never_recompute()` blocks."""
        return self._never_recompute

    @never_recompute.setter
    def never_recompute(self, depth: int) -> None:
        self.driver.core.never_recompute(self.driver.handle, depth - self._never_recompute)
        self._never_recompute = depth

    def unseen(self, func: Callable[..., Any], *args: Tensor) -> Any:
        """Run the operator `func` for Rekindle itself, not for the program.

        The result counts against the budget, but is never evicted.
        """
        self.never_recompute += 1
        try:
            with torch.no_grad():
                return func(*args)
        finally:
            self.never_recompute -= 1

    def undoes(self, undo: StepUndo) -> None:
        """Set the undo of an optimizer's step, and call it at the end or when memory is short."""
        self.driver.undo = undo
        self.driver.core.tell_ranges(self.driver.handle, True)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer made a step, so one training step of the program is over."""
        driver = self.driver
        driver.undo_no_more()
        driver.owners.optimizers.add(optimizer)
        driver.peak.note_states()
        if driver.watcher is not None:
            driver.watcher.step()
        driver.steps.over()


@contextmanager
def interrupts_kept(core: Core) -> Iterator[None]:
    """Inside the block, raise Ctrl-C a moment later if a finalizer was interrupted by it.

    Python prints errors of finalizers and of weak references' callbacks, and goes on. Budgets have
    many of these callbacks.
    """
    with ExitStack() as stack:
        replace(stack, sys, "unraisablehook", core.interrupts_kept)
        yield


@contextmanager
def seen(driver: Driver) -> Iterator[None]:
    """Inside the block, let the core see operators and saved tensors of this thread."""
    core = driver.core
    core.activate(driver.handle)
    before = torch._C._dispatch_tls_local_include_set()
    core.bind_thread(driver.handle)
    try:
        keys = torch._C._dispatch_tls_local_include_set() - before
        with higher_order_operators_taught(core, keys), compiled_regions_seen(), _rejoining(core):
            yield
    finally:
        core.bind_thread(None)


@contextmanager
def _rejoining(core: Core) -> Iterator[None]:
    """Inside the block, each call of a module makes sure that the core sees its operators.

    PyTorch's FakeTensor in C++ uses the core's dispatch key too, and may switch it off. The core
    also looks when autograd saves a tensor, and when a backward pass or an optimizer's step begins.
    """
    if not core.shares_key():
        yield
        return

    def called(*_: object) -> None:
        if not torch.compiler.is_compiling():
            core.rejoin()

    hook = register_module_forward_pre_hook(called)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def seen_in_thread(driver: Driver) -> Iterator[None]:
    """Inside the block, let the core see the operators of this thread of the program.

    The program started the thread inside the budget. After the end of the budget, the core ignores
    operators of the thread.
    """
    core = driver.core
    core.bind_thread(driver.handle)
    del driver  # Keep no reference to the driver: this thread may outlive it.
    try:
        yield
    finally:
        core.bind_thread(None)
