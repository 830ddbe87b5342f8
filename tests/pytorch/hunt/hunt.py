"""Draw a training loop and budget settings from one seed, and return the first complaint."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.differ.judge import Outcome, Plain, judge
from tests.differ.modes import drawn
from tests.pytorch.hunt.loop import random_loop
from tests.pytorch.hunt.modes import MODES

MOST_DRAWN = 20
LOOKED_AT_FOR_GROWTH = 20  #: one of 20 loops is checked for bookkeeping that grows each step


def hunted(seed: int, modes: int, only: Sequence[str] = (), *, known: bool = False) -> Outcome:
    """Draw a loop by `seed`, and compare it with plain PyTorch in several modes of a budget.

    Args:
        seed: Determines the loop and the modes.
        modes: The number of modes to draw.
        only: Names of the modes to draw from; empty for all.
        known: True to report known defects as well.
    """
    rng = Random(seed)
    again = 0
    for again in range(MOST_DRAWN):  # noqa: B007 - the number of loops that were discarded
        loop = random_loop(rng).ready
        plain = Plain(loop)
        if not plain.error:  # a loop that raises early leaves little to compare
            break
    chosen = drawn(MODES, rng, modes, only)
    tight = ((mode, rng.choice((1.0, 1.0, 0.9, rng.random()))) for mode in chosen)
    growing = seed % LOOKED_AT_FOR_GROWTH == 0 and loop.place == "loop" and not loop.interrupted
    outcome = judge(loop, tight, plain, known=known, growing=growing)
    outcome.drawn_again = again
    return outcome
