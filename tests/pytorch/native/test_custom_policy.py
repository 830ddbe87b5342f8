"""Tests of a policy that the program defines: its choices, its errors, and threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

import rekindle
from rekindle.policies import Candidate, Chooser
from tests.pytorch.harsh import WIDTH, deeper, vector
from tests.pytorch.native.own_policies import Cheapest, CheapestChooser, With

VECTOR = 4 * WIDTH
TIGHT = 14 * VECTOR


class MyError(Exception):
    """An error that the program's own code raises."""


def within(chooser: type[Chooser], amount: int | None = TIGHT) -> rekindle.budget:
    return rekindle.budget(amount, policy=With(chooser))


def test_custom_policy_chooses_evictions_and_matches_pytorch() -> None:
    weight = vector(True)
    deeper(weight, 30).sum().backward()
    wanted, weight.grad = weight.grad, None
    with rekindle.budget(TIGHT, policy=Cheapest()) as run:
        deeper(weight, 30).sum().backward()
    assert wanted is not None
    assert weight.grad is not None
    assert torch.equal(weight.grad, wanted)
    assert run.recomputations > 10
    assert run.peak <= TIGHT
    assert run.policy == Cheapest()


def test_error_in_choose_of_custom_policy_reaches_program() -> None:
    error = MyError("no idea")

    class Lost(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            raise error

    weight = vector(True)
    with within(Lost) as run:
        with pytest.raises(MyError) as caught:
            deeper(weight, 30)
        run._driver.engine.check()
    assert caught.value is error


@pytest.mark.parametrize("event", ["add", "remove", "touched", "evicted", "returned"])
def test_error_in_event_method_of_custom_policy_is_raised(event: str) -> None:
    error = MyError("no idea")
    left = [1]

    class Broken(CheapestChooser):
        pass

    def broken(self: Chooser, storage: Candidate) -> None:
        if left:
            left.pop()
            raise error

    setattr(Broken, event, broken)
    weight = vector(True)
    with within(Broken) as run:
        with pytest.raises(MyError) as caught:
            deeper(weight, 30).sum().backward()
        run._driver.engine.check()
    assert caught.value is error


def test_error_of_custom_policy_in_backward_pass_is_raised() -> None:
    class Later(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            if torch._C._current_graph_task_id() >= 0:
                raise MyError("not now")
            return super().choose(now)

    with within(Later), pytest.raises(MyError, match="not now"):
        deeper(vector(True), 30).sum().backward()


@pytest.mark.parametrize("answer", [3, "x", []], ids=repr)
def test_custom_policy_that_chooses_other_object_is_refused(answer: object) -> None:
    class Odd(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            return answer  # type: ignore[return-value]

    with within(Odd), pytest.raises(ValueError, match=r"returned .*: wanted one of the candidates"):
        deeper(vector(True), 30)


def test_custom_policy_that_chooses_removed_storage_is_refused() -> None:
    class Stubborn(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            return next(iter(self.gone), None) or super().choose(now)

    with within(Stubborn), pytest.raises(ValueError, match="wanted one of the candidates"):
        deeper(vector(True), 30)


def test_custom_policy_that_chooses_none_raises_out_of_budget() -> None:
    class Idle(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            return None

    with within(Idle), pytest.raises(rekindle.OutOfBudget):
        deeper(vector(True), 30)


def test_operators_of_custom_policy_do_not_count_in_budget() -> None:
    class Computing(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            costs = torch.tensor([float(each.cost) for each in self.candidates])
            return list(self.candidates)[int(costs.argmin())] if len(costs) else None

    weight = vector(True)
    with within(Computing) as run:
        deeper(weight, 30).sum().backward()
    assert run.recomputations > 0
    assert run.peak <= TIGHT


def test_other_threads_run_while_custom_policy_chooses() -> None:
    """A policy in Python may release the GIL. Other threads' operators then wait until it chose."""
    seen = threading.Event()

    class Slow(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            seen.wait(0.001)  # lets another Python thread run
            return super().choose(now)

    weights = [vector(True) for _ in range(3)]

    def train(weight: torch.Tensor) -> None:
        for _ in range(3):
            deeper(weight, 20).sum().backward()

    with rekindle.budget(40 * VECTOR, policy=With(Slow)) as run:
        threads = [threading.Thread(target=train, args=(weight,)) for weight in weights]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert run.recomputations > 0


def test_storages_given_to_custom_policy_are_readable_in_threads() -> None:
    kept: list[Candidate] = []
    read: list[int] = []

    class Noting(CheapestChooser):
        def add(self, storage: Candidate) -> None:
            super().add(storage)
            kept.append(storage)

    def reader() -> None:
        read.extend(each.nbytes for each in kept)
        read.extend(parent.nbytes for each in kept for parent in each.parents())

    with within(Noting):
        loss = deeper(vector(True), 20).sum()
        thread = threading.Thread(target=reader)
        thread.start()
        thread.join(60)
        loss.backward()
    del loss
    gc.collect()
    assert VECTOR in read
    assert max(each.nbytes for each in kept) == VECTOR
    assert {each.resident for each in kept if not each.parents()} == {False}


def test_custom_policy_is_freed_at_end_of_budget() -> None:
    made: list[weakref.ref[Chooser]] = []

    class Counted(CheapestChooser):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    with within(Counted) as run:
        deeper(vector(True), 20).sum().backward()
    del run
    gc.collect()
    assert [each() for each in made] == [None]


def test_budget_with_custom_policy_makes_no_automatic_plan() -> None:
    weight = vector(True)
    with rekindle.budget(TIGHT, policy=Cheapest()) as run:
        for _ in range(8):
            weight.grad = None
            deeper(weight, 30).sum().backward()
    assert run._driver.watcher is None
    assert run.recomputations > 0


class Waits(CheapestChooser):
    """A chooser whose methods `add` and `choose` wait for a thread that runs operators."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def add(self, storage: Candidate) -> None:
        self._wait()
        super().add(storage)

    def choose(self, now: int) -> Candidate | None:
        self._wait()
        return super().choose(now)


@pytest.mark.parametrize("layers", [2, 30], ids=["beside it", "needing room as well"])
def test_custom_policy_that_waits_for_thread_does_not_deadlock(layers: int) -> None:
    """Rekindle holds no lock while code of the program runs."""
    mine, other = vector(True), vector(True)
    wanted = [_gradient(mine, 30), _gradient(other, layers)]
    found: list[torch.Tensor] = []
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    here = threading.current_thread()
    left, missed = [6], []

    def computes() -> None:
        while asked.acquire(timeout=60) and left[0] >= 0:
            found.append(_gradient(other, layers))
            answered.release()

    def wait() -> None:
        if threading.current_thread() is here and left[0] > 0:
            left[0] -= 1
            asked.release()
            if not answered.acquire(timeout=30):
                missed.append(left[0])

    policy = With(lambda: Waits(wait))
    with rekindle.budget(30 * VECTOR, policy=policy) as run:
        thread = threading.Thread(target=computes)
        thread.start()
        gradients = [_gradient(mine, 30) for _ in range(2)]
        left[0] = -1
        asked.release()
        thread.join(60)
        run._driver.engine.check()
    assert not missed
    assert len(found) == 6
    assert all(torch.equal(each, wanted[0]) for each in gradients)
    assert all(torch.equal(each, wanted[1]) for each in found)
    assert run.evictions > 0


def _gradient(weight: torch.Tensor, layers: int) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(deeper(weight, layers).sum(), [weight])
    return gradient
