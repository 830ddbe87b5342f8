"""Find a shorter training loop that fails like a given one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.pytorch.hunt.judge import Complaint, Plain, chosen, complaint, growth
from tests.pytorch.hunt.loop import Loop
from tests.pytorch.hunt.modes import Mode

MOST_TRIES = 150


def shrunk(loop: Loop, wrong: Callable[[Loop], bool]) -> Loop:
    """Return `loop` without the parts that it can lack and still be `wrong`."""
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
    """Return the complaint about `loop` in `mode`; None if the loop is not deterministic."""
    plain = Plain(loop.source())
    return complaint(loop.source(), plain, mode, tightness) if plain.determined else None


def report(loop: Loop, mode: Mode, tightness: float, *, grows: bool = False) -> str:
    """Return the source of a shorter loop that fails, too, and the complaint about it."""

    def judged(candidate: Loop) -> Complaint | None:
        # In a shorter program the interrupted operator has another number.
        candidate = chosen(replace(candidate, trip=None))
        found = growth(candidate, mode) if grows else complaint_of(candidate, mode, tightness)
        return None if found is None or found.excepted else found

    short = chosen(replace(shrunk(loop, lambda each: judged(each) is not None), trip=None))
    found = judged(short)
    return f"{found}\n{short}\n\n{script(short.source(), mode, found)}"


def script(source: str, mode: Mode, found: Complaint | None) -> str:
    """Return a runnable script: the program, and a header that imports and defines its names."""
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
