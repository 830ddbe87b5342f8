"""Find the fastest run of a small planning problem with swapping, by trying all runs.

A run is a sequence of actions: compute a node, evict a value, or copy a value to or from the host.
The search shares no code with the planners, so that tests can compare their plans with its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rekindle.planners import Problem
from rekindle.planners._relaxation import Bandwidth


@dataclass(frozen=True)
class _State:
    """A state of the search.

    `sent` and `back` are pairs of a value and the time at which its copy to or from the host ends.
    Values in `leaving` are evicted, but their copies to the host have not ended.
    """

    frontier: int = 0
    resident: frozenset[int] = frozenset()
    host: frozenset[int] = frozenset()
    now: int = 0
    sent_until: int = 0
    back_until: int = 0
    sent: tuple[tuple[int, int], ...] = ()
    back: tuple[tuple[int, int], ...] = ()
    leaving: tuple[tuple[int, int], ...] = ()

    @property
    def place(self) -> tuple[object, ...]:
        return self.frontier, self.resident, self.host, tuple(item for item, _ in self.leaving)

    def times(self) -> list[int]:
        ends = (end for each in (self.sent, self.back, self.leaving) for _, end in each)
        return [max(self.now, end) for end in (0, self.sent_until, self.back_until, *ends)]

    def no_later(self, other: _State) -> bool:
        return all(a <= b for a, b in zip(self.times(), other.times(), strict=True))


def fastest(problem: Problem, budget: int, bandwidth: Bandwidth) -> int | None:
    """Return the end time of the fastest run in ns, or None if no run fits."""
    moves = _Moves(problem, budget, bandwidth)
    known: dict[tuple[object, ...], list[_State]] = {}
    stack = [_State()]
    best: int | None = None
    while stack:
        state = stack.pop()
        rest = sum(problem.cost[state.frontier :])
        if best is not None and state.now + rest >= best:
            continue
        others = known.setdefault(state.place, [])
        if any(other.no_later(state) for other in others):
            continue
        others[:] = [other for other in others if not state.no_later(other)]
        others.append(state)
        if state.frontier == len(problem):
            best = state.now
        else:
            stack += moves.of(state)
    return best


class _Moves:
    def __init__(self, problem: Problem, budget: int, bandwidth: Bandwidth) -> None:
        self.problem = problem
        self.budget = budget
        self.out = [-(-size * 10**9 // bandwidth.out) for size in problem.nbytes]
        self.in_ = [-(-size * 10**9 // bandwidth.back) for size in problem.nbytes]

    def of(self, state: _State) -> Iterator[_State]:
        for item in sorted(state.resident):
            if not self.problem.nbytes[item]:
                continue  # this step needs no memory and no time, so it is never wrong
            yield self._gone(state, item)
            if item not in state.host:
                yield self._sent(state, item)
        for item in sorted(state.host - state.resident):
            ready = self._room(state, self.problem.nbytes[item])
            if ready is not None:
                begin = max(ready.now, ready.back_until, dict(ready.sent)[item])
                end = begin + self.in_[item]
                back = _with(ready.back, item, end)
                resident = ready.resident | {item}
                yield replace(ready, resident=resident, back=back, back_until=end)
        for node in range(state.frontier + 1):
            yield from self._computed(state, node)

    def _computed(self, state: _State, node: int) -> Iterator[_State]:
        problem = self.problem
        made = frozenset(problem.makes[node])
        if not state.resident.issuperset(problem.reads[node]) or state.resident & made:
            return
        back = dict(state.back)
        arrived = max((back.get(item, 0) for item in problem.reads[node]), default=0)
        state = replace(state, now=max(state.now, arrived))
        ready = self._room(state, sum(problem.nbytes[item] for item in made))
        if ready is not None:
            frontier = max(ready.frontier, node + 1)
            now = ready.now + problem.cost[node]
            back = tuple((item, end) for item, end in ready.back if item not in made)
            back = tuple(sorted((*back, *((item, 0) for item in made))))
            resident = ready.resident | made
            yield replace(ready, frontier=frontier, now=now, resident=resident, back=back)

    def _room(self, state: _State, nbytes: int) -> _State | None:
        """Wait until the given number of bytes is free."""
        sizes = self.problem.nbytes
        memory = sum(sizes[item] for item in state.resident) + nbytes
        if memory > self.budget:
            return None
        now = state.now
        leaving = sorted(state.leaving, key=lambda pair: pair[1])
        leaving = [(item, end) for item, end in leaving if end > now]
        while memory + sum(sizes[item] for item, _ in leaving) > self.budget:
            now = max(now, leaving.pop(0)[1])
            leaving = [(item, end) for item, end in leaving if end > now]
        return replace(state, now=now, leaving=tuple(sorted(leaving)))

    def _sent(self, state: _State, item: int) -> _State:
        begin = max(state.now, state.sent_until, dict(state.back).get(item, 0))
        end = begin + self.out[item]
        sent = _with(state.sent, item, end)
        return replace(state, host=state.host | {item}, sent=sent, sent_until=end)

    def _gone(self, state: _State, item: int) -> _State:
        end = max(dict(state.sent).get(item, 0), dict(state.back).get(item, 0))
        back = tuple(pair for pair in state.back if pair[0] != item)
        leaving = state.leaving
        if end > state.now:
            leaving = tuple(sorted((*leaving, (item, end))))
        return replace(state, resident=state.resident - {item}, back=back, leaving=leaving)


def _with(times: tuple[tuple[int, int], ...], item: int, end: int) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((*(pair for pair in times if pair[0] != item), (item, end))))
