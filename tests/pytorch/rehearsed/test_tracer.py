"""Tests that a run on fake tensors (shapes without data) gives the trace of a real run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.policies import Thrifty
from rekindle.pytorch.native import backward_node, core
from rekindle.pytorch.operators import BackwardNode
from rekindle.pytorch.rehearsed._fakes import Fakes
from rekindle.pytorch.rehearsed._tracer import Tracer
from rekindle.pytorch.tensors import living_objects
from rekindle.simulator import smallest_budget
from rekindle.trace import Op, Trace, keep_all_peak
from tests.pytorch import networks

CPU = torch.device("cpu")


def tokens(*size: int) -> Tensor:
    return torch.randint(40, size)


def stacked(*layers: Callable[[], nn.Module]) -> nn.Module:
    """Return a chain of six blocks, each with the given layers."""
    return nn.Sequential(*(nn.Sequential(*(layer() for layer in layers)) for _ in range(6)))


def linear() -> nn.Module:
    return nn.Linear(64, 64)


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "chain": lambda: (stacked(linear, nn.Tanh), torch.rand(32, 64)),
    "in place": lambda: (stacked(linear, lambda: nn.ReLU(inplace=True)), torch.rand(32, 64)),
    "dropout and batch norm": lambda: (
        stacked(linear, lambda: nn.BatchNorm1d(64), nn.Dropout),
        torch.rand(32, 64),
    ),
    "gpt": lambda: (
        networks.GPT(vocabulary=40, width=32, heads=2, layers=3, context=16),
        tokens(4, 16),
    ),
    "unet": lambda: (networks.UNet(width=4, levels=2), torch.rand(2, 1, 32, 32)),
    "densenet": lambda: (
        networks.DenseNet(growth=4, blocks=(2, 2), classes=4),
        torch.rand(2, 3, 32, 32),
    ),
    "lstm": lambda: (
        networks.UnrolledLSTM(vocabulary=40, width=16, layers=2),
        tokens(4, 12),
    ),
}


def loss(output: Any) -> Tensor:
    return output.float().log_softmax(-1).sum()


def in_earnest(model: nn.Module, x: Tensor) -> Trace:
    return rekindle.capture(lambda: loss(model(x)).backward())


def running_node() -> BackwardNode | None:
    found = core()
    assert found is not None
    return backward_node(found)


def on_shapes(model: nn.Module, x: Tensor) -> Trace:
    fakes = Fakes(CPU)
    copy, inputs = fakes.model(model), fakes.inputs(x)
    with (
        fakes.mode,
        Tracer(fakes, lambda *_: (1_000, 0), running_node) as tracer,
    ):
        for tensor in (*copy.parameters(), *copy.buffers(), inputs):
            tracer.meet(tensor)
        loss(copy(inputs)).backward()
    return tracer.build()


def forward(trace: Trace) -> list[Op]:
    return [op for op in trace.ops if not op.is_backward and op.name != "source"]


def at_one_price(trace: Trace) -> Trace:
    """Return the trace with equal costs and no workspaces."""
    ops = (replace(op, workspace=0, cost=1_000 * (op.name != "source")) for op in trace.ops)
    return replace(trace, ops=tuple(ops))


@pytest.mark.parametrize("name", PROGRAMS)
def test_trace_of_fake_tensor_run_has_peak_of_real_run(name: str) -> None:
    real = at_one_price(in_earnest(*PROGRAMS[name]()))
    rehearsed = on_shapes(*PROGRAMS[name]())
    assert Counter(op.name for op in forward(rehearsed)) == Counter(op.name for op in forward(real))
    assert keep_all_peak(rehearsed) == keep_all_peak(real)
    needed = smallest_budget(rehearsed, Thrifty()) / smallest_budget(real, Thrifty())
    assert abs(needed - 1) < 0.02  # each budget is found by bisection, to 1 %


def test_fake_tensor_run_adds_gradients_in_place_like_autograd() -> None:
    """An LSTM reads each weight at every time step, so autograd sums many gradients of it."""
    real = in_earnest(*PROGRAMS["lstm"]())
    added = sum(op.name == "aten::add_" for op in real.ops)
    rehearsed = on_shapes(*PROGRAMS["lstm"]())
    assert sum(op.name == "aten::add" and bool(op.overwrites) for op in rehearsed.ops) == added
    assert added > 100


def test_trace_of_fake_tensor_run_leaves_model_unchanged() -> None:
    model, x = PROGRAMS["dropout and batch norm"]()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn, before = torch.get_rng_state(), living_fakes()
    on_shapes(model, x)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert living_fakes() == before


def living_fakes() -> int:
    gc.collect()
    return sum(type(each).__name__ == "FakeTensor" for each in living_objects(Tensor))
