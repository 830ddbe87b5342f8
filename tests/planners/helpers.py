"""Small planning problems, their best cost by exhaustive search, and files of reference results."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from rekindle.planners import Problem
from rekindle.trace.formats import load
from rekindle.trace.formats.checkmate import graph_to_trace

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"


def reference(name: str) -> dict[str, object]:
    """Return a reference file next to the repository; skip the test if there is none."""
    path = REFERENCE / name
    if not path.exists():
        pytest.skip(f"{path} is not there: reference figures are not part of the repository")
    return json.loads(path.read_text(encoding="utf-8"))


def reference_problem(graph: str) -> Problem:
    reference(f"graphs/{graph}.json")
    return Problem.of(load(REFERENCE / "graphs" / f"{graph}.json"))


def problem_of(*nodes: tuple[int, int, list[int]]) -> Problem:
    """Build a problem from the cost (in us), bytes and input indices of each node."""
    listed = [
        {"id": at, "name": f"n{at}", "cost": cost, "mem": nbytes, "deps": deps}
        for at, (cost, nbytes, deps) in enumerate(nodes)
    ]
    return Problem.of(graph_to_trace({"name": "small", "nodes": listed}))


def unit_chain(length: int) -> Problem:
    """Build a chain of forward nodes, the loss, and backward nodes in reverse order.

    Each node makes one byte and takes one us.
    """
    nodes: list[tuple[int, int, list[int]]] = [
        (1, 1, [at - 1] if at else []) for at in range(length + 1)
    ]
    nodes += [(1, 1, [length - 1 - at, length + at]) for at in range(length)]
    return problem_of(*nodes)


def with_workspaces(problem: Problem, inside: Sequence[int]) -> Problem:
    """Return `problem` with operators that need `inside` bytes internally (workspace)."""
    trace = problem.trace
    ops = (replace(op, workspace=nbytes) for op, nbytes in zip(trace.ops, inside, strict=True))
    return Problem.of(replace(trace, ops=tuple(ops)))


@st.composite
def small_graphs(draw: st.DrawFn, *, most: int = 7) -> tuple[Problem, int]:
    """Draw a small graph, of which half is a backward pass, and a budget.

    The budget is between the smallest possible one and the peak without recomputation.
    """
    size = draw(st.integers(3, most))
    nodes: list[tuple[int, int, list[int]]] = []
    for at in range(size):
        reads = draw(st.sets(st.integers(0, at - 1), max_size=2)) if at else set[int]()
        if at and at > size // 2:  # a backward node reads the node before it and its forward node
            reads |= {at - 1, max(0, size - 1 - at)} - {at}
        nodes.append((draw(st.integers(0, 6)), draw(st.integers(0, 5)), sorted(reads)))
    problem = problem_of(*nodes)
    if draw(st.integers(0, 3)) == 0:  # few inputs: each one enlarges the exhaustive search
        roomy, inside = draw(st.integers(0, size - 1)), draw(st.integers(1, 4))
        problem = with_workspaces(problem, [inside * (at == roomy) for at in range(size)])
    low, high = problem.floor, problem.keep_all_peak
    return problem, draw(st.integers(min(low, high), high))


def exhaustive(problem: Problem, budget: int) -> int | None:
    """Return the least cost of any schedule within `budget`, or None if there is none.

    The search is for a shortest path. A state is the nodes run so far and the values in memory.
    """
    nodes = len(problem)
    start = (0, 0)
    best = {start: 0}
    queue = [(0, start)]
    sizes = problem.nbytes
    needs = [sum(1 << item for item in items) for items in problem.reads]
    while queue:
        cost, state = heapq.heappop(queue)
        frontier, resident = state
        if cost > best[state]:
            continue
        if frontier == nodes:
            return cost
        following = [
            (cost, (frontier, resident & ~(1 << item)))
            for item in range(len(sizes))
            if resident >> item & 1
        ]
        memory = sum(size for item, size in enumerate(sizes) if resident >> item & 1)
        for node in range(frontier + 1):
            made = sum(1 << item for item in problem.makes[node])
            if needs[node] & ~resident or resident & made:
                continue
            if memory + sum(sizes[item] for item in problem.makes[node]) <= budget:
                after = (max(frontier, node + 1), resident | made)
                following.append((cost + problem.cost[node], after))
        for new, after in following:
            if new < best.get(after, new + 1):
                best[after] = new
                heapq.heappush(queue, (new, after))
    return None
