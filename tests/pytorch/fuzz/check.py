"""A program run plainly and within budgets: what differs, and a shorter one that does too."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from rekindle import OutOfBudget, budget
from rekindle.pytorch import Run
from rekindle.pytorch._runtime import Runtime
from tests.pytorch.fuzz.program import Program, left_behind
from tests.pytorch.harsh import MOST_ATTEMPTS, differing
from tests.pytorch.tracker import Tracker

ROOMY = 1 << 30
MOST_SHORTENINGS = 400


def complaint(program: Program, tightness: float) -> str:
    """What is wrong with `program`, empty if nothing is.

    It runs plainly, then so that all that may be let go is let go before every operator, then
    within a budget. `tightness` 1.0: the smallest that is feasible; 0.0: the plain peak.
    """
    plain, _ = left_behind(program, nullcontext())
    tracker = Tracker()
    wanted, space = left_behind(program, tracker)
    if wanted["error"] != plain["error"]:
        wanted = plain  # foreach kernels do not count versions under a mode
    # Under any dispatch mode some derivatives (of `prod`, `cumprod`) have other formulas, with
    # other last bits; so values come from the run under a mode, all else from the one without.
    wanted["facts"] = plain["facts"]
    peak = tracker.peak
    space.clear()
    wanted["memory afterwards"] = _alive(tracker)
    if "detached in-place" in wanted["error"]:  # of no use with hooks: they have the graph at hand
        return ""
    with letting_go_of_everything():
        found = _complaint_within(program, ROOMY, wanted)
    if found is not None:
        return f"everything let go at once: {found}"
    nbytes = max(1, int(peak * (1 - tightness)))
    for _ in range(MOST_ATTEMPTS):
        try:
            found = _complaint_within(program, nbytes, wanted)
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


def _complaint_within(program: Program, nbytes: int, wanted: dict[str, Any]) -> str | None:
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
    plain = wanted["memory afterwards"]
    # Less is no complaint. After an unpack hook raised, PyTorch itself keeps parts of the graph.
    excused = plain or not left or got["error"]
    got["memory afterwards"] = plain if excused else left
    if got.keys() != wanted.keys():
        return f"other names: {sorted(got.keys() ^ wanted.keys())}, {got['error']!r}"
    names = differing(got, wanted)
    if names:
        told = ("error", "facts", "memory afterwards")
        which = [f"{name}: {wanted[name]!r} became {got[name]!r}" for name in names if name in told]
        return f"differing: {names} {'; '.join(which)}"
    if peak > nbytes:
        return f"the peak was {peak}"
    run = context.run
    assert run.memory >= 0
    if not left and list(run._driver.engine.storages):
        return f"bookkeeping stays: {list(run._driver.engine.storages)}"
    return None


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
