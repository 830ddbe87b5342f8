"""Tests that the step of an unknown optimizer needs no more memory than in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

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
