"""An optimizer's step is one operator: it happens as a whole or not at all, and may pass unseen.

What it takes is known before it begins: from a dry run on shapes (`_dry_run`), or from the last
step of its kind. There is room for all of it, or `OutOfBudget` comes before anything has moved. A
step of which that cannot be known is undone if it fails (`_undo`).
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
from torch import optim

from rekindle._types import Bytes
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.online._dry_run import bytes_of_step
from rekindle.pytorch.online._session import Runtime
from rekindle.pytorch.online._steps import Numbers
from rekindle.pytorch.online._undo import Undo

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
    """A step that was looked at: its kind, and the most bytes beside what was there."""

    kind: tuple[object, ...]
    needed: Bytes


@final
@dataclass(frozen=True, slots=True)
class _Begun:
    """The step that is running, and how the run stood before it."""

    kind: tuple[object, ...] | None
    undo: Undo | None
    before: Numbers


_seen: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()  # of each optimizer, the last


@final
class OptimizerSteps:
    """Stands before and after the step of every optimizer within one budget."""

    def __init__(self, runtime: Runtime, threads: dict[int, OptimizerSteps] | None = None) -> None:
        self._runtime = runtime
        self._driver = runtime.driver
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

    def of_this_thread(self) -> OptimizerSteps:
        """Return the same for another thread of the program, which runs this."""
        return OptimizerSteps(self._runtime, self._threads)

    def over(self) -> None:
        """The budget is, and the thread goes on."""
        self._threads = {}
        del self._runtime, self._driver

    def leave(self) -> None:
        """The thread ends."""
        if self._threads:
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
        engine.peak = max(engine.peak, begun.before.peak)
        if begun.undo is not None:
            begun.undo.end()
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
        if _are_alone(optimizer):
            self._begin(optimizer, plain=plain)
        else:
            hook = optimizer.register_step_pre_hook
            self._last = hook(lambda optimizer, *_: self._begin(optimizer, plain=plain))
        return None if closure is None else ((optimizer, self._recorded(closure)), {})

    def _and_begin(self, closure: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        @functools.wraps(closure)
        def close(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._begin(optimizer, plain=False)
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

    def _begin(self, optimizer: Any, *, plain: bool) -> None:
        """Makes room for what the step will take; here it fails, if it does.

        `plain`: called without a closure or anything else."""
        driver, engine = self._driver, self._driver.engine
        with driver.lock:
            predictable, kind = self._look_at(optimizer)
            kind = kind if plain else None
            driver.owners.optimizers.add(optimizer)  # whose state is told from what its step uses
            seen = _seen.get(optimizer)
            if seen is not None and seen.kind != kind:
                seen = None
            if seen is not None and not predictable and not engine.has_room(seen.needed):
                seen = None  # copies were part of that, maybe: it refuses nothing
            name = f"{type(optimizer).__name__}.step()"
            if seen is not None and not predictable and not driver.written_down:
                driver.save_before_step(optimizer)  # else that was done when it was looked at
            undo = None
            needed = seen.needed if seen is not None else None
            if predictable and needed is None:
                with self._runtime.not_of_the_program():
                    needed = bytes_of_step(optimizer, driver.device)
            if needed is not None and not (driver.written_down and engine.has_room(needed)):
                driver.make_room(needed, name)  # who replays a trace makes room as it goes
            before = now = engine.now()
            if not predictable:
                undo = Undo(self._runtime, optimizer, copies=seen is None)
                self._runtime.undoes(undo)
                now = engine.now()  # with the copies
            self._begun = _Begun(kind, undo, before._replace(peak=now.peak))
            self._runtime.record_without_grad(False)  # what it makes lives on, and changes
            driver.stepping = True
            engine.peak = now.memory

    def _look_at(self, optimizer: Any) -> tuple[bool, tuple[object, ...]]:
        """Count what the step reads. Return whether it is predictable, and its kind."""
        driver = self._driver
        predictable = _is_predictable(optimizer)
        saves = predictable and not driver.written_down
        are_plain, gradients = driver.begin_step(optimizer, saves=saves)
        return predictable and are_plain, _kind_of(optimizer, driver.device, gradients)

    def _after(self, optimizer: Any) -> None:
        begun, driver = self._begun, self._driver
        with driver.lock:
            driver.forget_sources()
        if self._nested:
            self._nested -= 1
            return
        if begun is not None and begun.undo is not None:
            begun.undo.end()
        if begun is not None and begun.kind is not None:
            with driver.lock:
                before, now = begun.before, driver.engine.now()
                if now.memory == before.memory and _changes(now) == _changes(before):
                    _seen[optimizer] = _Seen(begun.kind, now.peak - before.memory)
        self.recover()


def _changes(numbers: Numbers) -> tuple[int, int]:
    return numbers.evictions, numbers.recomputations


def _are_alone(optimizer: Any) -> bool:
    """Whether no hooks but ours are called before and after its steps."""
    before, after = hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks
    its_own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return len(before) == 1 and len(after) == 2 and not its_own  # the other one: `_warm`


def _is_predictable(optimizer: Any) -> bool:
    """Whether a dry run tells what its step will take, if its tensors are plain."""
    return type(optimizer) in PREDICTABLE and not any(
        group.get("differentiable") for group in optimizer.param_groups
    )


def _kind_of(optimizer: Any, device: torch.device, gradients: object) -> tuple[object, ...]:
    """Steps of equal kinds take the same memory."""
    kind: list[object] = [type(optimizer), device, gradients]
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                kind.append(_kind_of_setting(value))
    return tuple(kind)


def _kind_of_setting(value: object) -> object:
    """A learning rate moves and takes no memory; a weight decay that is not zero any more does."""
    if type(value) in (int, float):
        return bool(value)
    return value if value is None or type(value) is bool else type(value)
