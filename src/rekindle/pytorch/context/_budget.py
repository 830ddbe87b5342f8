"""`with rekindle.budget("6GiB"):` - the context, and what it tells afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, fields, replace
from functools import partial, wraps
from inspect import iscoroutinefunction, isgeneratorfunction
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, final
from warnings import warn

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame as _dynamo
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes
from rekindle.engine import Engine
from rekindle.policies import Advised, Policy, Swap, policy_of
from rekindle.pytorch.context._arguments import Arguments
from rekindle.pytorch.context._report import report_of, swapped_by
from rekindle.pytorch.context._threads import Hooks, inherited
from rekindle.pytorch.held import Anything, Touching, anything
from rekindle.pytorch.learned import Learner, lessons_for
from rekindle.pytorch.online import (
    Capture,
    Driver,
    OptimizerSteps,
    Places,
    Runtime,
    Step,
    device_of,
    dispatch_modes,
    is_out_of_memory,
    lost_in,
    resizes_seen,
    short_form,
    trades_seen,
    unwatched,
)
from rekindle.pytorch.operators import operator, regions_shown, takes_itself_apart
from rekindle.report._data import Swapped
from rekindle.report._report import Report
from rekindle.schedule import Record, Recorder
from rekindle.trace import Trace

P = ParamSpec("P")
T = TypeVar("T")


class _Mode(TorchDispatchMode):
    """Hands every operator to the runtime. Views make no memory and pass."""

    supports_higher_order_operators = True

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime: Runtime | _Over = (
            runtime  #: or who stands in for it during an optimizer's step
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # by `_keep_dynamo_out` instead: the wrapper costs as much as all of a mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays so, and comes here as one operator (R12)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):
            return self.runtime.run_whole(func, args, kwargs or {})
        if types and any(map(takes_itself_apart, types)):  # a DTensor: its parts will come here
            return NotImplemented
        facts = operator(func)
        kwargs = kwargs or {}
        runtime = self.runtime
        driver = runtime.driver
        with unwatched():
            if driver.busy and driver.busy == get_ident():
                return facts.func(*args, **kwargs)
            if facts.view:
                if facts.resizes:
                    return runtime.set_memory(facts, args, kwargs)
                if facts.marks:
                    return runtime.mark(facts, args, kwargs)
                driver.meet(args[0])
                return facts.func(*args, **kwargs)
            return runtime.run(facts, args, kwargs)


@final
class _Over:
    """In the place of the runtime in the mode of a thread that outlives the budget."""

    busy = 0

    def __init__(self) -> None:
        self.driver = self

    def meet(self, tensor: object) -> None:
        pass

    def run(self, facts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return facts.func(*args, **kwargs)

    mark = set_memory = run_whole = run


def _keep_dynamo_out() -> None:
    """Inside compiled programs, what the runtime itself runs is not to be compiled."""
    skip = _dynamo._FrameAction.SKIP
    modes = (_Mode.__torch_dispatch__, Touching.__torch_dispatch__)
    for entry in (*modes, Runtime.pack, Runtime.unpack):
        strategy = _dynamo._FrameExecStrategy(skip, skip)  # this frame, and all below it
        _dynamo.set_code_exec_strategy(entry.__code__, strategy)


_keep_dynamo_out()


@final
class Run:
    """What one `rekindle.budget(...)` did so far; stays readable after the context."""

    def __init__(
        self, driver: Driver, budget: Bytes | None, policy: Policy, *, record: bool
    ) -> None:
        self.budget = budget
        self.policy = policy
        self._driver = driver
        driver.recorder = Recorder() if record else None
        driver.whole = driver.capture = Capture() if record else None
        driver.places = Places() if record else None
        self._learner: Learner | None = None
        self._part: Capture | None = None

    @property
    def peak(self) -> Bytes:
        """The most bytes in use at any moment, as counted by the runtime."""
        return self._driver.steps.peak

    @property
    def memory(self) -> Bytes:
        """Bytes in use now, as counted by the runtime."""
        with self._driver.lock:
            self._driver.settle()
        return self._driver.engine.memory

    @property
    def steps(self) -> int:
        """How many steps an optimizer has made."""
        return self._driver.steps.number

    @property
    def last_step(self) -> Step | None:
        """What happened from the optimizer's step before the last to the last one."""
        return self._driver.steps.last

    def begin_trace(self) -> None:
        """Writes down what happens from now on, up to `end_trace`: one step, say."""
        self._part = self._driver.also_capture()

    def end_trace(self) -> Trace:
        """What happened since `begin_trace`, for the simulator and the planners."""
        part, self._part = self._part, None
        if part is None:
            raise Unsupported("run.end_trace(): nothing was begun; write run.begin_trace() before")
        driver = self._driver
        with driver.lock:
            driver.settle()
            driver.poll()
            driver.capture_no_more()
        return part.trace()

    def on_step(self, listener: Callable[[Step], None]) -> None:
        """Calls `listener` after each step of an optimizer, with what happened since the last."""
        self._driver.steps.listeners.append(listener)

    def status(self) -> str:
        """One line: memory, budget, and what the last step cost. For a progress bar, say:
        `bar.set_postfix_str(run.status())`."""
        limit = "no limit" if self.budget is None else format_bytes(self.budget)
        memory = f"{format_bytes(self.memory)} of {limit}, peak {format_bytes(self.peak)}"
        step = self.last_step
        if step is None:
            lost = self.recompute_ns / self.compute_ns if self.compute_ns else 0.0
            return f"{memory}; so far: {_events(self.evictions, lost)}"
        return f"{memory}; step {step.number}: {_events(step.evictions, step.overhead)}"

    def __repr__(self) -> str:
        return f"<rekindle.Run: {self.status()}>"

    @property
    def evictions(self) -> int:
        """How often something was let go that somebody could still ask for."""
        return self._driver.evictions

    @property
    def recomputations(self) -> int:
        """How many operators ran again."""
        return self._driver.recomputations

    @property
    def compute_ns(self) -> Nanoseconds:
        """Time in operators that the program asked for, at their measured prices."""
        return self._driver.engine.compute_ns

    @property
    def recompute_ns(self) -> Nanoseconds:
        """Time lost to recomputation, at the operators' measured prices."""
        return self._driver.engine.recompute_ns

    @property
    def record(self) -> Record:
        """The run as data. With `budget(..., record=True)` it holds every action."""
        recorder = self._driver.recorder or Recorder()
        return Record(
            tuple(recorder.actions),
            tuple(recorder.clock),
            tuple(recorder.memory),
            self.budget,
            self.peak,
            self.compute_ns,
            self.recompute_ns,
            self.evictions,
            self.recomputations,
            repr(self.policy),
            *astuple(swapped_by(self._driver) or Swapped()),
        )

    @property
    def trace(self) -> Trace:
        """What the program did, for the simulator; needs `budget(..., record=True)`."""
        driver = self._driver
        if driver.whole is None:
            raise Unsupported(
                "run.trace: nothing was written down; write rekindle.budget(..., record=True)"
            )
        with driver.lock:
            driver.settle()
            driver.poll()
        return driver.whole.trace()

    @property
    def steps_followed(self) -> int:
        """How many steps went along a learned schedule from beginning to end."""
        return self._learner.followed if self._learner is not None else 0

    @property
    def steps_left(self) -> int:
        """How many steps began along a learned schedule and then did otherwise."""
        return self._learner.left if self._learner is not None else 0

    def wait_for_plan(self, timeout: float | None = None) -> bool:
        """Waits for the schedule that is being made, `timeout` seconds at most.

        Returns whether none is in the making any more. It is followed from the next step on.
        """
        return self._learner is None or self._learner.lessons.wait(timeout)

    def keep(self, tensor: Tensor) -> Tensor:
        """Never lets go of the memory of `tensor`; returns it."""
        self._driver.keep(tensor)
        return tensor

    def report(self) -> Report:
        """Peak and when, who held memory at the peak, evictions, recomputation, time lost.

        Print it, `.show()` it in color, save its `.to_html()` or `.to_json()`. With `record=True`
        it also has memory over time and, by module and line, who held it and what ran again.
        """
        driver = self._driver
        if driver.whole is None:
            report = report_of(driver, self.budget)
        else:
            report = report_of(driver, self.budget, self.trace, self.record)
        if self._learner is None:
            return report
        return replace(report, advice=(*report.advice, self._learner.told()))


def _events(evictions: int, lost: float) -> str:
    return f"{evictions} eviction{'s' * (evictions != 1)}, time lost {lost:.1%}"


@final
class budget:
    """Keeps everything run inside within an amount of memory, recomputing what does not fit.

    >>> with rekindle.budget("6GiB") as run:  # doctest: +SKIP
    ...     loss = model(batch)
    ...     loss.backward()
    ...     optimizer.step()

    amount: bytes, as an int or as text ("512MB", "6GiB"). Counted is every tensor that is made or
        seen inside: parameters, gradients, optimizer state, batches, activations. "auto": what
        tensors have of the device now and what is free, but for a margin of a tenth. None: no
        limit, only measured.
    policy: what to evict, one of `rekindle.policies`, or its name as on the command line ("dtr",
        "lru"); default `Thrifty()`.
    device: the device whose memory is meant; default: CUDA if it is in use when the context is
        entered, else the CPU. A program that moves to another one than that is stopped.
    record: keep every action in `run.record` (grows with the run), and where in the program each
        operator was, for `run.report()`.
    learn: follow a schedule made in the background once the same step was met twice. When it comes
        depends on time, and so does what is evicted, never what is computed; "wait" waits for it at
        the end of a step, so that the same events lead to the same decisions.

    evict: "saved" evicts what autograd alone holds, "anything" what your variables hold as well,
        with and without autograd; it is brought back when it is touched, and all of
        it is back at the end, when the budget is over. Needs torch 2.12. Not with `record` or
        `learn`.

    Raises `InvalidBudget` for what is no amount, `InvalidArgument` for what is no policy or device,
    `OutOfBudget` inside when the amount cannot be kept. Gradients, buffers and random numbers are
    bit-equal to a run without it. A context can be entered once, a copy of it again; contexts do
    not nest. As a decorator it is entered for each call.
    """

    _active: budget | None = None

    def __init__(
        self,
        amount: str | int | None,
        *,
        policy: Policy | type[Policy] | str | None = None,
        device: str | torch.device | None = None,
        record: bool = False,
        learn: bool | Literal["wait"] = False,
        swap: str | int | Swap | None = None,
        swap_directory: str | os.PathLike[str] | None = None,
        evict: Literal["saved", "anything"] = "saved",
    ) -> None:
        self._arguments = Arguments(
            amount, policy, device, record, learn, swap, swap_directory, evict
        )
        self._stack: ExitStack | None = None

    @classmethod
    def unlimited(cls, *, device: str | torch.device | None = None, record: bool = False) -> budget:
        """Without a limit: watches a program without changing what it does."""
        return cls(None, device=device, record=record)

    def copy(self) -> budget:
        """The same one, not entered yet."""
        return budget(**{each.name: getattr(self._arguments, each.name) for each in _ARGUMENTS})

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """As a decorator: each call of `function` runs within a budget of its own.

        The `run` of the last call is an attribute of what is returned.
        """
        if isgeneratorfunction(function) or iscoroutinefunction(function):
            raise Unsupported(
                f"@rekindle.budget(...) on {function.__qualname__}, which is over before what it "
                "yields or awaits runs: write `with rekindle.budget(...):` inside of it"
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
                "the outer context first, or give the outer one the smaller amount"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
            raise Unsupported(
                "rekindle.budget(...) inside a torch.func transform (grad, vmap, jvp), which has "
                "no graph to recompute from. Enter the budget outside and use loss.backward()"
            )
        if self._stack is not None:
            raise Unsupported("this rekindle.budget(...) was entered before; write a new one")
        given = self._arguments
        device = device_of(given.device)  # now: the program may have moved to CUDA meanwhile
        self._budget = given.bytes_on(device)
        host, policy = given.host(device), policy_of(given.policy)
        chosen = Advised(policy) if given.learn else policy
        if host is None:
            runtime = Runtime(Driver(Engine(self._budget, chosen), device))
        else:
            runtime = Runtime(host.driver(self._budget, chosen))
        runtime.driver.assumed = given.device is None
        run = Run(runtime.driver, self._budget, policy, record=given.record)
        if given.learn and self._budget is not None:
            lessons = lessons_for(self._budget, device)
            learner = Learner(runtime.driver, lessons, wait=given.learn == "wait")
            run._learner = runtime.driver.watcher = learner
        runtime.driver.below = dispatch_modes()
        runtime.driver.open()
        with ExitStack() as stack:
            mode = stack.enter_context(_Mode(runtime))
            held: Anything | None = None
            if given.evict == "anything":
                held = stack.enter_context(anything(runtime))
            hooks = runtime if held is None else held
            stack.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
            stack.enter_context(resizes_seen(runtime.driver))
            stack.enter_context(trades_seen(runtime.driver))
            stack.enter_context(regions_shown())
            runtime.driver.owners.watch(stack)
            steps = OptimizerSteps(runtime, mode)
            for hook in steps.watch():
                stack.callback(hook.remove)
            stack.callback(steps.leave)
            self._over: list[Callable[[], None]] = []
            in_thread = partial(self._in_thread, runtime, held, steps)
            stack.enter_context(inherited(partial(_is_inside, runtime), in_thread))
            if runtime.driver.places is not None:
                runtime.driver.places.watch(stack)
            stack.callback(_leave)
            self._stack = stack.pop_all()
        budget._active = self
        self._runtime = runtime
        return run

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._stack is not None
        driver = self._runtime.driver
        try:
            self._stack.close()
        finally:
            for end in list(self._over):
                end()
            driver.close()
            del self._runtime
        missed = driver.elsewhere() if error is None else None
        if missed is not None:
            warn(missed, stacklevel=2)
        if error is not None and is_out_of_memory(error) and not hasattr(error, "__notes__"):
            error.add_note(short_form(driver, self._budget))
        if type(error) is RuntimeError:
            refused = lost_in(error, driver)
            if refused is not None:
                raise refused from error
            for part, explanation in _REFUSED_BY_TORCH.items():
                if part in str(error):
                    raise Unsupported(explanation) from error

    @contextmanager
    def _in_thread(
        self, runtime: Runtime, held: Anything | None, steps: OptimizerSteps
    ) -> Iterator[None]:
        """For a thread that started inside: the same as in the one that entered."""
        hooks = Hooks(runtime if held is None else held)
        with ExitStack() as stack:
            mode = stack.enter_context(_Mode(runtime))
            touching = None if held is None else held.enter(stack)
            stack.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
            its_steps = steps.of_this_thread(mode)
            stack.callback(its_steps.leave)

            def over() -> None:
                its_steps.over()
                mode.runtime, hooks.within = _Over(), None
                if touching is not None:
                    touching.shells = None

            self._over.append(over)
            stack.callback(self._over.remove, over)
            del runtime, held, steps  # which this thread may outlive
            yield


def _is_inside(runtime: Runtime) -> bool:
    """Whether this thread is, and not amid an operator: there the modes are away."""
    modes = _get_current_dispatch_mode_stack()
    mine = any(type(mode) is _Mode and type(mode.runtime) is not _Over for mode in modes)
    return mine and not runtime.driver.lock._is_owned()  # type: ignore[attr-defined]


#: What PyTorch itself refuses under a budget: a part of its message, and what to do instead.
_REFUSED_BY_TORCH = {
    "support saved tensor hooks": (
        "a torch.func transform (grad, vjp, jacrev, hessian) inside rekindle.budget(...), "
        "which works by saved tensor hooks: those transforms have none. Use "
        "loss.backward() or torch.autograd.grad(...), or leave the budget for it"
    ),
}


_ARGUMENTS = fields(Arguments)


def _leave() -> None:
    budget._active = None


def _leave_in_child() -> None:
    """A process forked inside (a worker of a DataLoader) has memory of its own: it is outside."""
    active = budget._active
    if active is None or active._stack is None:
        return
    budget._active = None
    if any(type(mode) is _Mode for mode in _get_current_dispatch_mode_stack()):
        active._stack.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


@contextmanager
def never_recompute() -> Iterator[None]:
    """What is computed inside is kept in memory and never computed again.

    For operators whose result depends on more than their arguments. Has no effect outside a budget.
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
