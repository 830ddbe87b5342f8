"""Tests of `torch.utils.swap_tensors`, which exchanges two tensors with all their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch
from torch import nn

import rekindle
from rekindle.pytorch.online import PARAMETERS
from tests.pytorch.bits import differing
from tests.pytorch.harsh import WIDTH, deeper, everything, harshest, vector

Evict = Literal["saved", "anything"]
Step = Callable[[], object]


@pytest.fixture
def by_swapping() -> Iterator[None]:
    """Make `Module.to` exchange parameters by `swap_tensors`, a possible default of PyTorch."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("by_swapping")
@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_module_converted_between_steps_matches_pytorch(evict: Evict) -> None:
    def program() -> Step:
        network = nn.Sequential(*[nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(5)])
        batch = torch.rand(400, 9)

        def step() -> object:
            losses = []
            for dtype in (torch.float32, torch.float64, torch.float32):
                network.to(dtype)
                loss = network(batch.to(dtype)).square().sum()
                loss.backward()
                losses.append(loss.detach())
            state = {name: value + 1 for name, value in network.state_dict().items()}
            network.load_state_dict(state)
            return losses, network

        return step

    harshest(program, evict=evict)


@pytest.mark.usefixtures("by_swapping")
@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
def test_module_built_and_converted_in_budget_matches_pytorch(
    evict: Literal["auto"] | Evict,
) -> None:
    torch.manual_seed(0)
    plain = _converted()
    torch.manual_seed(0)
    with rekindle.budget("1GiB", evict=evict) as run:
        network = _converted()
        for parameter in network.parameters():
            assert weakref.getweakrefs(parameter) != []  # the report still lists the parameter
    assert differing(everything(network), everything(plain)) == []
    categories = run.report().at_peak.categories
    assert categories[PARAMETERS] >= 8 * sum(each.numel() for each in network.parameters())
    run._driver.engine.check()


def _converted() -> nn.Module:
    network = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9))
    network(torch.rand(3, 9)).sum().backward()
    network.double()
    (network(torch.rand(400, 9).double()).sum() ** 2).backward()
    return network


@pytest.mark.usefixtures("by_swapping")
def test_module_can_be_converted_after_budget() -> None:
    network = nn.Linear(4, 4)
    with rekindle.budget("1GiB") as run:
        for _ in range(2):
            network(torch.ones(2, 4)).sum().backward()
    network.double()
    assert network.weight.dtype == torch.float64
    run._driver.engine.check()


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_recomputation_after_swap_tensors_reads_original_bytes(evict: Evict) -> None:
    """Recomputation must read the bytes of the first run (R4, sources)."""

    def program() -> Step:
        weight, one, other = vector(True), vector(), vector()

        def step() -> object:
            loss = deeper(weight + one).sum()
            torch.utils.swap_tensors(one, other)
            with torch.no_grad():
                one.mul_(2)
            loss.backward()
            with torch.no_grad():
                other.mul_(3)
            return weight, one, other, loss

        return step

    harshest(program, evict=evict)


def test_write_to_saved_tensor_after_swap_tensors_raises() -> None:
    """The version counter moves with the tensor (R7, version check)."""
    weight, one, other = vector(True), vector(), vector()
    with rekindle.budget("1GiB"):
        made, others = one * 1, other * 1
        torch.utils.swap_tensors(made, others)
        loss = (others * weight).sum()
        others.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_swap_tensors_of_weakly_referenced_tensor_is_refused() -> None:
    one, other = torch.ones(WIDTH), torch.zeros(WIDTH)
    somebody = weakref.ref(one)
    with rekindle.budget("1GiB"):
        made = one + other
        with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
            torch.utils.swap_tensors(one, other)
    assert somebody() is one
    assert (one - other).sum() == made.sum() == WIDTH
