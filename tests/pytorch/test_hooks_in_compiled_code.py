"""Tests that Dynamo compiles a program within a budget as it does without one.

Dynamo traces hooks and replaced functions of Rekindle, as it traces code of the program. If it
cannot trace one, it cuts the program's code into pieces, which may compute other bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import rekindle
from rekindle.pytorch import Phases
from rekindle.pytorch.observed import capture_modules

pytestmark = pytest.mark.filterwarnings("default")  # a warning of the compiler itself


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@contextmanager
def profiled() -> Iterator[None]:
    with rekindle.budget(None) as run, Phases(run).watch():
        yield


WITHIN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no limit": lambda: rekindle.budget(None),
    "limit": lambda: rekindle.budget("1GiB"),
    "record": lambda: rekindle.budget("1GiB", record=True),
    "profile": profiled,
}


def compiled_by_dynamo() -> tuple[dict[str, int], list[str]]:
    """Return what Dynamo counted since the last call, and where it cut code, and why."""
    counted = dict(counters["stats"]), sorted(counters["graph_break"])
    torch._dynamo.reset()
    counters.clear()
    return counted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def step_of_blocks() -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        block.compile(fullgraph=True, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> Tensor:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


@pytest.mark.parametrize("within", WITHIN)
def test_dynamo_traces_no_hook_of_modules(within: str) -> None:
    _, step = step_of_blocks()
    wanted = [step() for _ in range(2)]
    plain = compiled_by_dynamo()
    _, step = step_of_blocks()
    with WITHIN[within]():
        got = [step() for _ in range(2)]
    assert got == wanted
    assert compiled_by_dynamo() == plain


def _verified(model: nn.Module, step: Callable[[], object]) -> None:
    assert rekindle.verify(step, budget="1GiB")


@pytest.mark.parametrize(
    "observe",
    [
        lambda model, step: rekindle.profile(step),
        lambda model, step: rekindle.capture(step),
        lambda model, step: capture_modules(step, model),
        _verified,
    ],
    ids=["profile", "capture", "capture modules", "verify"],
)
def test_dynamo_compiles_whole_blocks_of_observed_step(observe: Any) -> None:
    observe(*step_of_blocks())  # raises where a block is not compiled as a whole
    counted, breaks = compiled_by_dynamo()
    assert counted["unique_graphs"] >= 2
    assert not breaks


@pytest.mark.parametrize("within", WITHIN)
def test_compiled_optimizer_step_matches_pytorch(within: str) -> None:
    def trained(context: AbstractContextManager[Any]) -> tuple[list[Tensor], object]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        step = torch.compile(optimizer.step, backend="eager")
        with context:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                step()
                optimizer.zero_grad()
        return list(model.parameters()), compiled_by_dynamo()[0]

    wanted, plain = trained(nullcontext())
    got, ours = trained(WITHIN[within]())
    assert all(map(torch.equal, got, wanted))
    assert ours == plain


def _state_kept(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = nn.functional.dropout(x, 0.5)
    torch.set_rng_state(state)
    return y


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.detach().numpy().sum() > 0),
        lambda x: x * x.detach().sum().tolist(),
        lambda x: x * x.untyped_storage().nbytes(),
        lambda x: x * (x.data_ptr() != 0),
        _state_kept,
    ],
    ids=["numpy", "tolist", "storage", "address", "generator"],
)
def test_replaced_function_in_compiled_code_warns_no_more(function: Any) -> None:
    """Dynamo cannot trace some of these functions of PyTorch. It then calls Rekindle's instead."""

    def gradient(context: AbstractContextManager[Any]) -> tuple[Tensor | None, set[str]]:
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        with context, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.compile(function, backend="eager")(x).sum().backward()
        torch._dynamo.reset()
        return x.grad, {str(each.message) for each in warned}

    wanted, before = gradient(nullcontext())
    torch._dynamo.utils.warn_once_cache.clear()
    got, after = gradient(rekindle.budget("1GiB"))
    assert torch.equal(got, wanted)
    assert after <= before
