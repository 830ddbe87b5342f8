"""Planners: make a plan for a recorded trace and a budget before the program runs.

    problem = Problem.of(trace)
    plan = Cuts(time_limit=60).plan(problem, budget=problem.keep_all_peak // 2)
    plan.overhead, plan.lower_bound, plan.schedule

A plan says which values to evict, recompute or swap at each operator. `Cuts` is the default
planner: it plans any program, and always gives a lower bound of the cost. The other planners are
published algorithms. A planner object holds only its settings and never changes. The verifier
(`rekindle.schedule`) checks every plan. This package imports neither the engine nor the simulator,
so that no planner judges its own plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle._public import publish
from rekindle.planners._base import Planner as Planner
from rekindle.planners._base import Search as Search
from rekindle.planners._base import demand as demand
from rekindle.planners._chain import Chain as Chain
from rekindle.planners._problem import Problem as Problem
from rekindle.planners._result import Plan as Plan
from rekindle.planners._result import Progress as Progress
from rekindle.planners._result import Status as Status
from rekindle.planners.chen import ChenGreedy as ChenGreedy
from rekindle.planners.chen import ChenSqrt as ChenSqrt
from rekindle.planners.extremes import KeepAll as KeepAll
from rekindle.planners.extremes import RecomputeAll as RecomputeAll
from rekindle.planners.given import Given as Given
from rekindle.planners.revolve import Revolve as Revolve
from rekindle.planners.rotor import Rotor as Rotor

publish(__name__, globals().values())

if TYPE_CHECKING:
    from rekindle.planners.checkmate import Checkmate as Checkmate
    from rekindle.planners.checkmate import Rounding as Rounding
    from rekindle.planners.cuts import Cuts as Cuts

# Planners that need a solver, which is an optional extra. They are imported on first access.
_SOLVING = {
    "Checkmate": "rekindle.planners.checkmate",
    "Cuts": "rekindle.planners.cuts",
    "Rounding": "rekindle.planners.checkmate",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _SOLVING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value: object = getattr(import_module(_SOLVING[name]), name)
    publish(__name__, [value])
    return value
