"""`with rekindle.budget("6GiB"):` - open and close a budget around a program.

It starts the native core, which tracks storages and decides what to evict. It also installs hooks
(on modules, optimizers, threads, autograd) that report tensors to the core, and removes them at the
end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial, wraps
from inspect import iscoroutinefunction, isgeneratorfunction
from types import TracebackType
from typing import Literal, ParamSpec, TypeVar, final
from warnings import warn

import torch

from rekindle import _checks as checks
from rekindle._errors import OutOfBudget, Unsupported, beside
from rekindle.policies import Policy, Swap, policy_of
from rekindle.pytorch.context._ahead import look_ahead
from rekindle.pytorch.context._arguments import Arguments
from rekindle.pytorch.context._auto import is_auto, measured_again, resolved
from rekindle.pytorch.context._native_core import native_core_for
from rekindle.pytorch.context._processes import spawned_said
from rekindle.pytorch.context._run import Run
from rekindle.pytorch.context._threads import inherited
from rekindle.pytorch.devices import accelerator, is_accelerator, is_out_of_memory
from rekindle.pytorch.held import known_natively, lending_natively
from rekindle.pytorch.learned import NativeLearner, plans_for
from rekindle.pytorch.native import (
    NativeDriver,
    NativeRuntime,
    functions_recomputed,
    is_seen,
    random_states_counted,
    seen,
    seen_in_thread,
)
from rekindle.pytorch.online import (
    OptimizerSteps,
    device_of,
    handing_out_seen,
    lost_in,
    must_saves_seen,
    resizes_seen,
    short_form,
    trades_seen,
)

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
        cache: Keep learned plans in `~/.cache/rekindle` (or `REKINDLE_CACHE`) for later processes.
        arena: On a CPU, take PyTorch's memory from an arena that returns freed memory to the
            system, so that the process stays near the budget too. False leaves it to the C library.

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
    ) -> None:
        self._arguments = Arguments(
            amount, policy, device, record, learn, swap, swap_directory, evict, of, cache, arena
        )
        self._stack: ExitStack | None = None

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
                "rekindle.budget(...) inside rekindle.budget(...): a program has one budget. Leave "
                "the outer context first (if that is `rekindle run`: start the program with "
                "python), or give the outer one the smaller amount"
            )
        if _is_within_transform():
            raise Unsupported(
                "rekindle.budget(...) inside a torch.func transform (grad, vmap, jvp), which has "
                "no graph to recompute from. Enter the budget outside and use loss.backward()"
            )
        if self._stack is not None:
            raise Unsupported("this rekindle.budget(...) was entered before; write a new one")
        # Choose the device only now: since `__init__` the program may have started to use CUDA.
        device = accelerator.with_index(device_of(self._arguments.device))
        run, runtime = self._begin(device)
        with ExitStack() as stack:
            self._over: list[Callable[[], None]] = []
            self._watch(stack, run, runtime)
            self._stack = stack.pop_all()
        budget._active = self
        self._run, self._runtime = run, runtime
        if is_auto(resolved(self._arguments.amount)) and is_accelerator(device):
            measured_again(run, device)
        return run

    def _begin(self, device: torch.device) -> tuple[Run, NativeRuntime]:
        """Make the native core's objects for one budget, and its `Run`. It installs no hook."""
        given = self._arguments
        amount, host, policy = given.bytes_on(device), given.host(device), policy_of(given.policy)
        core = native_core_for(device)
        if device.type == "cpu":
            core.count_allocations()
        patient = given.learns_by_itself
        learns = (patient or given.asks_to_learn) and amount is not None
        driver = NativeDriver(
            core,
            amount,
            device,
            given.device is None,
            learns,
            given.lends,
            given.evict == "anything",
            None if host is None else host.copies(amount),
            policy,
        )
        core.use_arena(driver.handle, given.uses_arena(device))
        if given.of == "reserved" and is_accelerator(device):
            driver.keep_reserved()
        run = Run(driver, amount, policy, record=given.record)
        if learns and amount is not None:
            plans = plans_for(amount, device, cache=given.cache, patient=patient)
            learner = NativeLearner(driver, plans, wait=given.learn == "wait")
            run._learner = driver.watcher = learner
        return run, NativeRuntime(driver)

    def _watch(self, stack: ExitStack, run: Run, runtime: NativeRuntime) -> None:
        """Install the hooks of the budget; `stack` removes them."""
        driver = runtime.driver
        if driver.places is not None:
            driver.places.watch(stack)
        driver.owners.watch(stack)
        stack.enter_context(seen(driver))
        stack.enter_context(functions_recomputed(driver.core, driver.functions_kept))
        if self._arguments.lends or driver.anything:
            stack.enter_context(lending_natively(driver))
        stack.enter_context(handing_out_seen(driver.give_away))
        stack.enter_context(resizes_seen(driver.about_to_resize))
        stack.enter_context(trades_seen(driver.trading))
        if driver.device.type == "cpu":
            stack.enter_context(random_states_counted(driver))
        stack.enter_context(must_saves_seen(run.keep))
        steps = OptimizerSteps(runtime)
        for hook in steps.watch():
            stack.callback(hook.remove)
        stack.callback(steps.leave)
        stack.enter_context(inherited(is_seen, partial(self._in_thread, driver, steps)))
        stack.enter_context(spawned_said())
        stack.callback(_leave)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._stack is not None
        driver, run = self._runtime.driver, self._run
        try:
            with beside(error):
                try:
                    self._stack.close()
                finally:
                    for end in list(self._over):
                        end()
                    driver.close()
        finally:
            del self._runtime, self._run
        missed = driver.elsewhere() if error is None else None
        if missed is not None:
            warn(missed, stacklevel=2)
        if error is not None and is_out_of_memory(error) and not hasattr(error, "__notes__"):
            error.add_note(short_form(driver, run.budget))
        if isinstance(error, OutOfBudget):
            self._look_ahead(error, traceback, driver)
        if type(error) is RuntimeError:
            refused = lost_in(error, driver)
            if refused is not None:
                self._look_ahead(refused, traceback, driver)
                raise refused from error

    def _look_ahead(
        self, error: OutOfBudget, traceback: TracebackType | None, driver: NativeDriver
    ) -> None:
        given = self._arguments
        # The rehearsal only knows recomputation. With `evict="anything"` or `swap` steps need less
        # memory, so it would name too large a budget.
        if given.evict != "anything" and given.swap is None:
            device, policy = driver.device, policy_of(given.policy)
            active = lambda: budget._active is not None  # noqa: E731
            look_ahead(error, traceback, driver.owners, device, policy, active)

    @contextmanager
    def _in_thread(self, driver: NativeDriver, steps: OptimizerSteps) -> Iterator[None]:
        """Give a thread that the program started inside the budget the hooks of the budget."""
        its_steps = steps.of_this_thread()
        self._over.append(its_steps.over)
        try:
            with known_natively(driver.lending), seen_in_thread(driver):
                del driver, steps  # keep neither alive: this thread may outlive the budget
                yield
        finally:
            its_steps.leave()
            if its_steps.over in self._over:
                self._over.remove(its_steps.over)


def _is_within_transform() -> bool:
    """Return True inside a transform of `torch.func`.

    It reads a dispatch key, which costs nothing. Asking functorch for its interpreter would create
    thread-local state, which autograd copies at each node of every later backward pass.
    """
    front = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    return torch._C._dispatch_tls_is_dispatch_key_included(front)


_ARGUMENTS = fields(Arguments)


def _leave() -> None:
    budget._active = None


def _leave_in_child() -> None:
    """Leave the budget in a forked process, such as a `DataLoader` worker.

    The budget counts only the memory of the process that entered it.
    """
    active = budget._active
    if active is None or active._stack is None:
        return
    budget._active = None
    active._runtime.driver.lending = None  # the native core leaves in a fork handler of its own


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
