"""Treat `optimizer.step()` as one operator, which happens as a whole or not at all.

The memory that a step needs is known before the step begins, from a dry run on shapes (`_dry_run`)
or from the last equal step. Room is made for all of this memory, or `OutOfBudget` is raised before
any weight has changed. If the needed memory cannot be predicted, a failed step is undone (`_undo`).

If weights and state may move to the host, the tensors of the whole step need not fit. Then room is
made for the largest parameter alone, and a step that has begun exceeds the budget rather than fail.

Operators of a step get no recipes, because their results (weights and state) are sources.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch.optim.optimizer as hooks
from torch import optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rekindle._types import Bytes
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.native import Numbers, Runtime, hidden
from rekindle.pytorch.online import not_traced
from rekindle.pytorch.optimizers._dry_run import (
    bytes_of_largest,
    bytes_of_step,
    most_bytes_of_step,
)
from rekindle.pytorch.optimizers._step_kind import StepKind, kind_of_step
from rekindle.pytorch.optimizers._undo import Undo

#: Optimizers whose steps need the same memory each time and run no code of the user.
KNOWN: Final = frozenset({
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip
MOST_KINDS: Final = 64  #: most kinds of steps whose dry runs are remembered
#: Optimizers whose memory does not depend on the contents of tensors, except with sparse gradients.
PREDICTABLE: Final = KNOWN | {optim.Adafactor, optim.Muon}


@final
@dataclass(frozen=True, slots=True)
class _Seen:
    """A measured step of an optimizer: its kind (`_step_kind`), and the bytes that it needed.

    The bytes are the most in use during the step, less those in use before it.
    """

    kind: StepKind
    needed: Bytes


@final
@dataclass(frozen=True, slots=True)
class _Begun:
    """The running step of an optimizer.

    Attributes:
        kind: The key of steps that need the same memory, or None.
        undo: Restores the weights if the step fails; None if the step needs no undo.
        before: The engine's numbers before the step.
    """

    kind: StepKind | None
    undo: Undo | None
    before: Numbers


# Memory that the last measured step of each optimizer needed.
_seen: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()
# Memory (bytes) that dry runs found, by kind of step. None: one dry run so far.
_predicted: dict[StepKind, Bytes | None] = {}


@final
class OptimizerSteps:
    """Hooks before and after the steps of all optimizers within one budget."""

    def __init__(self, runtime: Runtime, threads: dict[int, OptimizerSteps] | None = None) -> None:
        self._runtime = runtime
        self._driver = runtime.driver
        self._thread = threading.get_ident()
        # For each thread, the object that handles the optimizer steps of that thread.
        self._threads = {} if threads is None else threads
        self._threads[self._thread] = self
        self._begun: _Begun | None = None
        #: nesting depth of optimizer steps: a step may call the step of another optimizer
        self._nested = 0
        #: Handle of a pre-step hook that runs after the optimizer's own pre-step hooks.
        self._last: RemovableHandle | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside the block, handle the steps of all optimizers of the process.

        After the block, no thread of the program handles steps.
        """
        with ExitStack() as stack:
            stack.callback(self._over_in_all_threads)
            stack.callback(hooks.register_optimizer_step_pre_hook(self._step_begins).remove)
            stack.callback(hooks.register_optimizer_step_post_hook(self._step_is_over).remove)
            stack.callback(self.leave)
            yield

    def _over_in_all_threads(self) -> None:
        for each in list(self._threads.values()):
            each.over()

    def of_this_thread(self) -> OptimizerSteps:
        """Return the object for another thread of the program. Call this in that thread."""
        return OptimizerSteps(self._runtime, self._threads)

    def over(self) -> None:
        """Do nothing in this thread from now on, because the budget has ended."""
        self._threads = {}
        del self._runtime, self._driver

    def leave(self) -> None:
        """Stop handling steps of this thread, because it ends."""
        if self._threads:
            self.recover()
            del self._threads[self._thread]

    @not_traced
    def _step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `_before` of this thread's object, if the thread is part of the budget."""
        steps = self._threads.get(threading.get_ident())
        if steps is None or self._is_captured():
            return None
        return steps._before(optimizer, args, kwargs)

    @not_traced
    def _step_is_over(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run `_after` of this thread's object, and note that a step of the program is over."""
        steps = self._threads.get(threading.get_ident())
        if steps is not None and not self._is_captured():
            steps._after(optimizer)
        self._runtime.stepped(optimizer)

    def _is_captured(self) -> bool:
        """Return True during CUDA graph capture, when nothing can be evicted or copied."""
        return is_accelerator(self._driver.device) and accelerator.is_capturing()

    def recover(self) -> None:
        """Reset this object after a step that ended or failed."""
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
        self._driver.record_without_grad(True)
        self._driver.stepping(False)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare the step, and return the changed arguments of `step`, or None."""
        begun = self._begun
        if begun is not None and begun.undo is not None and begun.undo.running:
            # The running step of another optimizer calls the step of this one.
            begun.undo.protect(optimizer)
            self._nested += 1
            return None
        self.recover()
        plain = len(args) == 1 and not kwargs
        first = args[1] if len(args) > 1 else None
        closure = kwargs.get("closure", first if callable(first) else None)

        def instead(changed: Callable[..., Any]) -> Any:
            if "closure" in kwargs:
                return args, {**kwargs, "closure": changed}
            return (optimizer, changed, *args[2:]), kwargs

        # A step with a closure calls the closure first, and writes weights afterwards.
        if closure is not None and _is_predictable(optimizer):
            return instead(self._and_begin(closure, optimizer))
        if _are_alone(optimizer):
            self._begin(optimizer, plain=plain)
        else:
            hook = optimizer.register_step_pre_hook
            self._last = hook(lambda optimizer, *_: self._begin(optimizer, plain=plain))
        return None if closure is None else instead(self._recorded(closure))

    def _and_begin(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        """Return `closure` extended by a call of `_begin` at its end."""

        @functools.wraps(closure)
        def close(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._begin(optimizer, plain=False)
            return loss

        return close

    def _recorded(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `closure` and makes recipes for the operators in it.

        The other operators of the optimizer's step get no recipes.
        """

        @functools.wraps(closure)
        def close(*args: Any, **kwargs: Any) -> Any:
            self._driver.record_without_grad(True)
            try:
                return closure(*args, **kwargs)
            finally:
                self._driver.record_without_grad(False)

        return close

    def _begin(self, optimizer: Optimizer, *, plain: bool) -> None:
        """Make room for the step, or raise `OutOfBudget` before the step changes any tensor.

        Args:
            optimizer: The optimizer.
            plain: True if the program called `step()` without any arguments.
        """
        driver, engine = self._driver, self._driver.engine
        with driver.lock:
            predictable, key = self._look_at(optimizer)
            kind = key if plain else None
            # Remember the optimizer, so that reports can attribute memory to its state.
            driver.owners.optimizers.add(optimizer)
            seen = _seen.get(optimizer)
            if seen is not None and seen.kind != kind:
                seen = None
            if seen is not None and not predictable and not engine.has_room(seen.needed):
                # The last measurement may include backup copies, so a step must not fail because of
                # it.
                seen = None
            name = f"{type(optimizer).__name__}.step()"
            if seen is not None and not predictable and not driver.is_recorded:
                # Otherwise `begin_step` has already saved the values that the step would
                # invalidate.
                driver.save_before_step(optimizer)
            undo = None
            needed = seen.needed if seen is not None else None
            if driver.moves_state:
                seen, needed = None, self._predict_largest(optimizer) if predictable else None
            elif predictable and needed is None:
                needed = self._predict(optimizer, key)
            # While a trace is recorded, make room for the whole step only if it may not fit. A
            # replay of the trace makes room for one operator at a time.
            if needed is not None and not (driver.is_recorded and engine.has_room(needed)):
                driver.make_room(needed, name)
            before = now = engine.now()
            if not predictable:
                undo = Undo(self._runtime, optimizer, self.recover, copies=seen is None)
                self._runtime.undoes(undo)
                # Read the counts after making backup copies, so that the copies do not count as
                # memory of the step.
                now = engine.now()
            self._begun = _Begun(kind, undo, before._replace(peak=now.peak))
            # Results of the step are weights and state. They are sources, so they need no recipes.
            self._driver.record_without_grad(False)
            driver.stepping(True, undone=undo is not None)
            engine.peak = now.memory

    def _predict(self, optimizer: Optimizer, kind: StepKind) -> Bytes:
        """Return the bytes that the step will need, from a dry run now or of an equal step.

        0 if the step fits in any case, so that nothing must be evicted.

        A dry run runs the step on tensors without memory (`_dry_run`). The first dry run for a kind
        of step serves only that step: workspaces of its operators may have been measured only when
        the step ran.
        """
        needed = _predicted.get(kind)
        if needed is not None:
            return needed
        engine = self._driver.engine
        room = engine.budget - engine.now().memory if engine.budget is not None else None
        fits = room is None or most_bytes_of_step(optimizer) <= room
        if fits and type(optimizer) in KNOWN:
            return 0
        with hidden():
            needed = bytes_of_step(optimizer, self._driver.device)
        _predicted[kind] = needed if kind in _predicted else None
        while len(_predicted) > MOST_KINDS:
            del _predicted[next(iter(_predicted))]
        return needed

    def _predict_largest(self, optimizer: Optimizer) -> Bytes:
        """Return the bytes that the step needs at once if all else may move to the host.

        These are the tensors of the largest parameter, and what the step makes for it.
        """
        with hidden():
            return bytes_of_largest(optimizer, self._driver.device)

    def _look_at(self, optimizer: Optimizer) -> tuple[bool, StepKind]:
        """Register the tensors that the step reads, so that the budget counts them.

        Returns:
            True if the memory that the step needs is predictable; and the kind of the step.
        """
        driver = self._driver
        predictable = _is_predictable(optimizer)
        saves = predictable and not driver.is_recorded
        are_plain, tensors = driver.begin_step(optimizer, saves=saves)
        with hidden():
            kind = kind_of_step(optimizer, driver.device, tensors)
        return predictable and are_plain, kind

    def _after(self, optimizer: Optimizer) -> None:
        """Finish the step, and store the bytes that it needed, to predict the next step."""
        begun, driver = self._begun, self._driver
        with driver.lock:
            driver.core.release_recompute_sources(driver.handle)
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
    """Return the numbers of evictions and recomputations, to see if a step caused any."""
    return numbers.evictions, numbers.recomputations


def _are_alone(optimizer: Optimizer) -> bool:
    """Return True if the optimizer has no step hooks except those of Rekindle."""
    before, after = hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks
    its_own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    # of the two hooks after steps, one belongs to `OptimizerSteps` and one to `_warm`
    return len(before) == 1 and len(after) == 2 and not its_own


def _is_predictable(optimizer: Optimizer) -> bool:
    """Return True if a dry run predicts the memory of the step, given plain tensors."""
    return type(optimizer) in PREDICTABLE and not any(
        group.get("differentiable") for group in optimizer.param_groups
    )
