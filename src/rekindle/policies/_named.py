"""The policies by name, for `policy="dtr"`, `--policy dtr`, and tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rekindle._errors import InvalidArgument
from rekindle.policies._base import Policy
from rekindle.policies.ablation import Ablation
from rekindle.policies.dtr import DTR
from rekindle.policies.largest import Largest
from rekindle.policies.lru import LRU
from rekindle.policies.msps import MSPS
from rekindle.policies.random import Random
from rekindle.policies.thrifty import Thrifty

DEFAULT: Final[Policy] = Thrifty()
"""The policy that is used if the user names none."""

PAPER: Final = ("dtr", "dtr-eq", "dtr-local", "lru", "largest", "msps", "random")
"""The seven policies of figure 2 in the DTR paper."""


def _ablations() -> Mapping[str, Policy]:
    """Return the ablation family of the DTR paper by name.

    The paper writes h(s, m, c) for staleness, memory and cost. "h-sm-eq" uses staleness and memory,
    and estimates the cost by union-find classes. "h-0-exact" uses only the exact cost.
    """
    found: dict[str, Policy] = {}
    for staleness, size in itertools.product((True, False), repeat=2):
        letters = "s" * staleness + "m" * size or "0"
        found[f"h-{letters}-exact"] = Ablation(staleness, size, "exact")
        found[f"h-{letters}-eq"] = Ablation(staleness, size, "classes")
        found[f"h-{letters}-local"] = Ablation(staleness, size, "local")
        found[f"h-{letters}-none"] = Ablation(staleness, size, "none")
    return found


ABLATIONS: Final[Mapping[str, Policy]] = MappingProxyType(dict(_ablations()))
"""The ablations of the paper's appendix D.1, by name."""

NAMED: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        "dtr": DTR(),
        "dtr-eq": DTR("classes"),
        "dtr-local": DTR("local"),
        "lru": LRU(),
        "largest": Largest(),
        "msps": MSPS(),
        "random": Random(),
        "thrifty": Thrifty(),
        **ABLATIONS,
    }
)


def named(name: str) -> Policy:
    """Return the policy called `name`. "random:7" is `Random` with seed 7.

    Raises:
        KeyError: No policy has this name.
    """
    base, _, seed = name.partition(":")
    if base == "random" and seed.isdecimal():
        return Random(int(seed))
    return NAMED[name]


def policy_of(policy: object) -> Policy:
    """Return the policy for the user's argument `policy=`.

    Args:
        policy: A policy, a name, a policy class (used with its defaults), or None (the default
            policy).

    Raises:
        InvalidArgument: `policy` is something else.
    """
    if policy is None:
        return DEFAULT
    if isinstance(policy, Policy):
        return policy
    wanted = "a policy or its name"
    try:
        if isinstance(policy, str):
            return named(policy.strip().lower())
        if isinstance(policy, type) and issubclass(policy, Policy):
            return policy()
    except KeyError:
        wanted = f"one of {', '.join(name for name in NAMED if name not in ABLATIONS)}, random:SEED"
    except TypeError:
        wanted = "one with its arguments"
    raise InvalidArgument(
        f'policy={policy!r}: wanted {wanted}; write policy="dtr" or policy=rekindle.policies.DTR()'
    )
