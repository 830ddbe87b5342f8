"""Compare a program in plain PyTorch with the same program within a budget.

A mode is the settings of the budget (`modes`).
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.fuzz.program import NOTICED
from tests.pytorch.harsh import Watch, everything
from tests.pytorch.hunt import kit
from tests.pytorch.hunt.loop import Loop
from tests.pytorch.hunt.modes import ROOMY, Contexts, Mode, TooLong

MOST_ATTEMPTS = 100
MOST_AGAIN = 6
PERIOD = 6
#: Operators that are not interrupted, because they allocate nothing, or because the program may
#: catch the OutOfBudget that they raise.
NEVER_FAIL = (
    "aten.detach.default",
    "aten.view.default",
    "aten.t.default",
    "aten.alias.default",
    "aten.empty.memory_format",
)


@dataclass
class Left:
    """Copies of the results that a run of a program left behind."""

    found: dict[str, Any]
    error: BaseException | None
    contexts: Contexts
    peak: int = 0
    alive: int = 0
    dispatched: int = 0
    operators: list[tuple[str, int]] = field(default_factory=list)


def collect_little() -> None:
    """Collect garbage after every run, except objects that existed before."""
    import_module("torch._dynamo")  # creating the first optimizer would import it later
    gc.collect()
    gc.freeze()


@contextmanager
def _own_dispatch_keys() -> Iterator[None]:
    """Free the exceptions raised inside, so that the thread's dispatch keys are unchanged.

    While PyTorch prints a tensor, it holds a dispatch-key guard. After an error, the frames of the
    traceback keep that guard alive. If the guard ends later than a `torch.inference_mode()` around
    it, the thread has no autograd from then on.
    """
    sets = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*sets):
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise


def run_program(source: str, contexts: Contexts, *, tracked: bool = False) -> Left:
    """Run the program `source` and return its results, also if it raises an error.

    Args:
        source: The text of the program.
        contexts: Defines the names `budget`, `planned` and `mark` for the program.
        tracked: True to measure memory by a dispatch mode around the program.

    Raises:
        OutOfBudget: The budget of the program is too small.
    """
    log: list[Any] = []

    def note(*values: Any) -> None:
        log.append([_noted(value) for value in values])

    space: dict[str, Any] = {name: value for name, value in vars(kit).items() if name[0] != "_"}
    given = {**space, "note": note, "mark": contexts.mark, "__name__": kit.__name__}
    given |= {"budget": contexts.budget, "planned": contexts.planned}
    space = dict(given)
    kit.counts.clear()
    error: BaseException | None = None
    tracker = Watch()
    code = compile(source, "<loop>", "exec")
    try:
        with _own_dispatch_keys():
            if tracked:
                with tracker:
                    exec(code, space)
                    gc.collect()
            else:
                exec(code, space)
    except rekindle.OutOfBudget:
        # An unfinished autograd graph holds the program's hooks, whose globals hold the graph.
        # Python's collector does not see this cycle.
        space.clear()
        raise
    except Exception as raised:
        error = raised
    alive = tracker.alive
    results = {
        name: _contents(value)
        for name, value in sorted(space.items())
        if name not in given and isinstance(value, (Tensor, nn.Module, list, dict, tuple, *_STATED))
    }
    try:
        found = everything(results)
    except RuntimeError as unreadable:  # a result is evicted and cannot be recomputed
        found, error = {}, unreadable
    found["log"] = log
    found["error"] = "" if error is None else f"{type(error).__name__}: {_start(error)}"
    order = space["trip"].order if "trip" in space else []
    dispatched = tracker.operators.total()
    return Left(found, error, contexts, tracker.peak, alive, dispatched, order)


_STATED = (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)


def _contents(value: Any) -> Any:
    if isinstance(value, _STATED):
        return {k: v for k, v in value.state_dict().items() if not callable(v)}
    if isinstance(value, nn.Module):
        kept = {
            f"{where}.{name}": each
            for where, module in value.named_modules()
            for name, each in vars(module).items()
            if isinstance(each, Tensor)
        }
        return [value, kept]
    if isinstance(value, (list, tuple)):
        return [
            _contents(each) for each in value if isinstance(each, (Tensor, list, tuple, *_STATED))
        ]
    if isinstance(value, dict):
        return {str(k): _contents(v) for k, v in value.items() if isinstance(v, Tensor)}
    return value


def _noted(value: Any) -> Any:
    """Copy a tensor as it is now, because the program may overwrite it later."""
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.detach().clone().as_subclass(Tensor)
    return str(plain.dtype), tuple(plain.shape), plain.view(-1).view(torch.uint8).numpy().tobytes()


def _start(error: BaseException) -> str:
    text = str(error)
    return NOTICED if NOTICED in text else text.split("\n")[0]


class Plain:
    """The results of two or three runs in plain PyTorch.

    `first` ran without a dispatch mode, `below` within one that only measures memory. `determined`
    is True if the program gives equal results each time.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.first = run_program(source, Contexts(None))
        self.below = run_program(source, Contexts(None), tracked=True)
        self.peak, self.constants = self.below.peak, self.below.alive
        self.operators = self.below.dispatched
        self.determined = True
        if differing(self.first.found, self.below.found):
            again = run_program(source, Contexts(None))
            self.determined = not differing(self.first.found, again.found)

    @property
    def error(self) -> str:
        return self.first.found["error"]

    def differing(self, got: Left) -> tuple[list[str], bool]:
        """Return the names of the results in `got` that plain PyTorch does not give.

        The second value is True if the results equal those of plain PyTorch only within a dispatch
        mode that does nothing. Then no names are returned.
        """
        names = differing(got.found, self.first.found)
        if names and not differing(got.found, self.below.found):
            return [], True
        # A loop may enter the budget for a part of its steps only, so compare with a run that has
        # the mode active for that part.
        if names:
            within = run_program(self.source, Contexts(None, below=True))
            if not differing(got.found, within.found):
                return [], True
        return names, False


@dataclass(frozen=True)
class Complaint:
    """A failure of a program in a mode.

    If `excepted` is True, it is not reported: PyTorch gives the same results within a dispatch mode
    that does nothing, or the run took too long, or the network cannot be planned.
    """

    mode: str
    amount: int
    text: str
    excepted: bool = False


def complaint(source: str, plain: Plain, mode: Mode, tightness: float) -> Complaint | None:
    """Run the program `source` in `mode`. Return the complaint about the run, or None.

    `tightness` sets the budget of a tight mode: 0.0 is the memory peak of plain PyTorch, 1.0 is the
    memory that the program keeps at its end. If that is too small, the smallest budget that works
    is used.
    """
    amount = ROOMY
    if mode.amount == "tight":
        amount = max(1, plain.constants + int((plain.peak - plain.constants) * (1 - tightness)))
    for attempt in range(MOST_ATTEMPTS):
        contexts = Contexts(mode, amount)
        contexts.most_operators = MOST_AGAIN * plain.operators
        try:
            with mode.around():
                got = run_program(source, contexts)
        except TooLong:
            return Complaint(mode.name, amount, "given up", excepted=True)
        except rekindle.OutOfBudget as error:
            if mode.amount == "roomy":
                return Complaint(mode.name, amount, f"OutOfBudget: {error}")
            if contexts.peak > amount and not mode.planned:
                return Complaint(mode.name, amount, f"refused, with a peak of {contexts.peak}")
            if error.smallest_budget <= amount:
                return Complaint(
                    mode.name, amount, f"refused, and asked for {error.smallest_budget}"
                )
            amount = max(error.smallest_budget, int(amount * 1.05) if attempt > 5 else 0)
            continue
        return _compared(got, plain, mode, amount)
    return Complaint(mode.name, amount, f"the smallest budget grew {MOST_ATTEMPTS} times")


#: Errors of `rekindle.plan`; the second is for models that run only without a plan.
NO_PLAN = (rekindle.Unsupported, rekindle.InvalidArgument)


def _compared(got: Left, plain: Plain, mode: Mode, amount: int) -> Complaint | None:
    if mode.planned and isinstance(got.error, NO_PLAN):
        return Complaint(mode.name, amount, "no plan", excepted=True)
    names, excepted = plain.differing(got)
    if names:
        reported = [name for name in ("error",) if name in names]
        which = [
            f"{name}: {plain.first.found[name]!r} became {got.found[name]!r}" for name in reported
        ]
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        return Complaint(mode.name, amount, f"differing: {names[:6]}{more} {'; '.join(which)}")
    if got.contexts.peak > amount:
        return Complaint(mode.name, amount, f"the peak was {got.contexts.peak}")
    for run in got.contexts.runs:
        try:
            run._driver.engine.check()
        except AssertionError as error:
            return Complaint(mode.name, amount, f"the engine's check: {error!r}")
    if excepted:
        return Complaint(mode.name, amount, "as below a mode that does nothing", excepted=True)
    return None


def growth(loop: Loop, mode: Mode) -> Complaint | None:
    """Return a complaint if bookkeeping grows with each step, and plain PyTorch's memory does not.

    Each step is compared with the step `PERIOD` steps earlier, which has inputs of the same size:
    sizes repeat after one, two or three steps. Chains of values that a program carries from step
    to step may be `PERIOD` calls long.
    """
    source = replace(loop, steps=PERIOD * 3).source()
    plain = [run_program(replace(loop, steps=n).source(), Contexts(None), tracked=True).alive
             for n in (PERIOD, PERIOD * 2)]  # fmt: skip
    if plain[0] != plain[1]:  # the program itself keeps something of every step
        return None
    contexts = Contexts(mode, ROOMY, counting=True)
    with mode.around(), cores.short_memory(PERIOD):
        run_program(source, contexts)
    marks = contexts.marks
    if len(marks) < PERIOD * 3:
        return None
    for kind, name in enumerate(("storages", "bytes")):
        seen = [mark[kind] for mark in marks]
        if all(seen[i] > seen[i - PERIOD] for i in range(PERIOD, PERIOD * 3)):
            return Complaint(mode.name, ROOMY, f"{name} grow with every step: {seen}")
    return None


def chosen(loop: Loop) -> Loop:
    """Return `loop` with the number of the operator to interrupt, if one is to be interrupted."""
    if not loop.interrupted or loop.trip is not None:
        return loop
    order = run_program(loop.source(), Contexts(None)).operators
    order = [each for each in order if each[0] not in NEVER_FAIL]
    if not order:
        return replace(loop, interrupted=False)
    return replace(loop, trip=Random(loop.seed).choice(order))
