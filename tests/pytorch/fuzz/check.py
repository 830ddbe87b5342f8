"""A program run plainly and within budgets: what differs, and a shorter one that does too."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from rekindle import OutOfBudget, budget
from rekindle.pytorch import Run
from rekindle.pytorch._runtime import Runtime
from tests.pytorch.fuzz.program import NOTICED, Program, left_behind
from tests.pytorch.harsh import MOST_ATTEMPTS, differing
from tests.pytorch.tracker import Tracker

ROOMY = 1 << 30
MOST_SHORTENINGS = 400


#: What programs with it are excepted from; PyTorch's own errors are meant.
HOOKS = "saved-tensor hooks refuse a function's result that is written without them"
MODE = "as below a mode that does nothing, not as without one"
EXCHANGED = "after set_ or .data = an error for saved values that are unharmed: they are used"
PARTS = "a write to a part made by unsafe_chunk is noticed, which PyTorch does not"
VIEWS = "a write is noticed at another of the tensors that see it"


def complaint(program: Program, tightness: float, excepted: Counter[str] | None = None) -> str:
    """What is wrong with `program`, empty if nothing is; `excepted` counts what was not asked.

    It runs plainly, then so that all that may be let go is let go before every operator, then
    within a budget. `tightness` 1.0: the smallest that is feasible; 0.0: the plain peak.
    """
    plain, _ = left_behind(program, nullcontext())
    tracker = Tracker()
    below, space = left_behind(program, tracker)
    # Under any dispatch mode some derivatives (of `prod`, `cumprod`) have other formulas, with
    # other last bits, foreach kernels count no versions, and views made in inference mode are none.
    # Each thing is to be as in the run below a mode that does nothing, or as in the one without.
    wanted = (plain, below)
    peak = tracker.peak
    space.clear()
    plain["memory afterwards"] = below["memory afterwards"] = _alive(tracker)
    excepted = Counter() if excepted is None else excepted
    if any("detached in-place" in each["error"] for each in wanted):
        excepted[HOOKS] += 1
        return ""
    with letting_go_of_everything():
        found = _complaint_within(program, ROOMY, wanted, excepted)
    if found is not None:
        return f"everything let go at once: {found}"
    nbytes = max(1, int(peak * (1 - tightness)))
    for _ in range(MOST_ATTEMPTS):
        try:
            found = _complaint_within(program, nbytes, wanted, Counter())
        except OutOfBudget as error:
            if error.smallest_budget <= nbytes:
                return f"refused {nbytes} bytes and asked for {error.smallest_budget}"
            nbytes = error.smallest_budget
            continue
        return "" if found is None else f"rekindle.budget({nbytes}): {found}"
    return f"the smallest budget grew {MOST_ATTEMPTS} times, to {nbytes}"


class Watched:
    """A budget within a tracker."""

    def __init__(self, nbytes: int) -> None:
        self.tracker = Tracker()
        self._budget = budget(nbytes)

    def __enter__(self) -> Run:
        self.tracker.__enter__()
        try:
            self.run = self._budget.__enter__()
        except BaseException:
            self.tracker.__exit__(None, None, None)
            raise
        return self.run

    def __exit__(self, *raised: Any) -> None:
        try:
            self._budget.__exit__(*raised)
        finally:
            self.tracker.__exit__(*raised)


def _complaint_within(
    program: Program, nbytes: int, wanted: tuple[dict[str, Any], ...], excepted: Counter[str]
) -> str | None:
    context = Watched(nbytes)

    def enter(run: Run, space: dict[str, Any]) -> None:
        space["keep"] = run.keep

    try:
        got, space = left_behind(program, context, enter)
        context.run._driver.engine.check()
    except (AssertionError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    peak = context.tracker.peak
    space.clear()
    left = _alive(context.tracker)
    plain = wanted[0]["memory afterwards"]
    # Less is no complaint. After an unpack hook raised, PyTorch itself keeps parts of the graph.
    excused = plain or not left or got["error"]
    got["memory afterwards"] = plain if excused else left
    if reason := _excuse(program, got["error"], wanted[0]["error"]):
        excepted[reason] += 1
        return None
    same_names = [each for each in wanted if each.keys() == got.keys()]
    if not same_names:
        return f"other names: {sorted(got.keys() ^ wanted[0].keys())}, {got['error']!r}"
    names = set.intersection(*({*differing(got, each)} for each in same_names))
    if names:
        told = [name for name in ("error", "facts", "memory afterwards") if name in names]
        which = [f"{name}: {same_names[0][name]!r} became {got[name]!r}" for name in told]
        return f"differing: {sorted(names)} {'; '.join(which)}"
    excepted[MODE] += wanted[0].keys() != got.keys() or bool(differing(got, wanted[0]))
    if peak > nbytes:
        return f"the peak was {peak}"
    run = context.run
    assert run.memory >= 0
    if not left and list(run._driver.engine.storages):
        return f"bookkeeping stays: {list(run._driver.engine.storages)}"
    return None


def _excuse(program: Program, got: str, plain: str) -> str:
    """Why another error than PyTorch's, or none, is no complaint; empty if it is one."""
    if got == plain:
        return ""
    exchanged = any(word in line for line in program.step for word in (".set_(", ".data = "))
    if exchanged and not got and NOTICED in plain:
        return EXCHANGED
    if NOTICED in got and any("unsafe_chunk" in line for line in program.step):
        return PARTS
    return VIEWS if NOTICED in got and "is a view and its base or another" in plain else ""


def _alive(tracker: Tracker) -> int:
    """Bytes of what a program left. It may make cycles, also such as nobody can collect."""
    if tracker.alive:
        gc.collect()
    return tracker.alive


@contextmanager
def letting_go_of_everything() -> Iterator[None]:
    """Before each operator, and before autograd gets a value back, all that may be let go is."""
    run, unpack = Runtime.run, Runtime.unpack

    def evicting(method: Callable[..., Any]) -> Callable[..., Any]:
        def evict_first(self: Runtime, *args: Any) -> Any:
            with self.driver.lock:
                self.driver.settle()
                self.driver.poll()
                self.driver.perform(self.driver.engine.shrink(-1))
            return method(self, *args)

        return evict_first

    Runtime.run, Runtime.unpack = evicting(run), evicting(unpack)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Runtime.run, Runtime.unpack = run, unpack  # type: ignore[method-assign]


def shortened(program: Program, wrong: Callable[[Program], bool]) -> Program:
    """`program` without the lines that it can do without and still be wrong."""
    tries = 0
    size = max(1, len(program.step) // 2)
    while size:
        start = len(program.step) - size
        while start >= 0 and tries < MOST_SHORTENINGS:
            tries += 1
            candidate = replace(program, step=program.step[:start] + program.step[start + size :])
            if wrong(candidate):
                program = candidate
            start -= size
        size //= 2
    return program


def report(program: Program, tightness: float) -> str:
    """A shorter program that is wrong too, as a script, and what is wrong with it."""
    short = shortened(program, lambda candidate: bool(complaint(candidate, tightness)))
    return f"{complaint(short, tightness)}\n\n{short.source()}\n\ntightness {tightness}\n"
