"""Convert the tables of operators in `_operators` and `_doubtful` to flags for the native core.

The core reads all other properties of an operator from the operator's schema.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from rekindle.pytorch.operators._doubtful import ACCUMULATING, ATOMICS, TIMED
from rekindle.pytorch.operators._operators import (
    ALWAYS_WRITTEN_STATISTICS,
    COLLECTIVES_IN_PLACE,
    COLLECTIVES_WITHOUT_RESULT,
    CONJUGATING,
    COUNTED_FIRST,
    EMPTY,
    HIDDEN_STATISTICS,
    INDEXING,
    LIKE_ARGUMENTS,
    OVERWRITING,
    QUERIES,
    REDUCED_IN_PLACE,
    ROUTING,
    SEES_REQUIRES_GRAD,
    UNTAGGED_RANDOM,
    WITHOUT_MEMORY,
    ZEROS,
)


def _in_aten(names: Iterable[str]) -> set[str]:
    """Return `names` with the prefix "aten::"."""
    return {f"aten::{name}" for name in names}


#: Flag of the native core (`native/ops/facts.h`) -> names of the operators that get this flag.
_KINDS: Final = {
    1: ROUTING,
    2: INDEXING,
    4: EMPTY,
    8: ZEROS,
    16: OVERWRITING,
    32: SEES_REQUIRES_GRAD,
    64: {WITHOUT_MEMORY},
    128: UNTAGGED_RANDOM,
    256: {*HIDDEN_STATISTICS, *ALWAYS_WRITTEN_STATISTICS},
    512: COUNTED_FIRST,
    1024: COLLECTIVES_IN_PLACE,
    2048: COLLECTIVES_WITHOUT_RESULT,
    4096: REDUCED_IN_PLACE,
    8192: _in_aten(ATOMICS),
    16384: _in_aten(ACCUMULATING),
    32768: _in_aten(TIMED),
    65536: CONJUGATING,
    131072: QUERIES,
    524288: LIKE_ARGUMENTS,
}


#: Flag of operators that are recomputed only after a trial recomputation gave the same bits
#: (`native/ops/probation.h`). No operator of PyTorch itself has this flag.
TRIED: Final = 262144


class Traits(NamedTuple):
    """Properties of one operator of PyTorch that the operator's schema does not describe.

    The fields are the operator's flags, and the positions of those arguments that Rekindle treats
    specially. Position -1 means that the operator has no such argument.
    """

    name: str
    flags: int
    #: Positions of the arguments for the running mean and the running variance, which the operator
    #: writes (R6, hidden writes), and of the flag that enables these writes.
    mean: int
    variance: int
    training: int
    #: Position of the argument `accumulate`.
    accumulate: int


def traits() -> list[Traits]:
    """Return the `Traits` of every operator that a table of this package lists."""
    found: list[Traits] = []
    for name in sorted(set[str]().union(*_KINDS.values())):
        flags = sum(bit for bit, names in _KINDS.items() if name in names)
        positions = HIDDEN_STATISTICS.get(name, (-1, -1, -1))
        if name in ALWAYS_WRITTEN_STATISTICS:
            positions = (*ALWAYS_WRITTEN_STATISTICS[name], -1)
        accumulate = ACCUMULATING.get(name.removeprefix("aten::"), -1)
        found.append(Traits(name, flags, *positions, accumulate))
    return found
