"""Tests of known optimizers: the memory of a step is measured once, and steps are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import rekindle
from rekindle.pytorch.native import is_seen
from rekindle.pytorch.online import _optimizers
from tests.pytorch.bits import differing
from tests.pytorch.tracker import Tracker, measure

WIDTH = 32


def inside() -> bool:
    """Return True if operators of this thread are seen."""
    return is_seen()


class Program:
    """A chain of layers, trained by the optimizer that is asked for."""

    def __init__(self, kind: Callable[..., optim.Optimizer] = optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2} | options)
        self.batch = torch.randn(64, WIDTH)

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.backward()
        self.optimizer.step()
        return loss

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in state.items()}
        return found


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> list[optim.Optimizer]:
    """Whose steps were run on shapes, to find out what they take."""
    found: list[optim.Optimizer] = []
    find_out = _optimizers.bytes_of_step

    def bytes_of_step(optimizer: optim.Optimizer, device: torch.device) -> int:
        found.append(optimizer)
        return find_out(optimizer, device)

    monkeypatch.setattr(_optimizers, "bytes_of_step", bytes_of_step)
    return found


KINDS = [
    (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (optim.SGD, {}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.RMSprop, {"centered": True}),
    (optim.Adagrad, {}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_weights_and_state_equal_plain_pytorch(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    plain, ours = Program(kind, **options), Program(kind, **options)
    for _ in range(6):
        plain.step()
    with rekindle.budget("1GiB"):
        for _ in range(6):
            ours.step()
    assert differing(ours.state(), plain.state()) == []


@pytest.mark.parametrize("foreach", [False, True])
def test_its_temporaries_stay_below_the_budget(foreach: bool) -> None:
    """Their peak is reached in the optimizer, far above that of the passes."""
    plain, ours = Program(foreach=foreach), Program(foreach=foreach)
    plain.batch, ours.batch = plain.batch[:2], ours.batch[:2]
    plain.step()
    limit = measure(lambda: (plain.step(), plain.step())).peak
    with Tracker() as tracker, rekindle.budget(limit) as run:
        for _ in range(5):
            ours.step()
        assert run.peak <= limit
    assert tracker.peak <= limit
    weights = {name: value.clone() for name, value in ours.state().items()}
    with rekindle.budget(limit - 512):
        ours.backward()
        with pytest.raises(rekindle.OutOfBudget, match=r"AdamW\.step\(\) needs"):
            ours.optimizer.step()
        assert inside()
    assert differing(ours.state(), weights) == []


def test_step_memory_is_measured_once(dry_runs: list[optim.Optimizer]) -> None:
    """Also if a held loss was made from values that have no other reader."""
    cell = nn.LSTMCell(8, 8)
    optimizer = optim.SGD(cell.parameters(), lr=0.1)
    with rekindle.budget("1GiB"):
        for _ in range(5):
            hidden = state = torch.zeros(2, 8)
            for batch in torch.ones(3, 2, 8):
                hidden, state = cell(batch, (hidden, state))
            loss = hidden.sum()
            optimizer.zero_grad()
            loss.backward()
            del hidden, state
            optimizer.step()
    assert len(dry_runs) <= 2


def test_step_memory_is_shared_between_contexts(
    dry_runs: list[optim.Optimizer],
) -> None:
    plain, ours = Program(), Program()
    for _ in range(4):
        plain.step()
    for _ in range(4):
        with rekindle.budget("1GiB"):
            ours.step()
    assert len(dry_runs) <= 2
    assert differing(ours.state(), plain.state()) == []


def _more_decay(program: Program) -> None:
    program.optimizer.param_groups[0]["weight_decay"] = 0.3


def _frozen(program: Program) -> None:
    program.model[0].requires_grad_(False)


def _another_group(program: Program) -> None:
    program.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize("change", [_more_decay, _frozen, _another_group])
def test_step_memory_of_changed_step_is_measured_again(
    dry_runs: list[optim.Optimizer], change: Callable[[Program], None]
) -> None:
    ours, plain = Program(optim.Adam), Program(optim.Adam)
    with rekindle.budget("1GiB"):
        for _ in range(4):
            ours.step()
        before = len(dry_runs)
        change(ours)
        for _ in range(4):
            ours.step()
    for _ in range(4):
        plain.step()
    change(plain)
    for _ in range(4):
        plain.step()
    assert before <= 2 < len(dry_runs) <= 4
    assert differing(ours.state(), plain.state()) == []


def test_the_learning_rate_may_move(dry_runs: list[optim.Optimizer]) -> None:
    ours = Program()
    schedule = optim.lr_scheduler.ExponentialLR(ours.optimizer, 0.9)
    with rekindle.budget("1GiB"):
        for _ in range(4):
            ours.step()
            schedule.step()
    assert len(dry_runs) <= 2


def test_step_after_failed_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is what autograd saves, and the budget holds."""
    ours = Program()
    with rekindle.budget("1GiB") as run:
        for _ in range(3):
            ours.step()
        before = run.peak
        ours.backward()
        with monkeypatch.context() as patch:
            patch.setattr(optim.AdamW, "_init_group", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ours.optimizer.step()
        clock = run._driver.engine.clock
        ours.backward()
        assert run._driver.engine.clock > clock
        assert inside()
        assert run.peak >= before
        ours.optimizer.step()
    assert not inside()


def test_a_context_left_by_a_failing_step_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Program()

    def train() -> None:
        with rekindle.budget("1GiB"):
            for _ in range(3):
                ours.step()
            monkeypatch.setattr(optim.AdamW, "_init_group", lambda *_: 1 / 0)
            ours.step()

    with pytest.raises(ZeroDivisionError):
        train()
    assert not inside()
    with rekindle.budget("1GiB"):
        ours.backward()


def test_backward_through_weights_that_a_step_changed_is_refused() -> None:
    """As plain PyTorch does; the step that changed them was not looked at (R7)."""
    ours = Program(optim.SGD)
    with rekindle.budget("1GiB"):
        for _ in range(3):
            ours.step()
        loss = ours.model(ours.batch).square().mean()
        loss.backward(retain_graph=True)
        ours.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_values_made_from_the_weights_are_saved_first() -> None:
    """An evicted value that reads a weight is recomputed before the weight moves (R4)."""

    def losses(program: Program) -> Iterator[Tensor]:
        for _ in range(4):
            program.step()
        x = program.batch
        for _ in range(8):  # not through saved weights: only recipes read them
            x = (x * 1.5).tanh() + program.model[0].bias
        program.backward()
        program.optimizer.step()
        x.sum().backward()
        yield program.model[0].bias.grad

    ours, plain = Program(), Program()
    wanted = list(losses(plain))
    with rekindle.budget(250_000):
        got = list(losses(ours))
    assert all(map(torch.equal, got, wanted))
    assert differing(ours.state(), plain.state()) == []


def test_learned_plans_are_followed_with_known_optimizer() -> None:
    plain, ours = Program(), Program()
    for _ in range(10):
        plain.step()
    measured = measure(lambda: (plain.step(), plain.step()))
    plain = Program()
    for _ in range(10):
        plain.step()
    with rekindle.budget(measured.budget(0.6), learn="wait") as run:
        for _ in range(10):
            ours.step()
        assert run.steps_followed >= 3
    assert differing(ours.state(), plain.state()) == []
