"""Tests that the step of an unknown optimizer needs no more memory than in plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import rekindle
from rekindle.pytorch.optimizers import _undo
from tests.pytorch.allocations import allocated
from tests.pytorch.bits import differing
from tests.pytorch.optimizers.test_complete_optimizer_steps import Mine, Program

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.LBFGS, {"max_iter": 3}),
    (optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    (optim.SparseAdam, {}),
    (Mine, {}),
]


def trained(program: Program) -> None:
    for number in range(3):
        program.backward(number)
        program.optimizer.step(*program.closure(number))


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_first_custom_optimizer_step_fits_into_plain_peak(
    kind: Any, options: dict[str, Any]
) -> None:
    programs: list[Program] = []

    def plain() -> None:
        programs.append(Program(kind, **options))
        trained(programs[0])

    peak = allocated(plain).peak
    ours = Program(kind, **options)
    with rekindle.budget(int(peak * 1.03), learn=False):
        trained(ours)
    assert differing(ours.state(), programs[0].state()) == []


def test_custom_optimizer_step_on_full_disk_changes_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room() -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(_undo.tempfile, "TemporaryFile", lambda **_: no_room())
    ours, plain = Program(Mine), Program(Mine)
    trained(plain)
    ours.backward(0)
    before = ours.state()
    with (
        rekindle.budget(9_000, learn=False),
        pytest.raises(rekindle.OutOfBudget),
    ):
        ours.optimizer.step()
    assert differing(ours.state(), before) == []
    with rekindle.budget(1 << 20, learn=False):
        trained(ours)
    assert differing(ours.state(), plain.state()) == []


class Greedy(optim.SGD):
    """An optimizer that needs much memory before it writes anything."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        torch.ones(1 << 20)


def test_failed_step_that_wrote_nothing_stays_within_budget() -> None:
    """To undo it, nothing is written: evicted values that need the weight stay evicted."""
    weight = torch.rand(1_000, requires_grad=True)
    weight.grad = torch.zeros(1_000)
    optimizer = Greedy([weight], 0.1)
    with rekindle.budget(40_000, evict="anything", learn=False) as run:
        values = [weight * number for number in range(50)]
        with pytest.raises(rekindle.OutOfBudget):
            optimizer.step()
        assert run.peak <= 40_000
    assert torch.equal(values[7], weight * 7)


def test_failed_custom_optimizer_step_leaves_state_unchanged() -> None:
    ours = Program(Mine)
    ours.backward(0)
    before = ours.state()
    moved: list[bool] = []
    plain = Mine.step

    class Greedy(Mine):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            undo: Any = run._driver.undo
            plain(self)
            moved.append(
                any(isinstance(each.copy, _undo._Outside) for each in undo._before.values())
            )
            torch.zeros(1 << 20)

    ours.optimizer = Greedy(ours.model.parameters(), lr=0.01)
    with (
        rekindle.budget(12_000, learn=False) as run,
        pytest.raises(rekindle.OutOfBudget),
    ):
        ours.optimizer.step()
    assert moved == [True]
    assert differing(ours.state(), before) == []


# -- what a failed step leaves behind -------------------------------------------------------------


def two_weights() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
    for each in made:
        each.grad = torch.ones(1000)
    return made


class Writes(torch.optim.Optimizer):
    """Writes the first weight, needs more memory than there is, and writes the second one."""

    def __init__(self, weights: list[nn.Parameter], write: Callable[[nn.Parameter], None]) -> None:
        super().__init__(weights, {})
        self.write, self.between = write, lambda: None
        self.seen = torch.zeros(1000)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        one, other = self.param_groups[0]["params"]
        self.seen.add_(1)
        self.write(one)
        self.between()
        torch.ones(1 << 20)
        self.write(other)


def assign(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.data = weight.data - weight.grad


def decay(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad.add_(weight, alpha=0.5)
    weight.sub_(weight.grad)


@pytest.mark.parametrize("write", [assign, decay])
def test_failed_step_restores_data_gradients_and_attributes(
    write: Callable[[nn.Parameter], None],
) -> None:
    weights = two_weights()
    optimizer = Writes(weights, write)
    view = weights[0].detach()
    with rekindle.budget(100_000, learn=False), pytest.raises(rekindle.OutOfBudget):
        optimizer.step()
    for each in (*weights, *(weight.grad for weight in weights)):
        assert each is not None
        assert torch.equal(each, torch.ones(1000))
    assert torch.equal(optimizer.seen, torch.zeros(1000))
    assert view.data_ptr() == weights[0].data_ptr()


def test_range_of_another_thread_does_not_end_undo_of_a_step() -> None:
    """A loader in another thread opens and closes such a range for each batch."""
    entered, leave, left = (threading.Event() for _ in range(3))

    def loads() -> None:
        with torch.autograd.profiler.record_function("a batch"):
            entered.set()
            leave.wait(60)
        left.set()

    def lets_it_end() -> None:
        leave.set()
        left.wait(60)

    weights = two_weights()
    optimizer = Writes(weights, lambda weight: weight.sub_(1))
    optimizer.between = lets_it_end
    with rekindle.budget(100_000, learn=False):
        thread = threading.Thread(target=loads)
        thread.start()
        entered.wait(60)
        with pytest.raises(rekindle.OutOfBudget):
            optimizer.step()
        thread.join()
    assert all(torch.equal(each, torch.ones(1000)) for each in weights)


def test_operators_after_failed_step_are_evicted_again() -> None:
    class Fails(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.ones(1 << 20)

    weight = nn.Parameter(torch.rand(1000))
    weight.grad = torch.zeros(1000)
    with rekindle.budget(40_000, evict="anything", learn=False) as run:
        with pytest.raises(rekindle.OutOfBudget):
            Fails([weight], 0.1).step()
        with torch.no_grad():
            made = [weight * number for number in range(50)]
        assert run.evictions
        assert all(torch.equal(each, weight * n) for n, each in enumerate(made))


class Scaled(torch.optim.Optimizer):
    """An optimizer whose step has another argument."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {})

    def step(self, closure: Any = None, *, scale: float = 1.0) -> float:  # type: ignore[override]
        if isinstance(closure, float):
            scale, loss = closure, 0.0
        else:
            loss = float(closure().detach())
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each.sub_(scale * each.grad)
        return loss


@pytest.mark.parametrize("way", ["closure first", "closure by name", "a number"])
def test_step_gets_all_its_arguments(way: str) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = Scaled([weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    with rekindle.budget(1 << 20, learn=False):
        if way == "closure first":
            optimizer.step(closure, scale=0.25)
        elif way == "closure by name":
            optimizer.step(scale=0.25, closure=closure)
        else:
            closure()
            optimizer.step(0.25)
    assert torch.equal(weight.detach(), torch.full((4,), 0.75))
