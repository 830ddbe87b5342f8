"""Tests that copies of random generator states (`torch.get_rng_state()`) count in the budget."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle import Run
from tests.pytorch import cores
from tests.pytorch.allocations import allocated

Evict = Literal["auto", "anything"]
Draws = Callable[[], list[Tensor]]

STATE = torch.get_rng_state().nbytes
BUDGET = 2 << 20


@pytest.fixture(autouse=True)
def _built() -> None:
    torch.manual_seed(0)


def step(model: nn.Module) -> list[Tensor]:
    """Keep ten generator states for each layer: 1 MiB in all."""
    h, states = torch.randn(256, 64), list[Tensor]()
    for layer in model.children():
        h = layer(h).tanh()
        states += [torch.get_rng_state() for _ in range(10)]
    h.sum().backward()
    return states


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])


def test_generator_states_held_by_program_count_in_budget() -> None:
    model, plain = layers(), layers()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    wanted = step(plain)
    within(model)  # PyTorch and Rekindle allocate some objects once, at first use
    model.zero_grad()
    torch.manual_seed(1)
    runs: list[Run] = []
    found: list[Tensor] = []
    most = allocated(lambda: runs.append(within(model, found))).peak
    (run,) = runs
    assert run.recomputations > 0
    assert len(wanted) * STATE < run.peak <= BUDGET
    assert most <= BUDGET
    assert all(map(torch.equal, found, wanted))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def within(model: nn.Module, found: list[Tensor] | None = None) -> Run:
    with rekindle.budget(BUDGET, learn=False) as run:
        states = step(model)
    if found is not None:
        found += states
    return run


def test_deleted_generator_states_no_longer_count_in_budget() -> None:
    with rekindle.budget(BUDGET, learn=False) as run:
        before = run._driver.engine.memory
        states = [torch.get_rng_state() for _ in range(10)]
        assert run._driver.engine.memory == before + 10 * STATE
        del states
        torch.ones(1)
        assert run._driver.engine.memory < before + STATE
    run._driver.engine.check()


def test_generator_state_that_does_not_fit_raises_out_of_budget() -> None:
    with rekindle.budget(10 * STATE, learn=False):
        states = [torch.get_rng_state() for _ in range(10)]
        with pytest.raises(rekindle.OutOfBudget, match=r"Generator\.get_state"):
            torch.get_rng_state()
        assert len(states) == 10


def test_states_of_custom_generators_count_immediately() -> None:
    method = vars(torch.Generator)["get_state"]
    generator = torch.Generator().manual_seed(3)
    with rekindle.budget(10 * STATE, learn=False) as run:
        before = run._driver.engine.memory
        states = [generator.get_state() for _ in range(5)]
        assert run._driver.engine.memory == before + 5 * STATE
        with torch.random.fork_rng(devices=[]):
            assert run._driver.engine.memory == before + 6 * STATE
        torch.ones(1)
        assert run._driver.engine.memory < before + 6 * STATE
        states += [generator.get_state() for _ in range(5)]
        with pytest.raises(rekindle.OutOfBudget, match=r"Generator\.get_state"):
            generator.get_state()
        assert len(states) == 10
    assert vars(torch.Generator)["get_state"] is method


@pytest.mark.parametrize("evict", ["auto", "anything"])
def test_evicted_generator_state_can_be_set_again(evict: Evict) -> None:
    generator = torch.Generator().manual_seed(3)
    with rekindle.budget("1MiB", evict=evict, learn=False) as run:
        state = generator.get_state().clone()
        wanted = torch.rand(5, generator=generator)
        run._driver.core.evict_all(run._driver.handle)
        generator.set_state(state)
        assert torch.equal(torch.rand(5, generator=generator), wanted)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(5), wanted)


def test_generator_state_of_outside_thread_does_not_count() -> None:
    states: list[Tensor] = []
    begin = threading.Event()

    def take() -> None:
        begin.wait()
        states.extend(torch.get_rng_state() for _ in range(11))

    thread = threading.Thread(target=take)
    thread.start()
    with rekindle.budget(10 * STATE, learn=False):
        begin.set()
        thread.join()
    assert len(states) == 11


def test_generator_states_of_checkpoints_count_in_budget() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh())
    budget = 400 << 10
    runs: list[Run] = []

    def blocks() -> None:
        with rekindle.budget(budget, learn=False) as run:
            x = torch.randn(128, 64, requires_grad=True)
            for _ in range(12):
                x = checkpoint(block, x, use_reentrant=False)
            x.sum().backward()
        runs.append(run)

    blocks()  # PyTorch and Rekindle allocate some objects once, at first use
    assert allocated(blocks).peak <= budget
    assert runs[-1].recomputations > 0
    assert runs[-1].peak <= budget


def seeded_before_each() -> list[Tensor]:
    drawn: list[Tensor] = []
    for seed in range(100):
        torch.manual_seed(seed)
        drawn.append(torch.rand(1_000, requires_grad=True).sin())
    return drawn


def from_three_generators() -> list[Tensor]:
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    x = torch.ones(1_000, requires_grad=True)
    return [
        (x * torch.rand(1_000, generator=generators[number % 3])).sin() for number in range(102)
    ]


def set_back_before_each() -> list[Tensor]:
    torch.rand(100_000)  # a generator position far from its seed
    state = torch.get_rng_state()
    x = torch.ones(1_000, requires_grad=True)
    drawn: list[Tensor] = []
    for number in range(100):
        torch.set_rng_state(state)
        drawn.append((x * torch.rand(1_000 + number % 2)[:1_000]).sin())
    return drawn


@pytest.mark.parametrize("draws", [seeded_before_each, from_three_generators, set_back_before_each])
def test_operators_share_copies_of_equal_generator_states(draws: Draws) -> None:
    """A recipe stores how far the generator had advanced. A copy of its state takes 2,496 bytes."""
    torch.manual_seed(1)
    wanted = draws()
    torch.manual_seed(1)
    before = cores.bytes_of_positions()
    with rekindle.budget("1GiB", learn=False) as run:
        found = draws()
        positions = cores.bytes_of_positions() - before
        run._driver.core.evict_all(run._driver.handle)
        for each in found:
            each.sum().backward()  # recomputes the saved values
    assert run.recomputations >= len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert 100 * 50 < positions < 100 * 300
    del each, found, run
    gc.collect()
    assert cores.bytes_of_positions() == before
