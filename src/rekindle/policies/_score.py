"""Describe policies to the native core, by numbers that select the terms of a score.

The native core implements the scores below in C++. For any other policy it calls Python.
"""

from __future__ import annotations

from typing import Final

from rekindle.policies._base import Policy
from rekindle.policies.ablation import Ablation
from rekindle.policies.dtr import DTR
from rekindle.policies.largest import Largest
from rekindle.policies.lru import LRU
from rekindle.policies.msps import MSPS
from rekindle.policies.thrifty import Thrifty

# The enumeration `Costs` in native/engine/chooser.h. The native core has no union-find classes.
_COSTS: Final = {"none": 0, "local": 1, "exact": 3, "ancestors": 4, "capped": 5}
_KNOWN: Final = (Thrifty, DTR, LRU, Largest, MSPS, Ablation)

Score = tuple[int, bool, bool, bool]
"""(costs, by size, by staleness, root of staleness): `Policy` in native/engine/chooser.h."""


def score_of(policy: Policy) -> Score | None:
    """Describe the score of `policy` for the native core, which computes scores in C++.

    Returns:
        The description, or None if the native core does not implement the policy.
    """
    if type(policy) not in _KNOWN:  # a subclass may choose differently from its base class
        return None
    match policy:
        case Thrifty():
            return _COSTS["capped"], True, True, True
        case DTR(neighborhood="exact" | "local"):
            return _COSTS[policy.neighborhood], True, True, False
        case LRU():
            return _COSTS["none"], False, True, False
        case Largest():
            return _COSTS["none"], True, False, False
        case MSPS():
            return _COSTS["ancestors"], True, False, False
        case Ablation(cost="exact" | "local" | "none"):
            return _COSTS[policy.cost], policy.size, policy.staleness, False
        case _:
            return None
