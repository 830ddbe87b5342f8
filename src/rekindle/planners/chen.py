"""Plan with sublinear memory by segments (Chen, Xu, Zhang and Guestrin, arXiv 1604.06174).

The forward pass keeps some values as checkpoints. The values between two checkpoints are a segment.
A segment is recomputed once, when the backward pass first reads one of its values.

- *sqrt(n)* (section 3): keep every k-th candidate, with k about sqrt(n). This needs O(sqrt n)
  memory and at most one extra forward pass. Other k are tried as well, for smaller budgets.
- *greedy* (section 4.3, algorithm 3): keep a candidate when the bytes of the values since the last
  kept candidate exceed b. Several b are tried, as the paper does in its figure 5.

Candidates are the articulation points of the forward graph (the paper's chains). With `line="all"`
they are all forward values in the program's order. Checkmate calls these variants AP and
linearised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal, final

from rekindle._types import Bytes
from rekindle.planners import _line
from rekindle.planners._base import Search, Watch, backward_start, demand
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan


@final
@dataclass(frozen=True)
class ChenSqrt:
    """Planner that keeps every k-th checkpoint candidate, with the cheapest k that fits.

    Only values of k near sqrt(n) are tried, where n is the number of candidates.

    Args:
        line: The values that may be checkpoints: "articulation" points (`_line.py`), or "all".
    """

    line: Literal["articulation", "all"] = "articulation"

    @property
    def name(self) -> str:
        return "chen-sqrt" if self.line == "articulation" else "chen-sqrt-all"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        return _best(Search(problem, budget, self.name, watch), sequences(problem, self.line))


def sequences(
    problem: Problem, line: Literal["articulation", "all"] = "all"
) -> Iterator[list[int]]:
    """Yield a sequence for each k up to 2 sqrt(n) that keeps every k-th candidate, and one more.

    The last sequence keeps no candidate.
    """
    candidates = _line.candidates(problem, line)
    root = max(1, isqrt(len(candidates)))
    return _sequences(
        problem,
        (candidates[step - 1 :: step] for step in (*range(1, 2 * root + 1), len(candidates) + 1)),
    )


@final
@dataclass(frozen=True)
class ChenGreedy:
    """Planner that keeps a checkpoint whenever the bytes since the last checkpoint exceed a bound.

    Args:
        line: The values that may be checkpoints: "articulation" points (`_line.py`), or "all".
        tries: How many bounds (bytes) to try.
    """

    line: Literal["articulation", "all"] = "articulation"
    tries: int = 40

    @property
    def name(self) -> str:
        return "chen-greedy" if self.line == "articulation" else "chen-greedy-all"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        candidates = _line.candidates(problem, self.line)
        keeps = (
            _greedy(problem, candidates, budget * number // self.tries)
            for number in range(self.tries + 1)
        )
        search = Search(problem, budget, self.name, watch)
        return _best(search, _sequences(problem, keeps))


def _greedy(problem: Problem, candidates: Sequence[int], most: Bytes) -> list[int]:
    """Keep a candidate whenever more than `most` bytes were made since the last kept one."""
    kept: list[int] = []
    wanted = {*candidates}
    since = 0
    for node in range(backward_start(problem)):
        since += sum(problem.nbytes[item] for item in problem.makes[node])
        if since > most:
            here = [item for item in problem.makes[node] if item in wanted]
            if here:
                kept += here
                since = 0
    return kept


def _sequences(problem: Problem, keeps: Iterable[Sequence[int]]) -> Iterator[list[int]]:
    for keep in {frozenset(keep): None for keep in keeps}:
        yield demand(problem, keep)


def _best(search: Search, sequences: Iterable[list[int]]) -> Plan:
    for steps in sequences:
        search.offer(steps)
    return search.conclude()
