"""Tests of moving sources in the order of their next use: `StepOrder`, `Engine.anticipate`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from rekindle.engine import Call, Engine, Storage, _step_order
from rekindle.engine._step_order import NEVER, StepOrder
from rekindle.policies import LRU, Swap, Thrifty
from rekindle.schedule import Action, Discard, Free, SwapIn, SwapOut

SPEED = 10**9  #: bytes per second


class Program:
    """A program whose sources all move. It uses some of them at a time, and takes equal steps."""

    def __init__(self, budget: int, policy: LRU | Thrifty = LRU()) -> None:  # noqa: B008
        self.engine = Engine(budget, policy, Swap(None, SPEED, SPEED))
        self.moved: list[tuple[str, int]] = []
        self.calls = 0
        self.out = self.back = 0

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            storage = self.engine.subject
            match action:
                case SwapOut(number):
                    self.moved.append(("out", number))
                    self.out += storage.nbytes  # type: ignore[union-attr]
                case SwapIn(number):
                    self.moved.append(("in", number))
                    self.back += storage.nbytes  # type: ignore[union-attr]
                case Free() | Discard():
                    pass
        self.engine.check()

    def source(self, number: int, nbytes: int = 1) -> Storage:
        self.do(self.engine.make_room(nbytes))
        call = Call(self.calls, "source", 1, [], False)
        self.calls += 1
        made = call.makes(number, nbytes).storage
        self.do(Free(each.id) for each in self.engine.admit(call, held=True))
        self.engine.set_evictable_while_held(made, True)
        return made

    def sources(self, n: int, nbytes: int = 1) -> list[Storage]:
        made = [self.source(number, nbytes) for number in range(n)]
        self.engine.step()
        return made

    def use(self, *sources: Storage, writes: bool = False, ahead: bool = False) -> None:
        """Run an operator that reads `sources`."""
        engine = self.engine
        for each in sources:
            self.do(engine.use(each.values[0]))
            engine.lock(each)
        for each in sources:
            if writes:
                self.do(engine.written(each))
        engine.account(1)
        for each in sources:
            self.do(engine.unlock(each))
        if ahead:
            self.do(engine.anticipate())


def test_next_use_is_known_after_one_step() -> None:
    order, (a, b) = StepOrder(), (Storage(0, 8), Storage(1, 8))

    def use(storage: Storage) -> None:
        order.used(storage)
        order.place += 1

    for each in (a, b, a):
        assert order.distance(each) is None
        use(each)
    order.step()
    assert [order.distance(each) for each in (a, b)] == [0, 1]
    use(a)
    assert [order.distance(each) for each in (a, b)] == [1, 0]
    use(b)
    assert [order.distance(each) for each in (a, b)] == [0, 2]
    use(a)
    assert [order.distance(each) for each in (a, b)] == [0, 1]


def test_new_storage_has_uses_of_one_of_last_step() -> None:
    order = StepOrder()

    def step() -> Storage:
        gradient, weight = Storage(0, 8), Storage(1, 8)
        for each in (weight, gradient, weight, gradient):
            order.used(each)
            order.place += 1
        return gradient

    step()
    order.step()
    gradient = Storage(2, 8)
    order.place = 1
    order.used(gradient)
    order.place = 2
    assert order.distance(gradient) == 1
    order.place = 4
    assert order.distance(gradient) == NEVER


def test_steps_of_other_lengths_have_no_order() -> None:
    order, a = StepOrder(), Storage(0, 8)
    for length, known in ((100, True), (95, True), (50, False), (100, False), (101, True)):
        order.used(a)
        order.place = length
        order.step()
        assert order.known is known


@pytest.mark.parametrize("policy", [LRU(), Thrifty()], ids=repr)
def test_cyclic_reads_move_as_little_as_optimal_order(policy: LRU | Thrifty) -> None:
    """Six of eight weights fit. Each step reads all: 3 copies suffice, LRU would make 8."""
    program = Program(6, policy)
    weights = program.sources(8)
    before = []
    for _ in range(6):
        before.append(program.back)
        for each in weights:
            program.use(each)
        program.engine.step()
    before.append(program.back)
    assert all(after - start <= 3 for start, after in pairwise(before[1:]))
    assert program.out == 8


def test_next_source_comes_before_it_is_used() -> None:
    program = Program(6)
    weights = program.sources(8)
    for _ in range(3):
        for each in weights:
            resident = each.resident
            program.use(each, ahead=True)
        program.engine.step()
    for each in weights:
        resident = each.resident
        program.use(each, ahead=True)
        assert resident


def test_order_of_a_step_without_end_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that takes no steps of optimizers uses sources for ever."""
    monkeypatch.setattr(_step_order, "MOST_CALLS", 10)
    order, (kept,) = StepOrder(), Program(1000).sources(1)
    kept.uses = None
    for place in range(100):
        order.place += 1
        order.used(kept)
        assert kept.uses is not None
        assert len(kept.uses.now) <= 12, place
    assert not order.known
