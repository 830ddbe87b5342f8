"""Tests that the native engine and the Python engine take the same actions on real programs.

The native engine writes a journal (log of events and actions) of a run. The Python engine gets the
same events, and must take the same actions with equal clock and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import rekindle
from rekindle.policies import (
    DTR,
    LRU,
    MSPS,
    Ablation,
    Largest,
    Policy,
    Random,
    Swap,
    Thrifty,
)
from tests.native.journals import KINDS, Replay
from tests.pytorch import cores
from tests.pytorch.harsh import WIDTH, deeper, vector
from tests.pytorch.native.own_policies import Cheapest

VECTOR = 4 * WIDTH
MOST = 200_000
Step = Callable[[], object]


@pytest.fixture(autouse=True)
def _fixed_prices() -> Iterator[None]:
    with cores.fixed_prices():
        yield


def _chain() -> Step:
    weight = vector(True)
    return lambda: deeper(nn.functional.dropout(weight, 0.1), 30).sum().backward()


def _in_place() -> Step:
    weight = vector(True)

    def step() -> None:
        x = weight
        for _ in range(12):
            x = (x * 0.9).add_(0.1).sin()
        x.sum().backward()

    return step


def _unrolled() -> Step:
    cell, head = nn.LSTMCell(8, 8), nn.Linear(8, 1)
    batches = torch.rand(30, 4, 8)

    def step() -> None:
        state = None
        for batch in batches:
            state = cell(batch, state)
        assert state is not None
        head(state[0]).sum().backward()

    return step


def _trained() -> Step:
    layers = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    model = nn.Sequential(*layers)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    batch = torch.rand(64, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _twice_through_one_graph() -> Step:
    weight = vector(True)

    def step() -> None:
        loss = deeper(weight, 20).sum()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        first.square().sum().backward()

    return step


PROGRAMS = [_chain, _in_place, _unrolled, _trained, _twice_through_one_graph]


def _kept() -> Step:
    """Hold intermediate values in a list, some of them written in place, while a step runs."""
    weight = vector(True)

    def step() -> None:
        kept = [weight]
        for _ in range(12):
            kept.append((kept[-1] * 1.5).add_(0.1).tanh())
        torch.stack([each.square().sum() for each in kept]).sum().backward()

    return step


def _without_grad() -> Step:
    x = vector()

    def step() -> None:
        kept = [x]
        with torch.no_grad():
            for _ in range(30):
                kept.append(nn.functional.dropout(kept[-1], 0.1).sin() + kept[len(kept) // 2])
            for each in reversed(kept):
                each.sum()

    return step


def _journal(step: Step, budget: int | None, **options: Any) -> tuple[list[int], rekindle.Run]:
    """Return the journal (log) of two steps in the native engine, as numbers, and the run."""
    with rekindle.budget(budget, **options) as run:
        driver: Any = run._driver
        driver.core.open_journal(driver.handle, MOST)
        step()
        step()
        entries = driver.core.journal(driver.handle)
    assert len(entries) < MOST
    return list(chain.from_iterable(entries)), run


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("part", [None, 0.8, 0.6])
def test_python_engine_repeats_native_run(program: Callable[[], Step], part: float | None) -> None:
    torch.manual_seed(20)
    step = program()
    _, roomy = _journal(step, None)
    budget = None if part is None else int(part * roomy.peak)
    words, run = _journal(step, budget)
    compared = Replay(budget, Thrifty(), driven=True).compare(words)
    assert compared >= run.recomputations + run.evictions
    assert part is None or run.recomputations > 0


#: Policies that the native core implements in C++, and policies in Python that it calls.
POLICIES: list[Policy] = [
    DTR(), DTR("local"), LRU(), Largest(), MSPS(), Ablation(True, False, "exact"),
    DTR("classes"), Random(3), Cheapest(),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_native_policy_evicts_same_storages_as_python_policy(
    program: Callable[[], Step], policy: Policy
) -> None:
    torch.manual_seed(20)
    step = program()
    _, roomy = _journal(step, None)
    budget = int(0.7 * roomy.peak)
    words, run = _journal(step, budget, policy=policy)
    assert run.peak <= budget
    compared = Replay(budget, policy, driven=True).compare(words)
    assert compared >= run.recomputations + run.evictions
    assert run.recomputations > 0


@pytest.mark.evicts_anything
@pytest.mark.parametrize(
    "program", [*PROGRAMS, _kept, _without_grad], ids=lambda each: each.__name__.strip("_")
)
@pytest.mark.parametrize("part", [0.8, 0.6])
def test_python_engine_repeats_native_run_with_evict_anything(
    program: Callable[[], Step], part: float
) -> None:
    torch.manual_seed(20)
    step = program()
    _, roomy = _journal(step, None)
    budget = int(part * roomy.peak)
    words, run = _journal(step, budget, evict="anything")
    kinds = KINDS.split()
    evictable = [word for word in words[::6] if kinds[word] == "set_evictable_while_held"]
    assert evictable, "nothing of what the program holds could go: this tests nothing"
    compared = Replay(budget, Thrifty(), driven=True).compare(words)
    assert compared >= run.recomputations > 0


@pytest.mark.evicts_anything
def test_outdated_copies_are_made_again_in_both_engines(tmp_path: Path) -> None:
    """Writes are noticed by the version counter of a tensor.

    Once that tensor is freed, later writes would go unseen, so the copy on the host is outdated.
    """
    tensors = [torch.full((128, 128), float(i)) for i in range(6)]

    def step() -> None:
        for i, tensor in enumerate(tensors):
            tensor.sum()
            tensors[i] = tensor.detach()

    swap = Swap(1 << 30, out_bytes_per_s=10**10, in_bytes_per_s=10**10)
    budget = 4 * tensors[0].nbytes
    words, run = _journal(step, budget, evict="anything", swap=swap, swap_directory=tmp_path)
    assert KINDS.split().index("outdated") in words[::6]
    assert Replay(budget, Thrifty(), driven=True, swap=swap).compare(words) >= run.evictions > 0
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("only", [True, False])
def test_python_engine_repeats_native_run_with_swap(
    program: Callable[[], Step], only: bool, tmp_path: Path
) -> None:
    """With `only`, every evicted value is copied to the host. Otherwise some are recomputed."""
    torch.manual_seed(20)
    step = program()
    _, roomy = _journal(step, None)
    budget = int(0.6 * roomy.peak)
    swap = Swap(1 << 30, out_bytes_per_s=10**10, in_bytes_per_s=10**10, only=only)
    words, run = _journal(step, budget, swap=swap, swap_directory=tmp_path)
    compared = Replay(budget, Thrifty(), driven=True, swap=swap).compare(words)
    swapped = run.report().swapped
    assert swapped is not None
    assert compared >= run.recomputations + run.evictions > 0
    assert swapped.back > 0 or not only
