"""Find a shorter program that fails like a given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.differ.judge import Complaint, Outcome, Plain, Program, complaint
from tests.differ.modes import Mode

MOST_TRIES = 400
P = TypeVar("P", bound=Program)


def shrunk(program: P, wrong: Callable[[P], bool]) -> P:
    """Return `program` without the parts that it can lack and still be `wrong`."""
    tries = 0
    while True:
        for simpler in program.without:
            tries += 1
            if tries > MOST_TRIES:
                return program
            if wrong(simpler):
                program = simpler
                break
        else:
            return program


def complaint_of(program: Program, mode: Mode, tightness: float = 1.0) -> Complaint | None:
    """Return the complaint about `program` in `mode`, unless it is excepted."""
    found = complaint(program, Plain(program), mode, tightness)
    return None if found is None or found.excepted else found


def report(outcome: Outcome) -> str:
    """Return the complaint about a program, and a shorter program that fails, too, as a script."""
    assert outcome.mode is not None
    mode, tightness = outcome.mode, outcome.tightness

    def judged(program: Program) -> Complaint | None:
        program = program.ready
        return program.grown() if outcome.grows else complaint_of(program, mode, tightness)

    short = shrunk(outcome.program, lambda program: judged(program) is not None)
    short = short.ready
    found = judged(short)
    amount = 0 if found is None else found.amount
    return f"{found}, tightness {tightness}\n{short!r}\n\n{short.text(mode, amount)}\n"
