"""`with rekindle.budget("6GiB"):` - open and close a budget around a program.

It starts the native core, which tracks storages and decides what to evict. It also installs hooks
(on modules, optimizers, threads, autograd) that report tensors to the core, and removes them at the
end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import fields
from functools import partial, wraps
from inspect import iscoroutinefunction, isgeneratorfunction
from types import TracebackType
from typing import Literal, ParamSpec, TypeVar, final
from warnings import warn

import torch

from rekindle import _checks as checks
from rekindle._errors import OutOfBudget, Unsupported, notes_added_to
from rekindle._interrupts import DeferredInterrupts
from rekindle._types import Bytes
from rekindle.policies import Policy, Swap, policy_of
from rekindle.pytorch.context._ahead import look_ahead
from rekindle.pytorch.context._arguments import Arguments
from rekindle.pytorch.context._auto import measured_again
from rekindle.pytorch.context._native_core import native_core_for
from rekindle.pytorch.context._out_of_memory import lost_in, short_form
from rekindle.pytorch.context._processes import spawn_warns
from rekindle.pytorch.context._run import Run
from rekindle.pytorch.context._threads import inherited
from rekindle.pytorch.devices import accelerator, is_accelerator, is_out_of_memory
from rekindle.pytorch.held import held_evicted, thread_registered
from rekindle.pytorch.learned import Learner, plans_for
from rekindle.pytorch.native import (
    Driver,
    Runtime,
    functions_recomputed,
    interrupts_kept,
    is_seen,
    random_states_counted,
    seen,
    seen_in_thread,
    workspaces_kept,
)
from rekindle.pytorch.online import (
    device_of,
    handing_out_seen,
    must_saves_seen,
    reset_interrupted,
    resizes_seen,
    trades_seen,
)
from rekindle.pytorch.optimizers import OptimizerSteps

P = ParamSpec("P")
T = TypeVar("T")


@final
class budget:
    """Keep everything that runs inside within a memory budget; recompute what does not fit.

    Losses, gradients, buffers and random numbers equal those of a run without a budget, bit for
    bit. Use it as a context or as a decorator, around one step or around the whole loop. A
    context is entered once (`copy()` makes another one), and budgets do not nest.

    Args:
        amount: The budget in bytes: an int, or text with a unit ("512MB", "6GiB"). It counts every
            tensor that is made or used inside: parameters, gradients, optimizer state, batches,
            activations. "auto" takes the memory that the device has for tensors, less a tenth, or
            the amount in the environment variable `REKINDLE_BUDGET`. None measures without a limit.
        policy: Selects the storage to evict: one of `rekindle.policies`, or its name ("dtr",
            "lru"). Default: `Thrifty()`.
        device: The device whose memory is limited. Default: CUDA if the program uses it, else the
            CPU. A program that moves to another device is stopped.
        record: Keep every action in `run.record` and the source line of every operator. Memory for
            this grows with the run.
        learn: Plan steps that repeat, in a background process. "auto" begins after a dozen similar
            steps, if the extra `plan` is installed and `record` is off. True begins at once. "wait"
            begins at once and waits for each plan, so that runs are reproducible. False never
            plans. Plans change what is evicted, never what is computed.
        swap: Also copy values to host memory when that is quicker than recomputing them: the most
            bytes of host memory to use, or a `rekindle.policies.Swap`.
        swap_directory: The directory of the swap file on a CPU. Default: `$TMPDIR`, else
            `/var/tmp`.
        evict: Which tensors may be evicted. "saved": those that only autograd holds. "auto": also
            those that your variables hold, if nothing else is left and they were computed with grad
            mode on. "anything": also those that your variables hold, at any time. An evicted tensor
            is recomputed when something reads it, and all of them at the end. With `swap`, or
            before torch 2.12, "auto" means "saved", and "anything" is refused.
        of: On CUDA, the bytes that the amount limits. "allocated": those that tensors have.
            "reserved": those that PyTorch's allocator takes from the device, as `nvidia-smi` shows.
            Free pieces between tensors count then, so a little more is evicted. Small tensors and
            the first step may exceed the budget by some MiB. On a CPU it changes nothing.
        cache: Keep learned plans, and on a CPU the workspaces of operators, in `~/.cache/rekindle`
            (or `REKINDLE_CACHE`) for later processes.
        arena: On a CPU, take PyTorch's memory from an arena that returns freed memory to the
            system, so that the process stays near the budget too. False leaves it to the C library.
        split: What happens if an operator does not fit as a whole. "equal": on a CPU, it runs in
            slices where that gives the same bits, with `evict="anything"`, and with `evict="auto"`
            without `swap`. So a budget can be smaller than the scores of a large vocabulary.
            "never": `OutOfBudget`.

    Raises:
        InvalidBudget: `amount` is not an amount of bytes.
        InvalidArgument: Another argument is not one of the accepted values.
        OutOfBudget: Inside, an operator does not fit even after everything else was evicted.
        Unsupported: The budget is entered inside another one or inside a `torch.func` transform,
            on a device other than the CPU and CUDA, or where there is no native core.

    Example:
        ```python
        with rekindle.budget("6GiB") as run:
            loss = model(batch)
            loss.backward()
            optimizer.step()
        print(run.report())
        ```
    """

    _active: budget | None = None

    def __init__(
        self,
        amount: str | int | None,
        *,
        policy: Policy | type[Policy] | str | None = None,
        device: str | torch.device | None = None,
        record: bool = False,
        learn: bool | Literal["auto", "wait"] = "auto",
        swap: str | int | Swap | None = None,
        swap_directory: str | os.PathLike[str] | None = None,
        evict: Literal["saved", "auto", "anything"] = "auto",
        of: Literal["allocated", "reserved"] = "allocated",
        cache: bool = True,
        arena: bool = True,
        split: Literal["equal", "never"] = "equal",
    ) -> None:
        self._arguments = Arguments(
            amount,
            policy,
            device,
            record,
            learn,
            swap,
            swap_directory,
            evict,
            of,
            cache,
            arena,
            split,
        )
        self._stack: ExitStack | None = None  # not None while the budget is active
        self._used = False
        self._interrupts = DeferredInterrupts()

    @classmethod
    def unlimited(
        cls,
        *,
        device: str | torch.device | None = None,
        record: bool = False,
    ) -> budget:
        """Watch a program without a limit; the same as `budget(None)`.

        Args:
            device: As for `budget`.
            record: As for `budget`.

        Returns:
            A budget that evicts nothing and measures the peak.
        """
        return cls(None, device=device, record=record)

    def copy(self) -> budget:
        """Return an equal budget that has not been entered."""
        return budget(**{each.name: getattr(self._arguments, each.name) for each in _ARGUMENTS})

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate `function`: each call runs within a budget of its own.

        Args:
            function: The function to run within the budget; neither a generator nor a coroutine.

        Returns:
            The decorated function. Its attribute `run` is the `Run` of the last call.
        """
        checks.kind(function, Callable, "a function", "rekindle.budget(...)({})", "train")
        if isgeneratorfunction(function) or iscoroutinefunction(function):
            raise Unsupported(
                f"@rekindle.budget(...) on {function.__qualname__}: got a generator function or a "
                "coroutine function, whose call returns before its body runs; write "
                "`with rekindle.budget(...):` inside it"
            )

        @wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.copy() as within.run:  # type: ignore[attr-defined]
                return function(*args, **kwargs)

        within.run = None  # type: ignore[attr-defined]
        return within

    def __enter__(self) -> Run:
        if budget._active is not None:
            raise Unsupported(
                "rekindle.budget(...) inside rekindle.budget(...): a program has one budget at a "
                "time. Leave the outer budget first (if `rekindle run` made it, start the "
                "program with python), or give the smaller size to the outer budget"
            )
        if _is_within_transform():
            raise Unsupported(
                "rekindle.budget(...) inside a torch.func transform (grad, vmap, jvp): the "
                "transform keeps no autograd graph from which values could be recomputed. Enter "
                "the budget outside of the transform, and use loss.backward()"
            )
        if self._used:
            raise Unsupported(
                "this rekindle.budget(...) was already entered, and a budget can be entered "
                "once; write a new rekindle.budget(...)"
            )
        # Choose the device only now, when the budget is entered: since `__init__` the program may
        # have started to use CUDA.
        device = accelerator.with_index(device_of(self._arguments.device))
        limit = self._arguments.limit
        run, runtime = self._make(device, None if limit is None else limit.on(device))
        self._interrupts.begin()
        try:
            with ExitStack() as stack:
                for part in self._parts(run, runtime):
                    stack.enter_context(part)
                if limit is not None and limit.is_measured and is_accelerator(device):
                    measured_again(run, device)
                self._stack, self._used = stack.pop_all(), True
        finally:
            self._raise_interrupt()
        return run

    def _raise_interrupt(self) -> None:
        """Raise the interrupt that came while the budget was entered, and leave the budget."""
        try:
            self._interrupts.end()
        except BaseException:
            stack, self._stack = self._stack, None
            if stack is not None:
                stack.close()
            raise

    def _make(self, device: torch.device, amount: Bytes | None) -> tuple[Run, Runtime]:
        """Make the native core's objects for one budget, and its `Run`. Install no hook."""
        given = self._arguments
        host, policy = given.host(device), policy_of(given.policy)
        core = native_core_for(device)
        if device.type == "cpu":
            core.count_allocations()
        patient = given.learns_by_itself
        learns = (patient or given.asks_to_learn) and amount is not None
        copies = None if host is None else host.copies(amount)
        driver = Driver(
            core,
            amount,
            device,
            given.device is None,
            learns,
            given.evicts_held_last,
            given.evict == "anything",
            copies,
            policy,
        )
        core.uses_arena(driver.handle, given.uses_arena(device))
        core.slices(driver.handle, given.runs_in_slices(device))
        if given.of == "reserved" and is_accelerator(device):
            driver.core.keep_reserved(driver.handle)
        run = Run(driver, policy, record=given.record)
        if learns and amount is not None:
            swap = None if copies is None or copies[1].only else copies[1]
            plans = plans_for(amount, device, cache=given.cache, patient=patient, swap=swap)
            learner = Learner(driver, plans, wait=given.learn == "wait")
            run._learner = driver.watcher = learner
        return run, Runtime(driver)

    def _parts(self, run: Run, runtime: Runtime) -> Iterator[AbstractContextManager[object]]:
        """Yield the parts of an active budget as context managers, in the order to enter them.

        They exit in the reverse order, also if entering a later part fails. Each part removes the
        hooks and replaced functions that it has installed.
        """
        driver, steps = runtime.driver, OptimizerSteps(runtime)
        yield interrupts_kept(driver.core)
        # This part exits late. Closing the driver restores the program's evicted tensors, and
        # hooks of the other parts must not observe this.
        yield closing(driver)
        if driver.device.type == "cpu" and self._arguments.cache:
            yield workspaces_kept(driver.core)
        # Enter this part before the operators of the thread are seen. Then the source line and the
        # model are known for every operator that the native core sees.
        if driver.places is not None:
            yield driver.places.watch()
        yield driver.owners.watch()
        # From here on the native core sees the operators of this thread.
        yield seen(driver)
        yield functions_recomputed(driver.core, driver.functions_kept, driver.register_tensors)
        # Enter this part before the others that replace functions of PyTorch. Some of them call the
        # functions that this part replaces, which restore evicted memory.
        if self._arguments.evicts_held_last or driver.anything:
            yield held_evicted(driver)
        yield handing_out_seen(driver)
        yield resizes_seen(driver.about_to_resize)
        yield driver.interrupted.watch()
        yield trades_seen(driver.trading)
        if driver.device.type == "cpu":
            yield random_states_counted(driver)
        yield must_saves_seen(run.keep)
        # Enter this part after the parts that record places and restore memory, because the hooks
        # on optimizer steps use them.
        yield steps.watch()
        # Enter this part after the hooks on optimizer steps: a new thread handles its own steps
        # (`_in_thread`).
        yield inherited(is_seen, partial(self._in_thread, driver, steps))
        yield spawn_warns()
        # The last part exits first. Code that runs while the other parts exit is outside of the
        # budget.
        yield self._active_with(run, runtime)

    @contextmanager
    def _active_with(self, run: Run, runtime: Runtime) -> Iterator[None]:
        """Make this the active budget of the process inside the block."""
        self._run, self._runtime = run, runtime
        budget._active = self
        try:
            yield
        finally:
            budget._active = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._stack is None:
            raise Unsupported(
                "rekindle.budget(...).__exit__: this budget was not entered, or has ended. Call "
                "__exit__ of the object whose __enter__ was called, or write "
                "with rekindle.budget(...) as run:"
            )
        while True:
            try:
                self._interrupts.begin()
                break
            except KeyboardInterrupt:  # it comes again at the end
                self._interrupts.came = True
        driver, run, stack = self._runtime.driver, self._run, self._stack
        try:
            with notes_added_to(error):
                stack.close()
        finally:
            del self._runtime, self._run
            self._stack = None
            self._interrupts.end()
        missed = driver.elsewhere() if error is None else None
        if missed is not None:
            warn(missed, stacklevel=2)
        if error is not None and is_out_of_memory(error) and not hasattr(error, "__notes__"):
            error.add_note(short_form(driver, run.budget))
        if driver.refused is not None and error is not None:
            with notes_added_to(error):
                reset_interrupted()
        if isinstance(error, OutOfBudget):
            self._look_ahead(error, traceback, driver)
        if type(error) is RuntimeError:
            refused = lost_in(error, driver)
            if refused is not None:
                self._look_ahead(refused, traceback, driver)
                raise refused from error

    def _look_ahead(
        self, error: OutOfBudget, traceback: TracebackType | None, driver: Driver
    ) -> None:
        given = self._arguments
        moves = driver.moves_state
        # `look_ahead` finds a budget to suggest by a rehearsal. It simulates recomputation only, or
        # finds the need of steps whose state moves. With `evict="anything"` or `swap` alone, steps
        # need less memory than with recomputation, so it would name too large a budget.
        if moves or (given.evict != "anything" and given.swap is None):
            device, policy = driver.device, policy_of(given.policy)
            active = lambda: budget._active is not None  # noqa: E731
            look_ahead(error, traceback, driver.owners, device, policy, active, moves=moves)

    @contextmanager
    def _in_thread(self, driver: Driver, steps: OptimizerSteps) -> Iterator[None]:
        """Install the budget's hooks in a thread that the program started inside the budget."""
        its_steps = steps.of_this_thread()
        try:
            with thread_registered(driver.held), seen_in_thread(driver):
                del driver, steps  # Keep no references to the budget: this thread may outlive it.
                yield
        finally:
            its_steps.leave()


def _is_within_transform() -> bool:
    """Return True inside a transform of `torch.func`.

    The check reads a dispatch key, which costs nothing. Asking functorch for its interpreter would
    create thread-local state, which autograd copies at each node of every later backward pass.
    """
    front = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    return torch._C._dispatch_tls_is_dispatch_key_included(front)


_ARGUMENTS = fields(Arguments)


def _leave_in_child() -> None:
    """Leave the budget in a forked process, such as a `DataLoader` worker.

    The budget counts only the memory of the process that entered it.
    """
    active = budget._active
    if active is None or active._stack is None:
        return
    budget._active = None
    # The native core leaves the budget in a fork handler of its own.
    active._runtime.driver.held = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


@contextmanager
def never_recompute() -> Iterator[None]:
    """Keep everything that is computed inside this context in memory.

    Use it for operators whose result depends on more than their arguments. Outside a budget it
    has no effect.
    """
    active = budget._active
    if active is None:
        yield
        return
    runtime = active._runtime
    runtime.never_recompute += 1
    try:
        yield
    finally:
        runtime.never_recompute -= 1
