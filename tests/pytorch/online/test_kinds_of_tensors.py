"""Tests of nested, quantized and sparse tensors, whose operators are never recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.pytorch.harsh import WIDTH, deeper, differing, everything, harshest, vector
from tests.pytorch.sweep import _everything

Evict = Literal["saved", "anything"]
EVICT: tuple[Evict, ...] = ("saved", "anything")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]


@pytest.mark.parametrize("evict", EVICT)
def test_transformer_encoder_with_padding_mask_matches_pytorch(evict: Evict) -> None:
    """In eval mode, `nn.TransformerEncoder` uses its fast path with nested tensors."""
    torch.manual_seed(20)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    x = torch.rand(3, 5, 16)
    with torch.no_grad():
        wanted = encoder(x, src_key_padding_mask=padding)
        with rekindle.budget("1GiB", evict=evict) as run:
            for _ in range(4):  # the first steps differ, because costs and sizes are not known yet
                got = encoder(x, src_key_padding_mask=padding)
                assert torch.equal(got, wanted)
        run._driver.engine.check()


@pytest.mark.parametrize("evict", EVICT)
def test_nested_tensor_and_its_values_match_pytorch(evict: Evict) -> None:
    def program() -> Callable[[], object]:
        weight = vector(True)

        def step() -> object:
            x = deeper(weight, 4)
            rows = [x[:300].view(3, 100), x[300:800].view(5, 100)]
            ragged = torch.nested.as_nested_tensor(rows)
            doubled = ragged * 2
            parts = [part.sum() for part in doubled.unbind()]
            total = torch.nested.to_padded_tensor(doubled, 0.0).exp().sum()
            (total + parts[0] * parts[1]).backward()
            with torch.no_grad():
                written = deeper(torch.ones(WIDTH), 2)
                apart = torch.nested.nested_tensor([written[:10], written[10:]])
                apart.mul_(3)
            return weight, torch.nested.to_padded_tensor(apart, 0.0), x.detach()

        return step

    harshest(program, evict=evict)


def test_larger_nested_tensor_needs_larger_budget() -> None:
    def ragged(rows: int) -> Tensor:
        return torch.nested.nested_tensor([torch.ones(rows, 10), torch.ones(2 * rows, 10)])

    small, large = ragged(10), ragged(2_000)
    with torch.no_grad(), rekindle.budget(2 * large.nbytes - 1) as run:
        for _ in range(4):
            small.neg()
        with pytest.raises(rekindle.OutOfBudget):
            large.neg()
    assert run.peak < 2 * large.nbytes


def quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


@pytest.mark.parametrize("evict", EVICT)
def test_quantized_tensors_match_pytorch(evict: Evict) -> None:
    def program() -> Callable[[], object]:
        weight = vector(True)

        def step() -> object:
            loss = deeper(weight, 4).sum()
            small = quantized(weight.detach())
            back = small.dequantize()
            channels = torch.quantize_per_channel(
                back.view(10, 100), torch.full((10,), 0.1), torch.zeros(10), 0, torch.qint8
            )
            rows = channels.dequantize().sum(1)
            copy = small.clone()
            (loss * rows[3]).backward()
            return weight, small.int_repr(), back, rows, copy.dequantize(), small.q_scale()

        return step

    harshest(program, evict=evict)


@pytest.mark.parametrize("evict", EVICT)
def test_quantized_network_matches_pytorch(evict: Evict) -> None:
    torch.manual_seed(20)
    network = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), {nn.Linear}
    )
    x = torch.rand(3, 8)
    with torch.no_grad():
        wanted = network(x)
        with rekindle.budget("1GiB", evict=evict):
            assert torch.equal(network(x), wanted)


@pytest.mark.parametrize("evict", EVICT)
@pytest.mark.parametrize("write", ["mul_", "add_"])
def test_in_place_write_to_sparse_tensor_happens_once(evict: Evict, write: str) -> None:
    """Rekindle measures the memory of some operators by a second run, but not of this write."""

    def sparse() -> Tensor:
        return torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,)).coalesce()

    def written() -> Tensor:
        x = sparse()
        getattr(x, write)(2 if write == "mul_" else sparse())
        return x

    wanted = written()
    with rekindle.budget("1GiB", evict=evict):
        got = written()
    assert differing(everything(got), everything(wanted)) == []


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda values: torch.sparse_coo_tensor([[0, 2, 4]], values, (5,)),
    "csr": lambda values: torch.sparse_csr_tensor([0, 1, 3], [0, 1, 2], values, (2, 3)),
    "csc": lambda values: torch.sparse_csc_tensor([0, 1, 2, 3], [0, 1, 1], values, (2, 3)),
}


@pytest.mark.evicts_anything
@pytest.mark.filterwarnings("ignore:.*[sS]parse")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evicted_indices_and_values_of_sparse_are_recomputed(layout: str) -> None:
    with rekindle.budget(_everything.AMPLE, evict="anything") as run:
        sparse = LAYOUTS[layout](torch.ones(3) * 2)
        _everything.evict_all(run)
        assert sparse.to_dense().sum() == 6
        _everything.evict_all(run)
        assert "2., 2., 2." in repr(sparse)
        assert run.recomputations >= 2
    assert sparse.to_dense().sum() == 6


@pytest.mark.filterwarnings("ignore:.*[sS]parse")
@pytest.mark.parametrize("evict", EVICT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_write_through_sparse_tensor_matches_pytorch(layout: str, evict: Evict) -> None:
    """The write to the values of the sparse tensor is recomputed (R3, in-place writes)."""

    def program() -> Callable[[], object]:
        weight, values = torch.rand(3, requires_grad=True), torch.rand(3)

        def step() -> object:
            made = values.sin()
            LAYOUTS[layout](made).mul_(2)
            loss = (made * weight).sum() * deeper(torch.ones(WIDTH, requires_grad=True)).sum()
            kept = made.clone() if evict == "anything" else None
            del made
            loss.backward()
            return weight, kept, loss

        return step

    harshest(program, evict=evict)


@pytest.mark.parametrize("evict", EVICT)
def test_sparse_gradients_and_sparse_adam_match_pytorch(evict: Evict) -> None:
    def program() -> Callable[[], object]:
        table, layer = nn.Embedding(50, 64, sparse=True), nn.Linear(64, 64)
        sparse = torch.optim.SparseAdam(list(table.parameters()), 0.1)
        plain = torch.optim.SGD(layer.parameters(), 0.1)
        batches = [torch.randint(0, 50, (200,)) for _ in range(3)]

        def step() -> object:
            loss = torch.zeros(())
            for batch in batches:
                hidden = table(batch)
                for _ in range(4):
                    hidden = layer(hidden).tanh() * hidden
                loss = hidden.square().mean()
                del hidden
                loss.backward()
                for optimizer in (sparse, plain):
                    optimizer.step()
                    optimizer.zero_grad()
            return loss, table, layer

        return step

    harshest(program, evict=evict, split="never")


def test_modified_nested_tensor_raises_in_backward_as_in_pytorch() -> None:
    """The error names the sizes of the parts, because a nested tensor has no single size."""

    def step() -> None:
        parts = [torch.ones(2, 3), torch.ones(1, 3)]
        nested = torch.nested.nested_tensor(parts, requires_grad=True).clone()
        total = nested.sum(-1, keepdim=True)  # for a nested tensor, `sum` saves its input
        nested.add_(nested)
        total.backward(torch.nested.nested_tensor([torch.ones(2, 1), torch.ones(1, 1)]))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()
    with (
        rekindle.budget("1GiB"),
        pytest.raises(RuntimeError, match="modified by an inplace") as got,
    ):
        step()
    assert "2  3" in str(got.value)
