"""An optimizer's step is one operator: what it takes is seen once, then nobody looks inside.

The step of one of PyTorch's own optimizers runs about ten small operators for each parameter, all
in place on what lives on. Once such a step was seen from beginning to end, room for the most that
it had in use beside what was there is made ahead, and its operators run without the dispatch mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
import torch.optim.optimizer as hooks
from torch import Tensor, optim
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import Storage
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._runtime import Runtime
from rekindle.pytorch.operators import PLAIN_TENSORS
from rekindle.pytorch.tensors import unread

#: Their steps take the same memory again and again, and run nobody's code but their own.
KNOWN: Final = frozenset({
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class _Seen:
    """A step that was looked at: its kind, the most bytes beside what was there, its price."""

    kind: tuple[object, ...]
    needed: Bytes
    cost: Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class _Begun:
    """The step that is running, and how the run stood before it."""

    kind: tuple[object, ...]
    passes: bool
    peak: Bytes
    memory: Bytes
    compute_ns: Nanoseconds
    changes: tuple[int, int]


_seen: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()  # of each optimizer, the last


@final
class OptimizerSteps:
    """Stands before and after the step of every optimizer within one budget."""

    def __init__(self, runtime: Runtime, mode: TorchDispatchMode) -> None:
        self._runtime = runtime
        self._driver = runtime.driver
        self._mode = mode
        self._begun: _Begun | None = None

    def watch(self) -> Iterator[Any]:
        """From now on. Yields what is to be removed in the end."""
        yield hooks.register_optimizer_step_pre_hook(self._before)
        yield hooks.register_optimizer_step_post_hook(self._after)

    def recover(self) -> None:
        """Everything is as it was before the step that is running, or that failed."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        engine = self._driver.engine
        engine.peak = max(engine.peak, begun.peak)
        if begun.passes:
            _push_mode(self._mode)
            self._runtime.interrupted = None
        if self._driver.watcher is not None:
            self._driver.watcher.optimizing = False

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recover()
        driver, engine = self._driver, self._driver.engine
        kind = _kind_of(optimizer, driver.device) if len(args) == 1 and not kwargs else None
        if kind is None:
            return
        with driver.lock:
            driver.settle()
            tensors = list(_tensors_of(optimizer))
            for tensor in tensors:
                driver.meet(tensor)  # or it would seem to come of the step
            seen = _seen.get(optimizer)
            passes = seen is not None and seen.kind == kind and self._may_pass(tensors)
            if passes:
                assert seen is not None
                driver.make_room(seen.needed, f"{type(optimizer).__name__}.step()")
                engine.account(0, seen.needed)
                engine.account(seen.cost, -seen.needed)
            self._begun = _Begun(
                kind, passes, engine.peak, engine.memory, engine.compute_ns, _changes(driver)
            )
            engine.peak = engine.memory
            if driver.watcher is not None:
                driver.watcher.optimizing = True
            if passes:
                self._runtime.interrupted = self.recover
                _pop_mode()

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun, driver, engine = self._begun, self._driver, self._driver.engine
        if begun is not None and not begun.passes:
            with driver.lock:
                driver.settle()
                if engine.memory == begun.memory and _changes(driver) == begun.changes:
                    needed = engine.peak - begun.memory
                    cost = engine.compute_ns - begun.compute_ns
                    _seen[optimizer] = _Seen(begun.kind, needed, cost)
        self.recover()
        self._runtime.stepped(optimizer)

    def _may_pass(self, tensors: list[Tensor]) -> bool:
        """Whether nobody needs to see the operators. What needs the old weights is saved (R4).

        From here on the versions of what the step writes are not known any more (R7).
        """
        driver = self._driver
        watched = driver.capture, driver.recorder, driver.audit, driver.places
        if any(each is not None for each in watched):
            return False
        if _get_current_dispatch_mode() is not self._mode:
            return False
        written: list[Storage] = []
        for tensor in tensors:
            watch = driver.table.watches.get(tensor.untyped_storage()._cdata)
            if watch is None:
                return False
            if watch.storage is not None:
                written.append(watch.storage)
        for storage in written:
            if storage.consumers and not storage.replayable:  # a kept loss is made from it, say
                driver.forget(storage)
        if not all(map(unread, written)):
            return False
        for storage in written:
            storage.payload.version = -1
        return True


def _changes(driver: Driver) -> tuple[int, int]:
    return driver.evictions, driver.recomputations


def _kind_of(optimizer: Any, device: torch.device) -> tuple[object, ...] | None:
    """Steps of equal kinds take the same memory; None: nothing can be said."""
    alone = len(hooks._global_optimizer_pre_hooks) == len(hooks._global_optimizer_post_hooks) == 1
    others = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if type(optimizer) not in KNOWN or not alone or others:
        return None
    kind: list[object] = [device]
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return None
        for parameter in group["params"]:
            gradient = parameter.grad
            if type(parameter) not in PLAIN_TENSORS:
                return None
            if gradient is None:
                kind.append(None)
            elif type(gradient) is Tensor and gradient.layout is torch.strided:
                kind.append(gradient.dtype)
            else:
                return None
        for name, value in group.items():
            if name != "params":
                kind.append(_kind_of_setting(value))
    return tuple(kind)


def _kind_of_setting(value: object) -> object:
    """A learning rate moves and takes no memory; a weight decay that is not zero any more does."""
    if type(value) in (int, float):
        return bool(value)
    return value if value is None or type(value) is bool else type(value)


def _tensors_of(optimizer: Any) -> Iterator[Tensor]:
    """What a step may write: parameters, gradients, its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter
                yield parameter.grad
                for value in optimizer.state[parameter].values():
                    if isinstance(value, Tensor):
                        yield value
