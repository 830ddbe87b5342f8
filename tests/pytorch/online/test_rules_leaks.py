"""Tests of rule R2 (recipes): bookkeeping ends with the graph, after single steps and in long runs.

The garbage collector would hide reference cycles, so it is off in tests of single steps.
"""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Run
from rekindle.schedule import verify
from tests.pytorch import cores
from tests.pytorch.harsh import WIDTH, deeper, vector

TIGHT = 14 * 4 * WIDTH


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Bang(Exception):
    pass


def entries(run: Run) -> tuple[int, int, int]:
    """Return the numbers of storages in the engine and of native records, and the bytes in use."""
    torch.zeros(())  # Rekindle notices freed storages at the next operator
    now = run._driver.engine.now()
    return now.storages, now.alive, run.memory


def plain_step(weight: Tensor) -> None:
    deeper(weight, 8).sum().backward()
    weight.grad = None


def kept_graph(weight: Tensor) -> None:
    loss = deeper(weight, 8).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    weight.grad = None


def forward_only(weight: Tensor) -> None:
    deeper(weight, 8).sum()


def without_grad(weight: Tensor) -> None:
    with torch.no_grad():
        deeper(weight, 8).sum()


def penalty(weight: Tensor) -> None:
    (slope,) = torch.autograd.grad(deeper(weight, 2).sum(), weight, create_graph=True)
    torch.autograd.grad(slope.square().sum(), weight)


def writes(weight: Tensor) -> None:
    x = (weight * 2).neg_().add_(1).mul_(0.3)
    x.data.mul_(0.5)
    torch.zeros_like(x).add_(x)[3:9].fill_(2)
    deeper(x, 8).sum().backward()
    weight.grad = None
    with torch.no_grad():
        weight.mul_(0.99).add_(0.01)


def statistics(weight: Tensor) -> None:
    mean, variance = torch.zeros(50), torch.ones(50)
    x = weight.view(20, 50)
    for _ in range(2):
        x = nn.functional.batch_norm(x.sin() * x, mean, variance, training=True)
        x = nn.functional.dropout(x, 0.1) + x.topk(50).values.sum()
    x.square().sum().backward()
    weight.grad = None


def out_of_budget(weight: Tensor) -> None:
    @torch.no_grad()  # with a graph, all values could be evicted
    def hoard() -> None:
        rows = [weight]
        while True:
            rows.append(rows[-1].sin())

    with pytest.raises(rekindle.OutOfBudget):
        hoard()


STEPS = [plain_step, kept_graph, forward_only, without_grad, penalty, writes, statistics]


@pytest.mark.parametrize("step", [*STEPS, out_of_budget], ids=lambda step: step.__name__)
def test_each_kind_of_training_step_leaves_no_bookkeeping(
    step: Callable[[Tensor], None], no_collector: None
) -> None:
    weight = vector(True)
    with rekindle.budget(TIGHT) as run:
        step(weight)
        step(weight)
        gc.collect()  # objects that torch makes on first use
        before = entries(run)
        for _ in range(3):
            step(weight)
            if step is out_of_budget:
                gc.collect()  # a traceback is a reference cycle of the test itself
        assert all(now <= then for now, then in zip(entries(run), before, strict=True))
        run._driver.engine.check()
    assert run.evictions > 0 or step in (without_grad, out_of_budget)


def test_native_core_is_freed_after_end_of_budget(no_collector: None) -> None:
    """The core's object for a budget (driver) is freed once budget, loss and `run` are deleted."""
    weight = vector(True)
    with rekindle.budget(TIGHT) as run:
        plain_step(weight)
    driver = weakref.ref(run._driver)
    del run
    assert driver() is None


def test_deleting_the_loss_last_frees_memory_of_its_graph(no_collector: None) -> None:
    """Memory of an activation that only autograd and Rekindle hold is freed with the loss."""
    weight = vector(True)
    with rekindle.budget(1_000 * TIGHT) as run:
        x = weight.sin()
        memory = weakref.ref(x.untyped_storage())
        loss = (x * x).sum()
        del x
    del run
    assert memory() is not None
    del loss
    assert memory() is None


@pytest.mark.parametrize("layers", [3, 40], ids=["in the forward pass", "in the backward pass"])
def test_memory_of_graph_is_freed_after_exception(layers: int, no_collector: None) -> None:
    """Memory that only the graph held is freed with it, although `run` still exists.

    Rekindle usually notices freed storages at the next operator. After the budget there is none.
    """
    weight = vector(True)
    watched: list[weakref.ref[torch.UntypedStorage]] = []

    def bang(gradient: Tensor) -> None:
        raise Bang

    def fail() -> None:
        x = weight.sin()
        watched.append(weakref.ref(x.untyped_storage()))
        x = deeper(x, layers)
        watched.append(weakref.ref(x.untyped_storage()))
        x = x.exp()
        watched.append(weakref.ref(x.untyped_storage()))
        if layers == 3:
            raise Bang
        weight.register_hook(bang)
        x.sum().backward()

    with pytest.raises(Bang), rekindle.budget(40 * 4 * WIDTH) as run:
        fail()
    assert [reference() for reference in watched] == [None] * 3
    assert run.memory <= 3 * 4 * WIDTH
    assert run.peak > 10 * 4 * WIDTH


def test_deleting_the_loss_after_budget_frees_memory_of_graph(no_collector: None) -> None:
    """Deleting the loss after the budget frees all memory, with or without `run` alive."""
    weight = vector(True)
    with rekindle.budget(1_000 * TIGHT) as run:
        x = weight.sin()
        memory = weakref.ref(x.untyped_storage())
        loss = deeper(x * x).sum()
        del x
    assert memory() is not None
    assert run.memory > 10 * 4 * WIDTH
    del loss
    assert memory() is None
    assert run.memory <= 2 * 4 * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("step", [plain_step, writes, statistics], ids=lambda step: step.__name__)
def test_two_thousand_steps_do_not_grow_bookkeeping(step: Callable[[Tensor], None]) -> None:
    weight = vector(True)
    with rekindle.budget(TIGHT) as run:
        for _ in range(200):
            step(weight)
        gc.collect()
        before, memory = entries(run), _resident()
        for _ in range(1_800):
            step(weight)
        gc.collect()
        assert entries(run) == before
        assert _resident() < memory + 4_000_000


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- values carried from graph to graph ----------------------------------------------------------


class Recurrent(nn.Module):
    """A network that carries its state from one batch to the next."""

    def __init__(self, *, asks_for_gradient: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, WIDTH // 4) / 2)
        self.mix = nn.Parameter(torch.eye(4))
        self.asks_for_gradient = asks_for_gradient
        self.state = torch.zeros(4, WIDTH // 4)

    def forward(self, batch: Tensor) -> Tensor:
        state = self.state
        for _ in range(8):
            state = torch.tanh(self.mix @ state + self.weight * batch).sin()
        self.state = state.detach()
        if self.asks_for_gradient:
            self.state.requires_grad_()
        return state.square().mean()


def train(model: Recurrent, after: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Train without an optimizer, whose steps would end the chain of recipes from step to step."""
    for number in range(40):
        batch = torch.randn(4, WIDTH // 4, generator=torch.Generator().manual_seed(number))
        model(batch).backward()
        del batch
        after()
    return [model.state, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def short_memory() -> Iterator[int]:
    longest = 200
    with cores.short_memory(longest):
        yield longest


@pytest.mark.parametrize("asks_for_gradient", [False, True])
@pytest.mark.parametrize(
    "setting", [{}, {"evict": "anything"}, {"learn": True}], ids=["saved", "anything", "learn"]
)
def test_recurrent_state_does_not_keep_old_batches_alive(
    setting: dict[str, Any], asks_for_gradient: bool, short_memory: int
) -> None:
    wanted = train(Recurrent(asks_for_gradient=asks_for_gradient))
    model = Recurrent(asks_for_gradient=asks_for_gradient)
    known: list[int] = []

    def count() -> None:
        known.append(len(list(run._driver.engine.storages)))

    with rekindle.budget(TIGHT, **setting) as run:
        found = train(model, count)
    assert run.evictions > 100
    # the longest allowed chain and the values made from it, until the core checks the length again
    assert max(known) < 4 * short_memory
    assert len(found) == 3
    assert all(map(torch.equal, found, wanted))


def test_recurrent_state_without_chain_limit_keeps_batches_alive() -> None:
    """The state could be recomputed from all earlier batches, so these stay in memory.

    This shows that the test before this one can fail.
    """
    model = Recurrent()
    with cores.short_memory(1_000_000), rekindle.budget(TIGHT) as run:
        train(model)
        assert len(list(run._driver.engine.storages)) > 1_000


def test_record_of_run_with_chain_limit_passes_verifier(short_memory: int) -> None:
    """The chain limit takes the recipes of some values away, which a trace cannot express."""
    with rekindle.budget(TIGHT, record=True) as run:
        train(Recurrent())
    trace, record = run.trace, run.record
    assert verify(trace, record.schedule, TIGHT).recomputations == record.recomputations > 0
    simulated = rekindle.simulate(trace, budget=TIGHT)
    assert simulated.actions == record.actions


# -- values carried from step to step ------------------------------------------------------------


class Loop:
    """Train with Adam and keep a running mean of a measure of each step."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.model = nn.Sequential(first, nn.Tanh(), nn.Dropout(dropout), second)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.loss = loss
        self.mean = torch.zeros(())

    def step(self) -> None:
        batch = torch.rand(256, 64)
        loss = self.loss(self.model(batch), batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()


def _squares(result: Tensor, _: Tensor) -> Tensor:
    return result.square().mean()


KINDS_OF_LOSS = [nn.functional.mse_loss, nn.functional.smooth_l1_loss, _squares]


@pytest.mark.parametrize("setting", [{}, {"evict": "anything"}, {"swap": "1GiB"}], ids=str)
@pytest.mark.parametrize("loss", KINDS_OF_LOSS, ids=lambda loss: loss.__name__)
def test_running_mean_of_losses_does_not_keep_batches_alive(
    loss: Any, setting: dict[str, Any]
) -> None:
    """The model, which is built inside the budget, does not keep batches alive either."""
    plain = Loop(loss, dropout=0.1)
    for _ in range(60):
        plain.step()
    known: list[tuple[int, int]] = []
    with rekindle.budget("1GiB", **setting) as run:
        ours = Loop(loss, dropout=0.1)
        for number in range(60):
            ours.step()
            if number % 20 == 19:
                known.append((run.memory, len(list(run._driver.engine.storages))))
        run._driver.engine.check()
    assert known[0] == known[1] == known[2]
    assert torch.equal(ours.mean, plain.mean)


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_running_mean_without_optimizer_keeps_no_batch_alive(evict: Any) -> None:
    """Batches that are kept only to recompute the mean are freed when memory is needed.

    The mean itself is then kept in memory.
    """
    mean = torch.zeros(())
    with rekindle.budget(600_000, evict=evict) as run:
        for _ in range(100):
            mean = 0.9 * mean + 0.1 * nn.functional.mse_loss(*torch.rand(2, 100, 100).unbind())
            assert run.memory <= 600_000
    assert 0.1 < float(mean) < 0.3


def test_running_mean_keeps_no_batch_of_earlier_budgets() -> None:
    """Each budget ends with a value that the program holds, and the program keeps each `run`."""
    layer, mean = nn.Linear(WIDTH, WIDTH, bias=False), torch.zeros(WIDTH)
    batches, runs = [], []
    for _ in range(4):
        batch = torch.rand(8, WIDTH)
        batches.append(weakref.ref(batch.untyped_storage()))
        with rekindle.budget(layer.weight.nbytes + 3 * batch.nbytes) as run:
            y = layer(batch)
            mean = 0.9 * mean + 0.1 * y.detach().mean(0)
        runs.append(run)
        y.square().mean().backward()
        layer.weight.grad = None
        del batch, y
    gc.collect()
    assert [each() for each in batches] == [None] * 4
