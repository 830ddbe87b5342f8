"""Choose blocks of a model to checkpoint, and results inside them to save (`rekindle.export`).

A checkpointed block frees its intermediate results at the end of its forward pass. The whole block
runs again right before the first operator of the backward pass that reads one of these results.
Saved results stay in memory and are not recomputed (selective checkpointing). The peak and the time
of a choice of blocks come from the timeline of its sequence of nodes (`_sequence.py`). The search
is greedy, so the module gives no lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.planners._problem import Problem
from rekindle.planners._sequence import cost_of, timeline

# a choice: the checkpointed blocks, and the nodes (operators) whose results are saved
_Choice = tuple[frozenset[int], frozenset[int]]


@final
@dataclass(frozen=True)
class Blocks:
    """Candidate blocks for checkpointing, and the search for the best ones.

    `nodes` has the forward nodes (operators) of each block, in order. `backward` is the first node
    of the backward pass. A block is identified by its index in `nodes`.
    """

    problem: Problem
    nodes: tuple[tuple[int, ...], ...]
    backward: int
    _peaks: dict[_Choice, Bytes] = field(default_factory=dict[_Choice, Bytes], repr=False)

    @cached_property
    def savable(self) -> tuple[int, ...]:
        """Nodes (operators) whose results can be saved, the highest cost per byte first.

        A result can be saved if no operator overwrites it in place.
        """
        problem = self.problem
        overwritten = {item for items in problem.overwrites for item in items}

        def price(node: int) -> float:
            return problem.cost[node] / sum(problem.nbytes[item] for item in problem.makes[node])

        found = [
            node
            for nodes in self.nodes
            for node in nodes
            if sum(problem.nbytes[item] for item in problem.makes[node])
            and not problem.overwrites[node]
            and overwritten.isdisjoint(problem.makes[node])
        ]
        return tuple(sorted(found, key=lambda node: (-price(node), node)))

    def again(self, block: int, saved: Iterable[int]) -> list[int]:
        """Return the nodes of `block` to recompute: all that can run again, except `saved`."""
        skipped = {*saved}
        nodes = self.nodes[block]
        return [n for n in nodes if self.problem.replayable[n] and n not in skipped]

    def steps(self, chosen: Iterable[int], saved: Iterable[int]) -> list[int]:
        """Return the sequence of nodes if the blocks `chosen` are checkpointed.

        The nodes `saved` are not recomputed, because their results stay in memory.
        """
        problem, skipped = self.problem, {*saved}
        waiting: dict[int, int] = {}  # item (storage) to recompute -> the block that recomputes it
        for block in chosen:
            for node in self.again(block, skipped):
                waiting.update(dict.fromkeys(problem.makes[node], block))
        steps: list[int] = []
        done: set[int] = set()
        for node in range(len(problem)):
            if node >= self.backward:
                for item in problem.reads[node]:
                    block = waiting.get(item)
                    if block is not None and block not in done:
                        done.add(block)
                        steps += self.again(block, skipped)
            steps.append(node)
        return steps

    def peak(self, chosen: frozenset[int], saved: frozenset[int] = frozenset()) -> Bytes:
        key = (chosen, saved)
        if key not in self._peaks:
            self._peaks[key] = timeline(self.problem, self.steps(chosen, saved)).peak
        return self._peaks[key]

    def recompute_ns(self, chosen: Iterable[int], saved: Iterable[int] = ()) -> Nanoseconds:
        return cost_of(self.problem, (n for block in chosen for n in self.again(block, saved)))

    def choose(self, budget: Bytes) -> frozenset[int]:
        """Choose few, cheap blocks to checkpoint, so that the peak is within `budget`.

        Returns:
            The blocks. If no tried choice fits, the choice with the lowest peak.
        """
        chosen = best = frozenset[int]()
        while self.peak(chosen) > budget and len(chosen) < len(self.nodes):
            others = [block for block in range(len(self.nodes)) if block not in chosen]
            chosen |= {min(others, key=lambda b: (self.peak(chosen | {b}), self._cost(b), b))}
            best = min(best, chosen, key=self.peak)
        if self.peak(chosen) > budget:
            return best
        for block in sorted(chosen, key=lambda b: (-self._cost(b), b)):
            if self.peak(chosen - {block}) <= budget:
                chosen -= {block}
        return chosen

    def save(self, chosen: frozenset[int], budget: Bytes) -> frozenset[int]:
        """Return the nodes whose results are saved: the most expensive in `chosen` that fit.

        The number of these nodes is found by bisection.
        """
        inside = {node for block in chosen for node in self.nodes[block]}
        order = [node for node in self.savable if node in inside]
        low, high = 0, len(order)
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak(chosen, self._worth(inside, order[:middle])) <= budget:
                low = middle
            else:
                high = middle - 1
        return self._worth(inside, order[:low])

    def _worth(self, inside: set[int], saved: Sequence[int]) -> frozenset[int]:
        """Return `saved` without nodes whose results no operator reads again.

        Saving such results only wastes memory, because PyTorch holds saved results until the
        checkpointed block is recomputed.
        """
        readers, kept = self.problem.readers, {*saved}
        for node in sorted(kept, reverse=True):
            later = (n for item in self.problem.makes[node] for n in readers[item])
            if not any(n >= self.backward or (n in inside and n not in kept) for n in later):
                kept.discard(node)
        return frozenset(kept)

    def calls(self, block: int, saved: frozenset[int]) -> frozenset[tuple[str, int]]:
        """Return the saved nodes of `block` as pairs (operator name, number of the call).

        The number counts the calls of this operator in the block, from 0.
        """
        found: set[tuple[str, int]] = set()
        counts: Counter[str] = Counter()
        for node in self.nodes[block]:
            op = self.problem.op[node]
            name = self.problem.trace.ops[op].name if op is not None else ""
            if node in saved:
                found.add((name, counts[name]))
            counts[name] += 1
        return frozenset(found)

    def _cost(self, block: int) -> Nanoseconds:
        return self.recompute_ns([block])


def blocks_of(problem: Problem, modules: Sequence[str], names: Sequence[str]) -> Blocks:
    """Find the candidate blocks for checkpointing.

    Args:
        problem: The operators and storages to plan, made from a trace.
        modules: For each operator, the path of the module that ran it in the forward pass.
        names: The paths of the submodules that are candidates.
    """

    def inside(node: int, name: str) -> bool:
        op = problem.op[node]
        return op is not None and (modules[op] + ".").startswith(name + ".")

    ops = problem.trace.ops
    backward = next(
        (n for n, op in enumerate(problem.op) if op is not None and ops[op].is_backward),
        len(problem),
    )
    nodes = [tuple(n for n in range(backward) if inside(n, name)) for name in names]
    return Blocks(problem, tuple(nodes), backward)
