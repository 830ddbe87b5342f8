"""States of generators, which no operator makes, are within the budget."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle.pytorch import Run
from rekindle.pytorch.native import core, why_not
from tests.pytorch.allocations import allocated

STATE = torch.get_rng_state().nbytes
BUDGET = 2 << 20


@pytest.fixture(autouse=True)
def _built() -> None:
    if core() is None:
        pytest.skip(f"no native core: {why_not()}")
    torch.manual_seed(0)


def step(model: nn.Module) -> list[Tensor]:
    """A step that keeps ten states beside each layer: 1 MiB in all."""
    h, states = torch.randn(256, 64), list[Tensor]()
    for layer in model.children():
        h = layer(h).tanh()
        states += [torch.get_rng_state() for _ in range(10)]
    h.sum().backward()
    return states


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])


def test_random_states_kept_are_within_the_budget() -> None:
    model, plain = layers(), layers()
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    wanted = step(plain)
    within(model)  # whatever is made once is there
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
    with rekindle.budget(BUDGET, core="native", learn=False) as run:
        states = step(model)
    if found is not None:
        found += states
    return run


def test_random_states_no_longer_kept_count_no_more() -> None:
    with rekindle.budget(BUDGET, core="native", learn=False) as run:
        before = run._driver.engine.memory
        states = [torch.get_rng_state() for _ in range(10)]
        assert run._driver.engine.memory == before + 10 * STATE
        del states
        torch.ones(1)
        assert run._driver.engine.memory < before + STATE
    run._driver.engine.check()


def test_random_state_without_room_is_refused() -> None:
    with rekindle.budget(10 * STATE, core="native", learn=False):
        states = [torch.get_rng_state() for _ in range(10)]
        with pytest.raises(rekindle.OutOfBudget, match="get_rng_state"):
            torch.get_rng_state()
        assert len(states) == 10


def test_random_state_of_another_thread_is_its_own_affair() -> None:
    states: list[Tensor] = []
    begin = threading.Event()

    def take() -> None:
        begin.wait()
        states.extend(torch.get_rng_state() for _ in range(11))

    thread = threading.Thread(target=take)
    thread.start()
    with rekindle.budget(10 * STATE, core="native", learn=False):
        begin.set()
        thread.join()
    assert len(states) == 11


def test_random_states_of_checkpoints_are_within_the_budget() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh())
    budget = 400 << 10
    runs: list[Run] = []

    def blocks() -> None:
        with rekindle.budget(budget, core="native", learn=False) as run:
            x = torch.randn(128, 64, requires_grad=True)
            for _ in range(12):
                x = checkpoint(block, x, use_reentrant=False)
            x.sum().backward()
        runs.append(run)

    blocks()  # whatever is made once is there
    assert allocated(blocks).peak <= budget
    assert runs[-1].recomputations > 0
    assert runs[-1].peak <= budget
