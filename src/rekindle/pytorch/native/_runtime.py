"""Enters and leaves the native core: what is to be arranged in Python around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.optim.optimizer as hooks
from torch._ops import _higher_order_ops

from rekindle.pytorch.native._driver import NativeDriver


@final
class NativeRuntime:
    """Everything that belongs to one `rekindle.budget(...)` with the native core."""

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


@contextmanager
def seen(driver: NativeDriver) -> Iterator[None]:
    """Inside, operators of this thread and what autograd saves are the driver's.

    It knows the optimizers that make a step, for the report: whose state is whose.
    """
    core = driver.core

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        core.forget_sources(driver.handle)
        driver.owners.optimizers.add(optimizer)
        driver.steps.over(driver.evictions, driver.recomputations)

    hook = hooks.register_optimizer_step_post_hook(stepped)
    core.enter(driver.handle)
    before = torch._C._dispatch_tls_local_include_set()
    core.see(True)
    try:
        _teach_higher_order_operators(torch._C._dispatch_tls_local_include_set() - before)
        yield
    finally:
        core.see(False)
        hook.remove()


_taught: set[str] = set()
_key: list[Any] = []


def is_seen() -> bool:
    """Whether operators of this thread are: not amid one."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return included.has(_key[0]) and not excluded.has(_key[0])


@contextmanager
def seen_in_thread(driver: NativeDriver) -> Iterator[None]:
    """For a thread that was started inside. When the budget is over, what it runs just passes."""
    core = driver.core
    del driver  # which the thread may outlive
    core.see(True)
    try:
        yield
    finally:
        core.see(False)


def _teach_higher_order_operators(keys: Any) -> None:
    """They ask each dispatch key for a kernel, and do not know that of the core: they pass it over.

    What they run in their turn is seen, operator by operator.
    """
    if _higher_order_ops.keys() <= _taught:
        return
    key = keys.highestPriorityTypeId()  # Python has no name for it
    _key.append(key)
    for name, each in _higher_order_ops.items():
        each.non_fallthrough_keys = each.non_fallthrough_keys.remove(key)
        each._dispatch_cache.clear()
        _taught.add(name)
