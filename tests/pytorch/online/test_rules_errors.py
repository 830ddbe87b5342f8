"""Tests of rule R10 (after the context) with exceptions.

After any exception no mode or hook is left, and training continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import rekindle
from rekindle.pytorch.native import is_seen
from tests.pytorch import cores
from tests.pytorch.harsh import WIDTH, differing, everything, vector

TIGHT = 14 * 4 * WIDTH
ROOMY = 1_000 * 4 * WIDTH


def hooks_on() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or is_seen()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """After each test, assert that no mode or hook is left and that a budget can be entered."""
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert not hooks_on()
    with rekindle.budget(ROOMY):
        assert hooks_on()
    assert not hooks_on()


class Trainer:
    """A few layers and an optimizer with state; `fail` may raise during the step."""

    def __init__(self) -> None:
        torch.manual_seed(20)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)]
        self.network = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        self.batch = torch.rand(300, 4)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.network(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def results(self) -> dict[str, object]:
        return everything((self.network, list(self.optimizer.state.values())))


class Bang(Exception):
    pass


#: Errors to expect from `core.interrupt`, which raises a plain `RuntimeError` instead of
#: `KeyboardInterrupt`.
Interrupted = (KeyboardInterrupt, RuntimeError)


def _from_a_forward_hook(trainer: Trainer, _: pytest.MonkeyPatch) -> Callable[[], None]:
    def bang(*_: object) -> None:
        raise Bang

    return trainer.network[4].register_forward_hook(bang).remove


def _from_a_backward_hook(trainer: Trainer, _: pytest.MonkeyPatch) -> Callable[[], None]:
    def bang(*_: object) -> None:
        raise Bang

    (weight,) = (p for name, p in trainer.network.named_parameters() if name == "2.0.weight")
    return weight.register_hook(bang).remove


def _before_recomputation(_: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return _interrupted(before=True)


def _after_recomputation(_: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return _interrupted(before=False)


def _interrupted(*, before: bool) -> Callable[[], None]:
    cores.tune(lambda driver: driver.core.interrupt(driver.handle, 3, before))
    return cores.tune_no_more


def _from_an_operator(trainer: Trainer, _: pytest.MonkeyPatch) -> Callable[[], None]:
    layer = trainer.network[4][0]
    trainer.network[4][0] = nn.Linear(9, 4)  # a layer of the wrong size

    def undo() -> None:
        trainer.network[4][0] = layer

    return undo


FAILURES = {
    _from_a_forward_hook: Bang,
    _from_a_backward_hook: Bang,
    _before_recomputation: Interrupted,
    _after_recomputation: Interrupted,
    _from_an_operator: RuntimeError,
}


@pytest.mark.parametrize("inside", [True, False], ids=["caught inside", "caught outside"])
@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_training_after_failed_hook_or_operator_matches_pytorch(
    fail: Callable[..., Callable[[], None]], inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test fails if an error leaves a locked storage, a record, a mode or a count behind."""
    budget = 42_000
    plain = Trainer()
    for _ in range(3):
        plain.step()
    wanted = plain.results()

    trainer = Trainer()
    with rekindle.budget(budget) as run:
        trainer.step()
    assert run.recomputations > 0
    state = torch.get_rng_state()
    undo = fail(trainer, monkeypatch)
    if inside:
        with rekindle.budget(budget) as run:
            with pytest.raises(FAILURES[fail]):
                trainer.step()
            undo()
            torch.set_rng_state(state)
            run._driver.engine.check()
            trainer.step()
            trainer.step()
            run._driver.engine.check()
    else:
        with pytest.raises(FAILURES[fail]), rekindle.budget(budget) as run:
            trainer.step()
        undo()
        torch.set_rng_state(state)
        with rekindle.budget(budget) as run:
            trainer.step()
            trainer.step()
    assert run.recomputations > 0
    assert differing(trainer.results(), wanted) == []


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_backward_pass_repeated_after_interrupt_matches_pytorch(before: bool) -> None:
    """An interrupted chain of in-place writes must not continue from half-written memory."""

    def loss_of(weight: Tensor) -> Tensor:
        x = weight.sin()
        for number in range(8):
            noise = torch.empty_like(x).fill_(0.5).add_(number).mul_(x.detach()).cos_()
            x = x * noise
        return x.sum()

    weight = vector(True)
    plain = torch.autograd.grad(loss_of(weight), weight)[0]
    for nth in range(12):
        with rekindle.budget(TIGHT // 2) as run:
            loss = loss_of(weight)
            run._driver.core.interrupt(run._driver.handle, nth, before)
            with pytest.raises(Interrupted):
                torch.autograd.grad(loss, weight, retain_graph=True)
            run._driver.engine.check()
            (gradient,) = torch.autograd.grad(loss, weight)
            assert torch.equal(gradient, plain)
            run._driver.engine.check()


def test_training_after_out_of_budget_anywhere_matches_pytorch() -> None:
    """The error is raised in the forward pass, the backward pass or the optimizer.

    A step that raises changes no weight.
    """
    plain = Trainer()
    for _ in range(2):
        plain.step()
    wanted = plain.results()
    trainer = Trainer()
    state = torch.get_rng_state()
    where = set()
    budget = 6_000
    for _ in range(2):
        while True:
            weights = everything(trainer.network.state_dict())
            state = torch.get_rng_state()
            try:
                with rekindle.budget(budget) as run:
                    trainer.step()
                break
            except rekindle.OutOfBudget as error:
                where.add(error.operator)
                budget = error.smallest_budget
            torch.set_rng_state(state)
            assert differing(everything(trainer.network.state_dict()), weights) == []
            run._driver.engine.check()
    assert "aten::addmm" in where
    assert len(where) >= 3
    assert differing(trainer.results(), wanted) == []


def test_half_batch_after_out_of_budget_fits_in_same_budget() -> None:
    """The program catches the error inside the budget, and continues with half batches."""
    weight = torch.rand(WIDTH, requires_grad=True)

    def gradient(rows: int) -> Tensor:
        x = weight.expand(rows, WIDTH) * torch.ones(rows, 1)
        return torch.autograd.grad((x.sin() * x).square().sum(), weight)[0]

    plain = gradient(4)
    with rekindle.budget(24 * 4 * WIDTH) as run:
        for _ in range(3):
            with pytest.raises(rekindle.OutOfBudget):
                gradient(20)
            run._driver.engine.check()
            assert torch.equal(gradient(4), plain)
            run._driver.engine.check()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_out_of_budget_replaced_by_library_is_raised_again(
    evict: Literal["saved", "anything"],
) -> None:
    """TorchScript's interpreter discards the error, and `load_state_dict` keeps only its text."""
    scripted = torch.jit.script(fourfold)
    vectors = torch.rand(WIDTH)
    wanted = scripted(vectors)
    whole = partial(rekindle.budget, evict=evict, split="never")
    with pytest.raises(rekindle.OutOfBudget) as refused, whole(9 * WIDTH):
        scripted(vectors)
    assert isinstance(refused.value.__cause__, RuntimeError)
    with whole(refused.value.smallest_budget + 16 * WIDTH):
        assert torch.equal(scripted(vectors), wanted)

    network = nn.Linear(64, 64)
    state = {name: value.double() for name, value in network.state_dict().items()}
    with pytest.raises(rekindle.OutOfBudget) as refused, whole(20_000):
        network.load_state_dict(state)
    assert refused.value.smallest_budget > 20_000
    with whole(100_000):
        network.load_state_dict(state)


def test_out_of_budget_in_pipeline_stage_is_raised_as_itself() -> None:
    """`torch.distributed.pipelining` replaces an error in a stage by one of its own."""
    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def step(budget: int) -> None:
        network.zero_grad()
        with rekindle.budget(budget):
            stage_backward(network(torch.rand(64, 64)).square().mean(), None, [])

    with pytest.raises(rekindle.OutOfBudget, match="aten::") as refused:
        step(80_000)
    assert "Failed to run stage backward" in str(refused.value.__cause__)
    assert refused.value.smallest_budget > 80_000
    step(100_000)


def test_error_in_pipeline_stage_is_raised_unchanged() -> None:
    x = torch.rand(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="Failed to run stage") as error, rekindle.budget(ROOMY):
        stage_backward(x.sin(), None, [])  # backward of a tensor with several elements raises
    assert not isinstance(error.value, MemoryError)


def fourfold(x: Tensor) -> Tensor:
    return torch.cat([x, x, x, x]) * 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_error_in_torchscript_is_raised_unchanged() -> None:
    scripted = torch.jit.script(fourfold)
    with rekindle.budget(9 * WIDTH, split="never"), pytest.raises(RuntimeError):
        scripted(torch.rand(WIDTH))
    with pytest.raises(RuntimeError, match="TorchScript") as error, rekindle.budget(ROOMY):
        scripted(torch.rand(()))
    assert not isinstance(error.value, MemoryError)
