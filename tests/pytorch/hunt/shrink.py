"""Find a shorter loop that fails like a given one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.pytorch.hunt.judge import Complaint, Plain, chosen, complaint, growth
from tests.pytorch.hunt.loop import Loop
from tests.pytorch.hunt.modes import Mode

MOST_TRIES = 150


def shrunk(loop: Loop, wrong: Callable[[Loop], bool]) -> Loop:
    """`loop` without what it can do without and still be `wrong`: blocks, habits, steps, places."""
    tries = 0
    while True:
        for simpler in loop.without:
            tries += 1
            if tries > MOST_TRIES:
                return loop
            if wrong(simpler):
                loop = simpler
                break
        else:
            return loop


def complaint_of(loop: Loop, mode: Mode, tightness: float) -> Complaint | None:
    """Return the complaint about `loop` in `mode`, if PyTorch itself runs it in one way."""
    plain = Plain(loop.source())
    return complaint(loop.source(), plain, mode, tightness) if plain.determined else None


def report(loop: Loop, mode: Mode, tightness: float, *, grows: bool = False) -> str:
    """A shorter loop that is wrong too, as a program, and what is wrong with it."""

    def judged(candidate: Loop) -> Complaint | None:
        # The same number of an operator is another one in a shorter program.
        candidate = chosen(replace(candidate, trip=None))
        found = growth(candidate, mode) if grows else complaint_of(candidate, mode, tightness)
        return None if found is None or found.excepted else found

    short = chosen(replace(shrunk(loop, lambda each: judged(each) is not None), trip=None))
    found = judged(short)
    return f"{found}\n{short}\n\n{script(short.source(), mode, found)}"


def script(source: str, mode: Mode, found: Complaint | None) -> str:
    """The program with its header, to be pinned or run as it is."""
    amount = found.amount if found is not None else 0
    return "\n".join(
        [
            "from tests.pytorch.hunt.kit import *",
            "from tests.pytorch.hunt.modes import MODES, Contexts",
            f"contexts = Contexts(MODES[{mode.name!r}], {amount})",
            "budget, planned, mark, note = contexts.budget, contexts.planned, contexts.mark, print",
            "",
            source,
        ]
    )
