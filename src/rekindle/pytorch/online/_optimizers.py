"""An optimizer's step is one operator: it happens as a whole or not at all, and may pass unseen.

What it takes is known before it begins: from a dry run on shapes (`_dry_run`), or from the last
step of its kind. There is room for all of it, or `OutOfBudget` comes before anything has moved. A
step of which that cannot be known is undone if it fails (`_undo`).

The step of one of PyTorch's own optimizers runs about ten small operators for each parameter, all
in place on what lives on. Once such a step was seen from beginning to end, its operators run
without the dispatch mode.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
import torch.optim.optimizer as hooks
from torch import Tensor, optim
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import Storage
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.online._dry_run import bytes_of_step
from rekindle.pytorch.online._undo import Undo, tensors_kept_by
from rekindle.pytorch.operators import PLAIN_TENSORS
from rekindle.pytorch.tensors import unread

#: Their steps take the same memory again and again, and run nobody's code but their own.
KNOWN: Final = frozenset({
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip
#: What their steps take does not depend on what is in the tensors, but for sparse gradients.
PREDICTABLE: Final = KNOWN | {optim.Adafactor, optim.Muon}


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

    kind: tuple[object, ...] | None
    passes: bool
    undo: Undo | None
    peak: Bytes
    memory: Bytes
    compute_ns: Nanoseconds
    changes: tuple[int, int]


_seen: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()  # of each optimizer, the last


@final
class OptimizerSteps:
    """Stands before and after the step of every optimizer within one budget."""

    def __init__(
        self, runtime: Any, mode: Any, threads: dict[int, OptimizerSteps] | None = None
    ) -> None:
        """`mode`: the budget's own in this thread; it hands every operator to its `runtime`. None:
        the native core sees them without."""
        self._runtime = runtime
        self._driver = runtime.driver
        self._mode: Any = mode
        self._thread = threading.get_ident()
        self._threads = {} if threads is None else threads  # who looks at the steps of each
        self._threads[self._thread] = self
        self._begun: _Begun | None = None
        self._nested = 0  #: steps amid the one that has begun
        self._last: Any = None  #: a hook of the optimizer's own, to be called after all others

    def watch(self) -> Iterator[Any]:
        """From now on. Yields what is to be removed in the end."""
        yield hooks.register_optimizer_step_pre_hook(self._step_begins)
        yield hooks.register_optimizer_step_post_hook(self._step_is_over)

    def of_this_thread(self, mode: Any) -> OptimizerSteps:
        """The same for another thread of the program, whose mode is `mode`."""
        return OptimizerSteps(self._runtime, mode, self._threads)

    def over(self) -> None:
        """The budget is, and the thread goes on."""
        self._threads = {}
        del self._runtime, self._driver

    def leave(self) -> None:
        """The thread ends."""
        if not self._threads:
            if self._begun is not None and self._begun.passes:
                _push_mode(self._mode)
            return
        self.recover()
        del self._threads[self._thread]

    def _step_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        steps = self._threads.get(threading.get_ident())
        if steps is None or self._is_captured():
            return None
        return steps._before(optimizer, args, kwargs)

    def _step_is_over(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        steps = self._threads.get(threading.get_ident())
        if steps is not None and not self._is_captured():
            steps._after(optimizer)
        self._runtime.stepped(optimizer)

    def _is_captured(self) -> bool:
        """Return whether the step goes into a graph, for which nothing can be evicted or copied."""
        return is_accelerator(self._driver.device) and accelerator.is_capturing()

    def recover(self) -> None:
        """Everything is as it was before the step that is running, or that failed."""
        if threading.get_ident() != self._thread:
            return
        begun, self._begun, self._nested = self._begun, None, 0
        if self._last is not None:
            self._last.remove()
            self._last = None
        if begun is None:
            return
        engine = self._driver.engine
        engine.peak = max(engine.peak, begun.peak)
        if begun.undo is not None:
            begun.undo.end()
            if getattr(self._mode, "runtime", None) is begun.undo:
                self._mode.runtime = self._runtime
        if begun.passes:
            _push_mode(self._mode)
        self._runtime.interrupted = None
        self._runtime.record_without_grad(True)
        self._driver.stepping = False

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begun = self._begun
        if begun is not None and begun.undo is not None and begun.undo.running:
            begun.undo.protect(optimizer)  # a step amid a step
            self._nested += 1
            return None
        self.recover()
        plain = len(args) == 1 and not kwargs
        closure = kwargs.get("closure", args[1] if len(args) == 2 else None)
        if closure is not None and _is_predictable(optimizer):  # calls it, and then writes
            return (optimizer, self._and_begin(closure, optimizer)), {}
        kind = _kind_of(optimizer, self._driver.device) if plain else None
        if _are_alone(optimizer):
            self._begin(optimizer, kind)
        else:
            hook = optimizer.register_step_pre_hook
            self._last = hook(lambda optimizer, *_: self._begin(optimizer, kind))
        return None if closure is None else ((optimizer, self._recorded(closure)), {})

    def _and_begin(self, closure: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        @functools.wraps(closure)
        def close(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._begin(optimizer, None)
            return loss

        return close

    def _recorded(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The program amid a step is the program."""

        @functools.wraps(closure)
        def close(*args: Any, **kwargs: Any) -> Any:
            self._runtime.record_without_grad(True)
            try:
                return closure(*args, **kwargs)
            finally:
                self._runtime.record_without_grad(False)

        return close

    def _begin(self, optimizer: Any, kind: tuple[object, ...] | None) -> None:
        """Makes room for what the step will take; here it fails, if it does."""
        driver, engine = self._driver, self._driver.engine
        with driver.lock:
            driver.settle()
            predictable = _is_predictable(optimizer)
            tensors = [*tensors_kept_by(optimizer), *_gradients_of(optimizer)]
            for tensor in tensors:
                driver.meet(tensor)  # or it would seem to come of the step
            driver.keep_from_now_on(tensors)
            driver.owners.optimizers.add(optimizer)  # whose state is told from what its step uses
            seen = _seen.get(optimizer)
            if seen is not None and seen.kind != kind:
                seen = None
            if seen is not None and not predictable and not engine.has_room(seen.needed):
                seen = None  # copies were part of that, maybe: it refuses nothing
            name = f"{type(optimizer).__name__}.step()"
            if (predictable or seen is not None) and not driver.written_down:
                driver.save_what_needs(_tensors_of(optimizer))
                driver.forget_sources()  # or they would seem to be freed by the step
            passes = seen is not None and predictable and self._may_pass(optimizer)
            undo = None
            needed = seen.needed if seen is not None else None
            if predictable and needed is None:
                with self._runtime.not_of_the_program():
                    needed = bytes_of_step(optimizer, driver.device)
            if needed is not None and not (driver.written_down and engine.has_room(needed)):
                driver.make_room(needed, name)  # who replays a trace makes room as it goes
            memory = engine.memory
            if not predictable:
                undo = self._runtime.undo(optimizer, copies=seen is None)
            if passes:
                assert seen is not None
                engine.account(0, seen.needed)
                engine.account(seen.cost, -seen.needed)
            self._begun = _Begun(
                kind, passes, undo, engine.peak, memory, engine.compute_ns, _changes(driver)
            )
            self._runtime.record_without_grad(False)  # what it makes lives on, and changes
            driver.stepping = True
            engine.peak = engine.memory
            if undo is not None and self._mode is not None:
                self._mode.runtime = undo
            if passes:
                self._runtime.interrupted = self.recover
                _pop_mode()

    def _after(self, optimizer: Any) -> None:
        begun, driver, engine = self._begun, self._driver, self._driver.engine
        with driver.lock:
            driver.settle()
            driver.forget_sources()
        if self._nested:
            self._nested -= 1
            return
        if begun is not None and begun.undo is not None:
            begun.undo.end()
        if begun is not None and begun.kind is not None and not begun.passes:
            with driver.lock:
                driver.settle()
                if engine.memory == begun.memory and _changes(driver) == begun.changes:
                    needed = engine.peak - begun.memory
                    cost = engine.compute_ns - begun.compute_ns
                    _seen[optimizer] = _Seen(begun.kind, needed, cost)
        self.recover()

    def _may_pass(self, optimizer: Any) -> bool:
        """Whether nobody needs to see the operators.

        From here on the versions of what the step writes are not known any more (R7).
        """
        driver = self._driver
        if self._mode is None or type(optimizer) not in KNOWN or not _are_alone(optimizer):
            return False
        watched = driver.capture, driver.recorder, driver.audit, driver.places
        if any(each is not None for each in watched):
            return False
        if _get_current_dispatch_mode() is not self._mode:
            return False
        written: list[Storage] = []
        for tensor in _tensors_of(optimizer):
            watch = driver.table.watch_at(tensor.untyped_storage()._cdata)
            if watch is None:
                return False
            if watch.storage is not None:
                written.append(watch.storage)
        if not all(map(unread, written)):
            return False
        for storage in written:
            storage.payload.version = -1
        return True


def _changes(driver: Driver) -> tuple[int, int]:
    return driver.evictions, driver.recomputations


def _are_alone(optimizer: Any) -> bool:
    """Whether no hooks but ours are called before and after its steps."""
    before, after = hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks
    its_own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return len(before) == 1 and len(after) == 2 and not its_own  # the other one: `_warm`


def _is_predictable(optimizer: Any) -> bool:
    """Whether a dry run tells what its step will take."""
    if type(optimizer) not in PREDICTABLE:
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return False
        for parameter in group["params"]:
            gradient = parameter.grad
            dense = type(gradient) is Tensor and gradient.layout is torch.strided
            if type(parameter) not in PLAIN_TENSORS or not (gradient is None or dense):
                return False
    return True


def _kind_of(optimizer: Any, device: torch.device) -> tuple[object, ...]:
    """Steps of equal kinds take the same memory."""
    kind: list[object] = [type(optimizer), device]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                kind.append(None)
            else:
                sparse = gradient.layout is not torch.strided and gradient._nnz()
                kind += [gradient.dtype, sparse, len(optimizer.state.get(parameter, ()))]
        for name, value in group.items():
            if name != "params":
                kind.append(_kind_of_setting(value))
    return tuple(kind)


def _kind_of_setting(value: object) -> object:
    """A learning rate moves and takes no memory; a weight decay that is not zero any more does."""
    if type(value) in (int, float):
        return bool(value)
    return value if value is None or type(value) is bool else type(value)


def _gradients_of(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _tensors_of(optimizer: Any) -> Iterator[Tensor]:
    """What a step may write: parameters that have a gradient, that, their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter
                yield parameter.grad
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        yield value
