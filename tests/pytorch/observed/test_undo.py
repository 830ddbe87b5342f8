"""Tests of undoing a training step that Rekindle runs only to measure it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.observed._before import Undo

WAYS: dict[str, Callable[[Callable[[], object]], object]] = {
    "profile": rekindle.profile,
    "verify": lambda step: rekindle.verify(step, budget="1MiB"),
    "max_batch": lambda step: rekindle.max_batch(lambda size: step, budget="1MiB", at_most=2),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Stateful(nn.Module):
    """A step that changes state other than parameters: attributes and a random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.last = torch.zeros(8)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(8, generator=self.generator)
        y = (self.layer(x) * noise + self.last).tanh()
        self.last = y[0].detach()
        return y


class Lazy(nn.Module):
    """A layer that gets its sizes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@ways
@pytest.mark.parametrize("kind", [Stateful, Lazy])
def test_training_after_undone_step_matches_pytorch(
    kind: type[nn.Module], way: Callable[[Callable[[], object]], object]
) -> None:
    x = torch.rand(32, 8)

    def losses(learn: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = kind()

        def step() -> Tensor:
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad  # type: ignore[operator]
            return loss.detach()

        if learn:
            way(step)
        return [step() for _ in range(3)]

    assert all(map(torch.equal, losses(learn=True), losses(learn=False)))


@ways
def test_undo_restores_assigned_data_of_weights(
    way: Callable[[Callable[[], object]], object],
) -> None:
    """As in MoCo, whose second network follows the first by assignments to `parameter.data`."""
    model, follower = nn.Linear(8, 8), nn.Linear(8, 8)
    view = follower.weight[0].detach()
    before = follower.weight.detach().clone()

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        for mine, other in zip(follower.parameters(), model.parameters(), strict=True):
            mine.data = mine.data * 0.9 + other.data * 0.1

    way(step)
    assert torch.equal(follower.weight, before)
    assert view.data_ptr() == follower.weight.data_ptr()
    step()
    assert not torch.equal(follower.weight, before)


@ways
def test_undo_ignores_uninitialized_lazy_layer_elsewhere(
    way: Callable[[Callable[[], object]], object],
) -> None:
    elsewhere = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model = nn.Linear(8, 8)
    way(lambda: model(torch.rand(4, 8)).sum().backward())
    with rekindle.budget("auto"):
        assert elsewhere(torch.rand(3, 5)).shape == (3, 4)


def test_state_comparison_detects_step_that_is_not_undone() -> None:
    """Without restoring, the state differs after a step. So the tests of undoing can fail."""
    model = Stateful()
    before = [model.layer.weight.clone(), model.last, model.generator.get_state()]
    undo = Undo()
    with undo:
        model(torch.rand(4, 8)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()

    def now() -> list[Tensor]:
        return [model.layer.weight, model.last, model.generator.get_state()]

    assert not any(map(torch.equal, before, now()))
    undo.restore()
    assert all(map(torch.equal, before, now()))
    assert model.calls == 0
    assert model.layer.weight.grad is None


def test_undo_restores_storage_that_step_resized() -> None:
    x = torch.arange(6.0)
    undo = Undo()
    with undo:
        x.resize_(2).fill_(9)
        x.untyped_storage().resize_(0)
    undo.restore()
    assert torch.equal(torch.empty(0).set_(x.untyped_storage()), torch.arange(6.0))


def test_undo_does_not_keep_freed_memory() -> None:
    """If copies kept freed memory, it would count as used while the step is measured."""
    kept = [torch.rand(100)]
    home = kept[0].untyped_storage()
    undo = Undo()
    deaths: list[None] = []
    weakref.finalize(home, deaths.append, None)
    del home
    with undo:
        kept[0] = kept[0] * 2
    assert len(deaths) == 1
    undo.restore()
