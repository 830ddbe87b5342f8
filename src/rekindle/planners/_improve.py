"""Better plans from a plan: memory that it leaves unused, recomputations in other places.

*Filling* drops recomputations: an item that was let go and made again can stay if the memory
between its two lives permits. *Annealing* (Kirkpatrick et al. 1983) does that where it does not
fit, and makes room by recomputing something else; what it minimises is

    max(peak, budget) / budget * cost,

so that a little too much memory is a detour and not a dead end.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import numpy as np

from rekindle._types import Bytes, Nanoseconds
from rekindle.planners._sequence import Timeline, prune, timeline


def fill(line: Timeline, budget: Bytes) -> tuple[int, ...]:
    """The steps without the recomputations that unused memory can replace, dearest first."""
    problem = line.problem
    refused: set[int] = set()
    while True:
        lives: dict[int, list[tuple[int, int]]] = {}
        for copy in line.copies:
            lives.setdefault(copy.item, []).append((copy.start, copy.end))
        candidates: list[tuple[int, int]] = []
        for step, node in enumerate(line.steps):
            if step != line.first[node] and node not in refused:
                candidates.append((-problem.cost[node], step))
        for _, step in sorted(candidates):
            node = line.steps[step]
            extra = np.zeros(len(line.steps), dtype=np.int64)
            for item in problem.makes[node]:
                before = [end for start, end in lives[item] if start < step]
                used = any(start == step and end > step for start, end in lives[item])
                if used and before:
                    extra[max(before) + 1 : step] += problem.nbytes[item]
            if (line.memory + extra).max() <= budget:
                shorter = [n for at, n in enumerate(line.steps) if at != step]
                try:
                    candidate = timeline(problem, prune(problem, shorter))
                except ValueError:  # its item is lent to an in-place write between
                    refused.add(node)
                    continue
                if candidate.peak <= budget and candidate.cost <= line.cost:
                    line = candidate
                    break
                refused.add(node)
        else:
            return line.steps


def anneal(
    line: Timeline,
    budget: Bytes,
    *,
    seconds: float,
    seed: int = 0,
    target: Nanoseconds = 0,
) -> tuple[int, ...]:
    """The best steps found within `budget` in about `seconds`; those of `line` if none is."""
    rng = random.Random(seed)
    problem = line.problem
    best = line
    current, energy = line, _energy(line, budget)
    began = time.perf_counter()
    hot = 2e-3 * line.cost  # accepts, at first, moves that cost a fifth of a percent
    while (passed := time.perf_counter() - began) < seconds:
        temperature = hot * (1 - passed / seconds) ** 2 + 1e-9
        steps = _add(current, budget, rng) if rng.random() < 0.5 else _remove(current, rng)
        if steps is None:
            continue
        try:
            candidate = timeline(problem, prune(problem, steps))
        except ValueError:
            continue
        new = _energy(candidate, budget)
        if new <= energy or rng.random() < math.exp((energy - new) / temperature):
            current, energy = candidate, new
            if candidate.peak <= budget and candidate.cost < best.cost:
                best = candidate
                if best.cost <= target:
                    break
    return fill(best, budget)


def _energy(line: Timeline, budget: Bytes) -> float:
    return max(line.peak, budget) / budget * line.cost


def _remove(line: Timeline, rng: random.Random) -> list[int] | None:
    """Without one recomputation: the item stays instead."""
    again = [step for step, node in enumerate(line.steps) if line.first[node] != step]
    if not again:
        return None
    step = rng.choice(again)
    return [node for at, node in enumerate(line.steps) if at != step]


def _add(line: Timeline, budget: Bytes, rng: random.Random) -> list[int] | None:
    """With one item let go while it idles over the peak, and recomputed where it is read next."""
    problem = line.problem
    peak = int(line.memory.argmax()) if line.peak > budget else rng.randrange(len(line.steps))
    over = [copy for copy in line.copies if copy.start < peak < copy.end]
    if not over:
        return None
    copy = rng.choice(over)
    node = problem.maker[copy.item]
    if not problem.replayable[node]:
        return None
    reader = next(
        (s for s in range(peak, copy.end + 1) if copy.item in problem.reads[line.steps[s]]), None
    )
    if reader is None or reader == peak:
        return None
    steps = list(line.steps)
    return steps[:reader] + _closure(line, node, reader) + steps[reader:]


def _closure(line: Timeline, node: int, at: int) -> list[int]:
    """`node` and whatever must be recomputed before it at step `at`."""
    problem = line.problem
    present = {copy.item for copy in line.copies if copy.start < at <= copy.end}
    order: list[int] = []
    seen: set[int] = set()

    def visit(start: int) -> None:
        stack: list[tuple[int, Sequence[int]]] = [(start, ())]
        while stack:
            current, _ = stack.pop()
            if current in seen:
                continue
            missing = [
                problem.maker[item]
                for item in problem.reads[current]
                if item not in present and problem.maker[item] not in seen
            ]
            if missing:
                stack.append((current, ()))
                stack += [(maker, ()) for maker in missing]
            else:
                seen.add(current)
                order.append(current)

    visit(node)
    return order
