"""Compare a program in plain PyTorch with the same program within budgets.

A program that fails is shortened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from rekindle import OutOfBudget, Run, budget
from tests.pytorch import cores
from tests.pytorch.fuzz.program import Program, left_behind
from tests.pytorch.fuzz.wanted import Wanted, alive
from tests.pytorch.harsh import MOST_ATTEMPTS
from tests.pytorch.tracker import Tracker

Evict = Literal["saved", "auto", "anything"]
ROOMY = 1 << 30
MOST_SHORTENINGS = 400


def complaint(
    program: Program,
    tightness: float,
    excepted: Counter[str] | None = None,
    *,
    evict: Evict = "auto",
) -> str:
    """Compare three runs of `program`. Return the complaint about them, or "".

    The program runs in plain PyTorch, then with everything evicted before every operator, and then
    within a budget.

    Args:
        program: The program to run.
        tightness: 1.0 for the smallest budget that works, 0.0 for the memory peak of plain PyTorch.
        excepted: Gets the number of differences that are no complaint, by reason (`wanted`).
        evict: The argument of `rekindle.budget`.
    """
    wanted = Wanted(program)
    excepted = Counter() if excepted is None else excepted
    with evicting_before_every_operator():
        found = _complaint_within(program, Watched(ROOMY, evict), wanted, excepted)
    if found is not None:
        return f"everything let go at once: {found}"
    nbytes = max(1, int(wanted.peak * (1 - tightness)))
    for _ in range(MOST_ATTEMPTS):
        try:
            found = _complaint_within(program, Watched(nbytes, evict), wanted, Counter())
        except OutOfBudget as error:
            if error.smallest_budget <= nbytes:
                return f"refused {nbytes} bytes and asked for {error.smallest_budget}"
            nbytes = error.smallest_budget
            continue
        return "" if found is None else f"rekindle.budget({nbytes}): {found}"
    return f"the smallest budget grew {MOST_ATTEMPTS} times, to {nbytes}"


class Watched:
    """A budget whose memory a tracker measures independently."""

    def __init__(self, nbytes: int, evict: Evict = "auto") -> None:
        self.tracker = Tracker(resized=True)
        self.nbytes = nbytes
        self.peak = 0  #: the peak before the end of the budget, which recomputes evicted values
        self._budget = budget(f"{nbytes}B", evict=evict)

    def __enter__(self) -> Run:
        self.tracker.__enter__()
        try:
            self.run = self._budget.__enter__()
        except BaseException:
            self.tracker.__exit__(None, None, None)
            raise
        return self.run

    def __exit__(self, *raised: Any) -> None:
        self.peak = self.tracker.peak
        try:
            self._budget.__exit__(*raised)
        finally:
            self.tracker.__exit__(*raised)


def _complaint_within(
    program: Program, context: Watched, wanted: Wanted, excepted: Counter[str]
) -> str | None:
    def enter(run: Run, space: dict[str, Any]) -> None:
        space["keep"] = run.keep

    try:
        got, space = left_behind(program, context, enter)
        context.run._driver.engine.check()
    except OutOfBudget:
        raise
    # the error may also come from the end of the budget
    except (AssertionError, KeyError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    space.clear()
    left = alive(context.tracker)
    names, reason = wanted.differing(got)
    if names:
        reported = [name for name in ("error", "facts") if name in names]
        which = [f"{name}: {wanted.plain[name]!r} became {got[name]!r}" for name in reported]
        return f"differing: {names} {'; '.join(which)}"
    excepted[reason] += bool(reason)
    # Not a complaint: less memory in use than in plain PyTorch, or any amount after an error. After
    # an unpack hook raised, PyTorch itself keeps parts of the graph.
    if left and not wanted.memory_afterwards and not got["error"]:
        return f"{left} bytes stay"
    if context.peak > context.nbytes:
        return f"the peak was {context.peak}"
    run = context.run
    assert run.memory >= 0
    if not left and list(run._driver.engine.storages):
        return f"bookkeeping stays: {list(run._driver.engine.storages)}"
    return None


@contextmanager
def evicting_before_every_operator() -> Iterator[None]:
    """Evict all that may be evicted, before each operator and before autograd unpacks a value."""
    cores.tune(lambda driver: driver.core.evict_before_every_op(driver.handle, True))
    try:
        yield
    finally:
        cores.tune_no_more()


def shortened(program: Program, wrong: Callable[[Program], bool]) -> Program:
    """Return `program` without the lines that are not needed to make it fail."""
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


def report(program: Program, tightness: float, *, evict: Evict = "auto") -> str:
    """Return a shorter program that also fails, as a script, and the complaint about it."""

    def wrong(candidate: Program) -> str:
        return complaint(candidate, tightness, evict=evict)

    short = shortened(program, lambda candidate: bool(wrong(candidate)))
    return f"{wrong(short)}\n\n{short.source()}\n\ntightness {tightness}\n"
