"""Describe a program as a chain of stages, cut at the articulation points of its forward pass.

Stage i runs from one articulation value to the next: a value through which all later ones depend on
earlier ones (`_line.py`). The nodes after the last such value, up to the first backward node that
needs a stage, are the loss. The memory of a stage is computed as if only its nodes ran. A program
that is no chain, because it skips over articulation points or has gradients larger than values, is
described only approximately. So `rotor.py` computes the real peak of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from rekindle.planners._base import backward_start
from rekindle.planners._chain import Chain, Kind, Operation
from rekindle.planners._line import candidates
from rekindle.planners._problem import Problem


@final
@dataclass(frozen=True)
class Stages:
    """A program as a chain of stages: the forward and backward nodes of each, in order.

    The nodes of the loss are in `backward[-1]`.
    """

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    chain: Chain

    def steps(self, operations: Sequence[Operation]) -> list[int]:
        """Return the nodes of the program that a schedule for the chain runs, in order."""
        steps: list[int] = []
        for operation in operations:
            ending = operation.kind in (Kind.BACK, Kind.LOSS)
            steps += (self.backward if ending else self.forward)[operation.stage]
        return steps


def stages_of(problem: Problem) -> Stages:
    """Cut a program into stages, and compute their sizes and times."""
    backward = backward_start(problem)
    line = candidates(problem, "articulation")
    ends = [problem.maker[item] + 1 for item in line]
    starts = [0, *ends]
    forward = [tuple(range(a, b)) for a, b in zip(starts, ends, strict=False)]
    forward = [nodes for nodes in forward if nodes]
    stage_of = {node: stage for stage, nodes in enumerate(forward) for node in nodes}
    last = len(forward)
    groups: list[list[int]] = [[] for _ in range(last + 1)]
    groups[last] = list(range(ends[-1] if ends else 0, backward))
    current = last
    for node in range(backward, len(problem)):
        read = [stage_of.get(problem.maker[item]) for item in problem.reads[node]]
        needed = [stage for stage in read if stage is not None]
        if needed and max(needed) < current:
            current = max(needed)
        groups[current].append(node)
    chain = _measure(problem, forward, groups)
    return Stages(tuple(forward), tuple(map(tuple, groups)), chain)


def _measure(
    problem: Problem, forward: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
) -> Chain:
    """Compute the chain's sizes, times and transient bytes from the nodes of each stage."""
    size = problem.nbytes
    backward = groups[-1][0] if groups[-1] else len(problem)
    values = [0]
    tapes: list[int] = []
    forward_extra: list[int] = []
    for nodes in forward:
        made = [item for node in nodes for item in problem.makes[node]]
        output = problem.makes[nodes[-1]]
        taped = {i for i in made if any(reader >= backward for reader in problem.readers[i])}
        values.append(sum(size[item] for item in output))
        tapes.append(sum(size[item] for item in taped | {*output}))
        plain = _peak(problem, nodes, {*output}) - values[-1]
        forward_extra.append(max(0, plain, _peak(problem, nodes, taped | {*output}) - tapes[-1]))
    backward_extra: list[int] = []
    for stage, nodes in enumerate(groups):
        following = groups[stage - 1] if stage else ()
        read = {item for node in following for item in problem.reads[node]}
        gradients = {i for node in nodes for i in problem.makes[node]} & read
        peak = _peak(problem, nodes, gradients)
        backward_extra.append(max(0, peak - values[stage]))
    return Chain(
        tuple(float(sum(problem.cost[node] for node in nodes)) for nodes in forward),
        tuple(float(sum(problem.cost[node] for node in nodes)) for nodes in groups),
        tuple(values),
        tuple(tapes),
        tuple(forward_extra),
        tuple(backward_extra),
    )


def _peak(problem: Problem, nodes: Sequence[int], stay: set[int]) -> int:
    """Return the most bytes in use if only `nodes` run; storages in `stay` are never freed."""
    last: dict[int, int] = {}
    for node in nodes:
        for item in (*problem.makes[node], *problem.reads[node]):
            last[item] = node
    memory = peak = 0
    alive: set[int] = set()
    for node in nodes:
        alive.update(problem.makes[node])
        memory += sum(problem.nbytes[item] for item in problem.makes[node])
        peak = max(peak, memory)
        for item in [item for item in alive if last[item] == node and item not in stay]:
            alive.remove(item)
            memory -= problem.nbytes[item]
    return peak
