"""Define two planners for comparison: one evicts nothing, the other evicts everything it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes
from rekindle.planners._base import Search, Watch, recompute_all
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan


@final
@dataclass(frozen=True)
class KeepAll:
    """Planner that evicts nothing. Its plan is optimal if it fits."""

    @property
    def name(self) -> str:
        return "keep-all"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch)
        search.offer(range(len(problem)))
        return search.conclude()


@final
@dataclass(frozen=True)
class RecomputeAll:
    """Planner that evicts everything: each backward operator recomputes all that it reads."""

    @property
    def name(self) -> str:
        return "recompute-all"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch)
        search.offer(recompute_all(problem))
        return search.conclude()
