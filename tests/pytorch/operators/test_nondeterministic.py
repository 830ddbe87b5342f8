"""Tests of the list of operators that may be nondeterministic on a device.

Their results are not recomputed, because the bits could differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.operators import doubt_of, may_differ
from rekindle.pytorch.operators._doubtful import ACCUMULATING, ATOMICS, TIMED, Doubt
from tests.pytorch.harsh import Watch

aten = torch.ops.aten
HERE, THERE = torch.zeros(4), torch.zeros(4, device="meta")


@pytest.mark.parametrize("name", sorted(ATOMICS | TIMED | ACCUMULATING.keys()))
def test_each_listed_nondeterministic_operator_exists_in_torch(name: str) -> None:
    packet = getattr(aten, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    assert all(doubt_of(schema) is not Doubt.NONE for schema in schemas)


@pytest.mark.parametrize("name", sorted(ACCUMULATING))
def test_listed_position_of_accumulate_argument_equals_schema(name: str) -> None:
    arguments = getattr(aten, name).default._schema.arguments
    assert arguments[ACCUMULATING[name]].name == "accumulate"


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def differs(overload: Any, *args: Any) -> bool:
    tensors = [each for each in args if isinstance(each, Tensor)]
    return may_differ(doubt_of(overload._schema), overload._schema, args, tensors)


def test_operator_with_atomic_sums_counts_as_nondeterministic() -> None:
    assert differs(aten.index_add.default, THERE, 0, THERE, THERE)
    assert not differs(aten.index_add.default, HERE, 0, HERE, HERE)
    assert not differs(aten.add.Tensor, THERE, THERE)


def test_index_put_counts_as_nondeterministic_if_it_accumulates() -> None:
    assert differs(aten.index_put.default, THERE, [THERE], THERE, True)
    assert not differs(aten.index_put.default, THERE, [THERE], THERE)


def test_operators_count_as_deterministic_in_deterministic_mode(deterministic: None) -> None:
    assert not differs(aten.index_add.default, THERE, 0, THERE, THERE)


def test_cudnn_benchmark_convolution_counts_as_nondeterministic() -> None:
    assert not differs(aten.convolution.default, THERE, THERE)
    with torch.backends.cudnn.flags(benchmark=True):
        assert differs(aten.convolution.default, THERE, THERE)
    with torch.backends.cudnn.flags(benchmark=True, deterministic=True):
        assert not differs(aten.convolution.default, THERE, THERE)


def rnn(dropout: float, train: bool, state: Tensor | None) -> bool:
    args = (THERE, [], 0, None, THERE, None, 2, 8, 0, 1, False, dropout, train, False, [], state)
    return differs(aten._cudnn_rnn.default, *args)


def test_rnn_counts_as_nondeterministic_with_dropout_in_training() -> None:
    assert rnn(0.3, True, THERE)
    assert not rnn(0.0, True, THERE)
    assert not rnn(0.3, False, THERE)
    assert not rnn(0.3, True, None)


@torch.library.custom_op("rekindle_tests::masked_by_own_state", mutates_args=())
def masked(x: Tensor, dropout: float, train: bool, dropout_state: Tensor) -> Tensor:
    """Drop elements as cuDNN does: draw from a state, and advance it, which the schema hides."""
    moved = dropout_state.numpy()
    moved += 1
    return x * (torch.arange(x.numel()) % (2 + int(moved[0]))).ne(0)


masked.register_fake(lambda x, dropout, train, dropout_state: torch.empty_like(x))
masked.register_autograd(
    lambda ctx, gradient: (gradient * 2, None, None, None), setup_context=lambda *_, **__: None
)


def test_operator_with_own_generator_state_is_not_recomputed() -> None:
    assert may_differ(Doubt.OWN_STATE, masked._opoverload._schema, (HERE, 0.1, True, HERE), [HERE])
    weight = torch.linspace(0, 1, 256).requires_grad_()

    def gradient() -> Tensor:
        state, x = torch.zeros(1, dtype=torch.int64), weight
        for _ in range(6):
            x = masked(x.sin().exp(), 0.3, True, state).tanh()
        return torch.autograd.grad(x.sum(), [weight])[0]

    wanted = gradient()
    with rekindle.budget(16 * 1024) as run, Watch() as watch:
        assert torch.equal(gradient(), wanted)
    assert run.recomputations > 0
    assert watch.operators["rekindle_tests::masked_by_own_state"] == 6
