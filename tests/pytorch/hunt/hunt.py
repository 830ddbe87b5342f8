"""Draw a training loop and budget settings from one seed, and return the first complaint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from tests.pytorch.hunt.judge import Complaint, Plain, chosen, complaint, growth
from tests.pytorch.hunt.known import known as why_known
from tests.pytorch.hunt.loop import Loop, random_loop
from tests.pytorch.hunt.modes import MODES, Mode

MOST_DRAWN = 20
LOOKED_AT_FOR_GROWTH = 20  #: one of 20 loops is checked for bookkeeping that grows each step


@dataclass
class Outcome:
    loop: Loop
    kind: Literal["same", "different", "undetermined"] = "same"
    mode: Mode | None = None
    complaint: Complaint | None = None
    tightness: float = 1.0
    drawn_again: int = 0
    grows: bool = False
    excepted: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)


def hunted(seed: int, modes: int, only: Sequence[str] = (), *, known: bool = False) -> Outcome:
    """Draw a loop by `seed`, and compare it with plain PyTorch in several modes of a budget.

    Args:
        seed: Determines the loop and the modes.
        modes: The number of modes to draw.
        only: Names of the modes to draw from; empty for all.
        known: True to report known defects as well.
    """
    rng = Random(seed)
    drawn = 0
    for drawn in range(MOST_DRAWN):  # noqa: B007 - the number of loops that were discarded
        loop = chosen(random_loop(rng))
        plain = Plain(loop.source())
        if not plain.error:  # a loop that raises early leaves little to compare
            break
    outcome = Outcome(loop, drawn_again=drawn)
    if not plain.determined:
        outcome.kind = "undetermined"
        return outcome
    for mode in _drawn_modes(rng, modes, only):
        outcome.mode, outcome.tightness = mode, rng.choice((1.0, 1.0, 0.9, rng.random()))
        outcome.modes[mode.name] += 1
        outcome.complaint = found = complaint(loop.source(), plain, mode, outcome.tightness)
        if found is not None:
            reason = found.text if found.excepted else "" if known else why_known(loop, found)
            if not reason:
                outcome.kind = "different"
                return outcome
            outcome.excepted[reason] += 1
    if seed % LOOKED_AT_FOR_GROWTH == 0 and loop.place == "loop" and not loop.interrupted:
        outcome.mode = MODES["unlimited"]
        outcome.complaint = found = growth(loop, outcome.mode)
        if found is not None and (known or not why_known(loop, found)):
            outcome.kind = "different"
            outcome.grows = True
    return outcome


def _drawn_modes(rng: Random, count: int, only: Sequence[str]) -> list[Mode]:
    possible = [mode for mode in MODES.values() if mode.name in only or not only]
    drawn: list[Mode] = []
    while possible and len(drawn) < count:
        (mode,) = rng.choices(possible, [mode.weight for mode in possible])
        possible.remove(mode)
        drawn.append(mode)
    return drawn
