"""Tests of operators that have no room as a whole: they run in slices, with the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle import Run
from rekindle.pytorch.native import core as native_core
from tests.on_device.machine import same
from tests.pytorch import cores
from tests.pytorch.bits import threads_set
from tests.pytorch.scenes.play import Tally
from tests.pytorch.tracker import Tracker

pytestmark = pytest.mark.skipif(native_core() is None, reason="no native core")

ROWS, WIDTH, WORDS = 768, 64, 6000
SCORES = ROWS * WORDS * 4  # bytes of the scores of all words
STATE = 2 * WIDTH * WORDS * 4  # bytes of the head's weight and of its gradient

Loss = Callable[[Tensor, Tensor], Tensor]


class Language(nn.Module):
    """A model whose largest value is the scores of all words."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def drawn(*, bias: bool = False) -> tuple[Language, Tensor, Tensor]:
    torch.manual_seed(0)
    return Language(bias=bias), torch.randn(ROWS, WIDTH), torch.randint(0, WORDS, (ROWS,))


def results(model: nn.Module, x: Tensor, words: Tensor, loss: Loss) -> list[Tensor]:
    value = loss(model(x), words)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def with_ignored_words(scores: Tensor, words: Tensor) -> Tensor:
    words = torch.where(torch.arange(ROWS) % 3 == 0, 7, words)
    return functional.cross_entropy(scores, words, ignore_index=7)


def of_a_batch(scores: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(scores.view(4, -1, WORDS).flatten(0, 1), words)


#: How values that variables hold leave memory.
HELD: dict[str, dict[str, Any]] = {
    "last": {},
    "anything": {"evict": "anything"},
    "moved": {"evict": "anything", "swap": "1GiB"},
}


@contextmanager
def kept_budget(budget: int, held: str = "last") -> Iterator[Run]:
    """Open a budget with slices, and check that the process kept it even if it failed."""
    tally = Tally()
    try:
        with (
            tally.counting(),
            rekindle.budget(budget, learn=False, split="equal", **HELD[held]) as run,
            tally.of_a_budget(),
        ):
            yield run
    finally:
        assert tally.within <= budget


LOSSES: dict[str, Loss] = {
    "mean": functional.cross_entropy,
    "sum": lambda s, w: functional.cross_entropy(s, w, reduction="sum"),
    "ignored": with_ignored_words,
    "smoothed": lambda s, w: functional.cross_entropy(s, w, label_smoothing=0.1),
    "batch": of_a_batch,
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_below_scores_are_equal(name: str, bias: bool, held: str) -> None:
    loss = LOSSES[name]
    expected = results(*drawn(bias=bias), loss)
    budget = STATE + int((1.5 if name == "smoothed" else 0.8) * SCORES)
    model, x, words = drawn(bias=bias)
    with kept_budget(budget, held) as run:
        found = results(model, x, words, loss)
    assert same(found, expected)
    assert run._driver.sliced


@pytest.mark.parametrize("scores", [0.8, 1, 1.3, 1.7, 2, 2.5])
def test_every_budget_between_slices_and_whole_suffices(scores: float) -> None:
    expected = results(*drawn(), functional.cross_entropy)
    with rekindle.budget(STATE + int(scores * SCORES), learn=False, split="equal"):
        found = results(*drawn(), functional.cross_entropy)
    assert same(found, expected)


def test_scores_that_variable_holds_are_there_after_budget() -> None:
    model, x, words = drawn()
    expected = model(x)
    with rekindle.budget(STATE + SCORES, learn=False, split="equal"):
        found = model(x)
        best = found.argmax(1)
        functional.cross_entropy(found, words).backward()
    assert same(found.detach(), expected.detach())
    assert same(best, expected.argmax(1))


def test_scores_without_room_are_lost_after_write_to_weight() -> None:
    model, x, words = drawn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rekindle.budget(STATE + SCORES // 2, learn=False, split="equal"):
        found = model(x)
        functional.cross_entropy(found, words).backward()
        optimizer.step()
        with pytest.raises(rekindle.OutOfBudget, match="cannot be computed any more") as raised:
            found.sum()
    assert raised.value.smallest_budget == STATE + SCORES // 2 + SCORES


@pytest.mark.parametrize("scores", [0.8, 1.3])
def test_recording_of_sliced_loss_has_every_operator(scores: float) -> None:
    model, x, words = drawn()
    with rekindle.budget(None, record=True) as whole:
        results(model, x, words, functional.cross_entropy)
    model, x, words = drawn()
    with rekindle.budget(STATE + int(scores * SCORES), learn=False, record=True) as run:
        results(model, x, words, functional.cross_entropy)
    assert run._driver.sliced
    names = {op.name for op in whole.trace.ops}
    assert names == {op.name for op in run.trace.ops}
    assert run.record.peak <= run.budget
    assert "ran in slices" in str(run.report())


def test_time_lost_has_what_slices_compute_more_than_once() -> None:
    model, x, words = drawn()
    with cores.fixed_prices(1):
        with rekindle.budget(STATE + SCORES // 2, learn=False) as run:
            results(model, x, words, functional.cross_entropy)
        in_slices = sum(each.time for each in run._driver.sliced)
        # Each of the three operators that run computes the scores anew. The other operators, less
        # than a hundred, cost 1 ns each.
        assert 0 <= run.compute_ns + run.recompute_ns - in_slices < 100
        assert 0 < run.recompute_ns < in_slices
        assert run.report().time_lost >= run.recompute_ns


def trained(model: Language, x: Tensor, words: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[Tensor] = []
    for _ in range(4):
        optimizer.zero_grad()
        scores = model(x)
        loss = functional.cross_entropy(scores, words)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize(
    ("held", "learn"),
    [("last", False), ("last", True), ("anything", False), ("anything", True), ("moved", False)],
)
def test_training_below_scores_gives_equal_weights(held: str, learn: bool) -> None:
    expected = trained(*drawn())
    budget = (STATE if held == "moved" else 2 * STATE) + SCORES // 2
    with rekindle.budget(budget, learn=learn, split="equal", **HELD[held]) as run:
        found = trained(*drawn())
    assert same(found, expected)
    assert run._driver.sliced


def test_targets_in_memory_of_numpy_are_read_as_they_were() -> None:
    model, x, words = drawn()
    expected = results(model, x, words, functional.cross_entropy)
    model.zero_grad()
    shared = torch.from_numpy(words.numpy().copy())
    with rekindle.budget(STATE + SCORES, learn=False, split="equal"):
        found = results(model, x, shared, functional.cross_entropy)
    assert same(found, expected)


def test_wrong_target_raises_as_in_pytorch() -> None:
    model, x, words = drawn()
    words[3] = WORDS
    with (
        rekindle.budget(STATE + SCORES, learn=False, split="equal"),
        pytest.raises(IndexError, match="out of bounds"),
    ):
        functional.cross_entropy(model(x), words)


Step = Callable[[], list[Tensor]]


def wide_mlp() -> Step:
    layers = [nn.Linear(48, 4096), nn.Linear(4096, 48)]
    x = torch.randn(512, 48, requires_grad=True)

    def step() -> list[Tensor]:
        loss = layers[1](functional.gelu(layers[0](x))).square().mean()
        loss.backward()
        return [loss.detach(), *gradients(layers), gradient(x)]

    return step


def mlp_of_sequences() -> Step:
    layers = [nn.Linear(48, 4096), nn.Linear(4096, 48)]
    x = torch.randn(5, 100, 48, requires_grad=True)

    def step() -> list[Tensor]:
        hidden = functional.silu(layers[0](x)) * 0.5
        loss = layers[1](hidden.view(-1, 4096)).square().mean()
        loss.backward()
        return [loss.detach(), *gradients(layers), gradient(x)]

    return step


def attention() -> Step:
    layer, x = nn.Linear(64, 384), torch.randn(2, 256, 64)

    def step() -> list[Tensor]:
        q, k, v = layer(x).view(2, 256, 3, 8, 16).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        loss = (weights @ v).square().mean()
        loss.backward()
        return [loss.detach(), *gradients([layer])]

    return step


def shifted_words() -> Step:
    head, x = nn.Linear(32, 6000, bias=False), torch.randn(4, 128, 32)
    words = torch.randint(6000, (4, 128))

    def step() -> list[Tensor]:
        scores = head(x)[:, :-1].contiguous()
        loss = functional.cross_entropy(scores.view(-1, 6000), words[:, 1:].reshape(-1))
        loss.backward()
        return [loss.detach(), *gradients([head])]

    return step


def joined_heads() -> Step:
    heads = [nn.Linear(48, 2000, bias=False) for _ in range(3)]
    x, words = torch.randn(512, 48), torch.randint(6000, (512,))

    def step() -> list[Tensor]:
        loss = functional.cross_entropy(torch.cat([head(x) for head in heads], 1), words)
        loss.backward()
        return [loss.detach(), *gradients(heads)]

    return step


def gradients(layers: list[nn.Linear]) -> list[Tensor]:
    return [gradient(p) for layer in layers for p in layer.parameters()]


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


# Smallest share of the memory without a budget that suffices, with slices.
STEPS: dict[str, tuple[Callable[[], Step], float]] = {
    "wide MLP": (wide_mlp, 0.2),
    "MLP of sequences": (mlp_of_sequences, 0.27),
    "attention": (attention, 0.35),
    "shifted words": (shifted_words, 0.2),
    "joined heads": (joined_heads, 0.25),
}


def drawn_step(make: Callable[[], Step]) -> Step:
    torch.manual_seed(2)
    return make()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("part", [0, 0.2, 0.4, 0.6, 0.8, 1])
@pytest.mark.usefixtures("workspaces_unknown")
def test_every_budget_above_slices_suffices(name: str, part: float) -> None:
    make, least = STEPS[name]
    with rekindle.budget(None, learn=False) as run:
        expected = drawn_step(make)()
    budget = int((least + part * (1 - least)) * run.peak)
    step = drawn_step(make)
    with kept_budget(budget):
        found = step()
    assert same(found, expected)


SUMS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "columns": ((2000, 300), lambda y: y.sum(0)),
    "pairs of columns": ((1000, 217, 4), lambda y: y.sum(0)),
    "two axes": ((30, 40, 100, 10), lambda y: y.mean((0, 1))),
    "first and last": ((400, 30, 40), lambda y: y.sum((0, 2))),
    "rows between": ((40, 5, 60, 50), lambda y: y.sum((0, 2))),
    "reversed": ((60, 50, 400), lambda y: y.permute(2, 1, 0).sum(1)),
    "long rows": ((5, 100_000), lambda y: y.sum(1)),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SUMS)
def test_sum_of_value_without_room_is_equal(name: str, threads: int) -> None:
    """Kernels add up the last columns in another order if they fill no vector register."""
    shape, operator = SUMS[name]
    torch.manual_seed(20)
    with threads_set(threads):
        for share in range(1, 10):
            x = torch.randn(shape)
            expected = operator(x * 2)
            room = x.nbytes + expected.nbytes + x.nbytes * share // 10
            with suppress(rekindle.OutOfBudget), rekindle.budget(room, learn=False, split="equal"):
                assert same(operator(x * 2), expected)


def test_sum_of_columns_within_another_axis_is_equal() -> None:
    """The value fits, but its sum does not, so that slices are views with gaps of the value."""
    torch.manual_seed(20)
    x = torch.randn(35, 49, 153)
    expected = x.exp().sum(0)
    for share in range(1, 11):
        room = x.nbytes + x.nbytes * share // 10
        with suppress(rekindle.OutOfBudget):
            with rekindle.budget(room, learn=False, split="equal"):
                found = x.exp().sum(0)
            assert same(found, expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
def test_product_in_slices_is_equal_with_any_threads(threads: int) -> None:
    torch.manual_seed(20)
    with threads_set(threads):
        for columns in (512, 1000, 1500):
            x, weight = torch.randn(32, 64), torch.randn(64, columns)
            expected = torch.relu(x @ weight)
            for share in range(1, 10):
                room = x.nbytes + weight.nbytes + expected.nbytes * share // 10
                with (
                    suppress(rekindle.OutOfBudget),
                    rekindle.budget(room, learn=False, split="equal"),
                ):
                    found = torch.relu(x @ weight)
                    assert same(found.t() @ torch.ones(32, 2), expected.t() @ torch.ones(32, 2))
                    assert same(found, expected)


#: Shapes (rows, length of a row, columns) of products whose slices have other bits in some cases.
FEW_COLUMNS = [(512, 600, 1), (640, 423, 7), (360, 597, 43), (352, 400, 34), (1168, 102, 41)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
def test_product_with_few_columns_is_equal(threads: int, dtype: torch.dtype) -> None:
    """Threads with few columns run other kernels; so do all with double precision."""
    torch.manual_seed(20)
    with threads_set(threads):
        for rows, length, columns in FEW_COLUMNS:
            x, weight = (
                torch.randn(rows, length, dtype=dtype),
                torch.randn(length, columns).to(dtype),
            )
            expected = torch.relu(x) @ weight
            for share in range(1, 10, 2):
                room = x.nbytes + weight.nbytes + 2 * expected.nbytes + x.nbytes * share // 10
                with (
                    suppress(rekindle.OutOfBudget),
                    rekindle.budget(room, learn=False, split="equal"),
                ):
                    assert same(torch.relu(x) @ weight, expected)


#: Operators whose kernels give other bits at the ends of threads' shares, or in other memory order.
IN_SHARES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "softmax of columns": ((512, 780), lambda y: y.softmax(0)),
    "softmax between axes": ((80, 6, 43), lambda y: y.softmax(1)),
    "log-softmax of columns": ((512, 780), lambda y: y.log_softmax(0)),
    "gelu": ((896, 192), functional.gelu),
    "gelu of columns": ((192, 896), lambda y: functional.gelu(y.t())),
    "exp": ((700, 200), torch.exp),
}


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", IN_SHARES)
def test_value_that_program_holds_is_equal_with_any_threads(name: str, threads: int) -> None:
    """The value has no room, so that it is computed in slices when the budget ends."""
    shape, operator = IN_SHARES[name]
    torch.manual_seed(20)
    with threads_set(threads):
        for transposed in (False, True):
            x = torch.randn(shape)
            x = x.mT.contiguous().mT if transposed else x
            expected = operator(x * 2)
            for share in (1, 4, 8):
                with suppress(rekindle.OutOfBudget):
                    room = x.nbytes + x.nbytes * share // 10
                    with rekindle.budget(room, learn=False, split="equal"):
                        found = operator(x * 2)
                    assert same(found, expected)


@pytest.mark.parametrize("kind", [torch.softmax, torch.log_softmax])
def test_softmax_along_first_axis_without_room_is_equal(
    kind: Callable[[Tensor, int], Tensor],
) -> None:
    torch.manual_seed(20)
    for _ in range(10):
        x = torch.randn(1024, 200)
        with rekindle.budget(x.nbytes + 256, learn=False, split="equal"):
            found = kind(x, 0)
        assert same(found, kind(x, 0))


LARGE = (512, 4096)  # shape of a value without room: 8 MiB
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "product by rows": lambda y: y @ torch.ones(LARGE[1], 8),
    "product by columns": lambda y: torch.ones(16, LARGE[0]) @ y,
    "sum of rows": lambda y: y.sum(1),
    "sum of columns": lambda y: y.sum(0),
    "largest of rows": lambda y: y.amax(1),
    "largest place": lambda y: y.argmax(1),
    "exact": lambda y: (torch.relu(y) * 2 + 1).clone().sum(1),
    "gelu": lambda y: functional.gelu(y).sum(1),
    "silu": lambda y: functional.silu(y) @ torch.ones(LARGE[1], 4),
    "columns of gelu": lambda y: torch.ones(64, LARGE[0]) @ functional.gelu(y),
    "softmax": lambda y: torch.softmax(y, 1) @ torch.ones(LARGE[1], 4),
    "columns of softmax": lambda y: torch.ones(16, LARGE[0]) @ torch.softmax(y, 1),
    "transposed": lambda y: y.t() @ torch.ones(LARGE[0], 4),
    "reshaped": lambda y: torch.relu(y.view(64, -1, LARGE[1])).sum(2),
    "heads": lambda y: torch.bmm(y.view(8, -1, LARGE[1]), torch.ones(8, LARGE[1], 16)),
    "broadcast": lambda y: (y + torch.arange(4096.0)).sum(1),
    "halves": lambda y: (y[:, 1024:] * 1).sum(1),
    "gathered": lambda y: y.log_softmax(1).gather(1, torch.arange(512).view(-1, 1)),
    "softmax along axis of one batch": lambda y: torch.bmm(
        torch.ones(1, 16, 512), torch.log_softmax(y.view(1, 512, -1), 1)
    ),
    "odd rows of sequences": lambda y: (y.view(8, 64, -1)[:, :-1] * 1).view(-1, 4096).sum(1),
    "middle of zeros": lambda y: torch.ops.aten.slice_backward(y, [512, 4100], 1, 3, 4099, 1).sum(
        1
    ),
    "rows within zeros": lambda y: torch.ops.aten.slice_backward(
        y.view(64, 8, -1), [64, 10, 4096], 1, 1, 9, 1
    ).sum(2),
    "joined rows": lambda y: torch.cat([y[100:] * 2, torch.ones(3, 4096), y[:100]]).sum(1),
    "joined columns": lambda y: torch.cat([-y[:, 2048:], y[:, :2048]], 1) @ torch.ones(4096, 16),
    "joined sequences": lambda y: torch.cat([y.view(64, 8, -1)] * 2, 1).sum(2),
    "joined types": lambda y: torch.cat([y, torch.ones(2, 4096, dtype=torch.double)]).sum(1),
    "double": lambda y: y.double().sum(1),
    "sum in double precision": lambda y: y.sum(1, dtype=torch.float64),
    "number of positive columns": lambda y: (y > 0).sum(0),
    "mean in half precision": lambda y: y.bfloat16().mean(1),
    "quotient of whole numbers": lambda y: (y.to(torch.uint8) / 3).sum(1),
    "softmax of the transposed": lambda y: y.t().softmax(1) @ torch.ones(LARGE[0], 4),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("threads", [1, 2])
def test_operator_reads_value_without_room(name: str, threads: int) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(LARGE[0], 32), torch.randn(32, LARGE[1])
    with threads_set(threads):
        expected = READERS[name](x @ weight)
        cores.forget_signatures()  # slices of a new length need room for a trial
        with torch.no_grad(), kept_budget(7 << 20):
            found = READERS[name](x @ weight)
    assert same(found, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_sum_of_whole_numbers_in_slices_stays_within_budget(dtype: torch.dtype) -> None:
    """The kernel converts a slice to 64-bit numbers first."""
    torch.manual_seed(1)
    x, weight = torch.randn(LARGE[0], 32), torch.randn(32, LARGE[1])
    expected = torch.round(x @ weight).to(dtype).sum(1)
    for budget in range(10_000_000, 17_000_000, 1_000_000):
        with torch.no_grad(), kept_budget(budget):
            found = torch.round(x @ weight).to(dtype).sum(1)
        assert same(found, expected)


def infinite_row() -> Tensor:
    x = torch.randn(768, 24)
    x[700] = torch.inf
    return x


#: The argument, and an operator whose bits in slices must be those of the whole, or that must not
#: run in slices.
EDGES: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "view with finer rows": (
        lambda: torch.randn(700, 64),
        lambda x: (x @ torch.linspace(-1, 1, 64 * 1600).sin().view(64, 1600)).view(5600, 200) * 2,
    ),
    "step of rows": (
        lambda: torch.randn(700, 32),
        lambda x: (x @ torch.linspace(-1, 1, 32 * 1600).view(32, 1600))[::3].sum(1),
    ),
    "largest of signed zeros": (
        lambda: torch.where(torch.rand(701, 201) < 0.5, -0.0, 0.0),
        lambda x: torch.maximum(x, torch.zeros(1)),
    ),
    "clamp of signed zeros": (
        lambda: torch.where(torch.rand(701, 201) < 0.5, -0.0, 0.0),
        lambda x: x.clamp_min(torch.zeros(1)).clamp(max=torch.zeros(201)),
    ),
    "log-softmax of one row": (lambda: torch.randn(1, 2048), lambda x: x.log_softmax(1)),
    "complex": (lambda: torch.randn(701, 201, dtype=torch.complex64), lambda x: x * x),
    "infinite row": (
        infinite_row,
        lambda x: (
            torch.ones(16, 768)
            @ (x @ torch.linspace(-1, 1, 24 * 3001).view(24, 3001)).log_softmax(1)
        ),
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edge_in_slices_is_equal_or_refused(name: str) -> None:
    torch.manual_seed(0)
    make, operator = EDGES[name]
    x = make()
    plain = operator(x)
    with rekindle.budget(None, learn=False) as run:
        operator(x)
    for share in (0.2, 0.3, 0.5, 0.7):
        with suppress(rekindle.OutOfBudget):
            with rekindle.budget(int(share * run.peak), learn=False, split="equal"):
                found = operator(x)
            assert torch.equal(found.view(torch.uint8), plain.view(torch.uint8))


def test_loss_of_transposed_scores_gives_equal_gradients() -> None:
    """The first rows have no loss, so that they tell nothing about the others."""
    torch.manual_seed(0)
    targets = torch.randint(200, 768, (768,))
    targets[:200] = -100
    x, w = torch.randn(768, 24).requires_grad_(), torch.randn(24, 768).requires_grad_()

    def step() -> list[Tensor]:
        loss = functional.nll_loss((x @ w).log_softmax(1).t(), targets)
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]

    with rekindle.budget(None, learn=False) as run:
        expected = step()
    for share in (0.2, 0.3, 0.4):
        with suppress(rekindle.OutOfBudget):
            with rekindle.budget(int(share * run.peak), learn=False, split="equal"):
                found = step()
            assert same(found, expected)


@pytest.mark.parametrize("classes", [200, 3001])
def test_targets_of_8_bits_give_equal_loss_in_slices(classes: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(768, 24), torch.randn(24, classes)
    targets = torch.randint(0, 200, (768,), dtype=torch.uint8)
    expected = functional.cross_entropy(x @ weight, targets)
    budget = x.nbytes + weight.nbytes + 3 * len(x) * classes
    with rekindle.budget(budget, learn=False, split="equal"):
        found = functional.cross_entropy(x @ weight, targets)
    assert torch.equal(found, expected)


def test_report_names_operators_that_ran_in_slices() -> None:
    with rekindle.budget(STATE + SCORES // 2, learn=False, split="equal") as run:
        results(*drawn(), functional.cross_entropy)
    report = str(run.report())
    assert "Operators that had no room as a whole ran in slices: " in report
    assert "nll_loss_forward (1 call in up to" in report


def test_report_of_run_with_room_names_no_slices() -> None:
    with rekindle.budget(STATE + 10 * SCORES, learn=False, split="equal") as run:
        results(*drawn(), functional.cross_entropy)
    assert "in slices" not in str(run.report())


@pytest.mark.parametrize("kib", [200, 240, 280])
def test_budget_that_suffices_for_whole_operators_slices_none(kib: int) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(256, 32)
    for _ in range(2):
        model.zero_grad()
        with rekindle.budget(kib * 1024, learn=False) as run:
            (2 * model(x)).sum().backward()
        assert run.recomputations
        assert "in slices" not in str(run.report())


def test_long_loop_without_room_raises_out_of_budget_soon() -> None:
    """A state of the loop could be computed in slices from all states before it."""
    x, weight = torch.randn(256, 64), (torch.randn(64, 64) / 8).requires_grad_()

    def loop() -> None:
        states = [x]
        for _ in range(300):
            states.append(torch.tanh(states[-1] @ weight) * states[-1])
        torch.stack(states).sum().backward()

    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(4 * x.nbytes, learn=False):
        loop()


def test_gradient_is_freed_after_its_reader_failed_in_slices() -> None:
    torch.manual_seed(20)
    hidden = torch.randn(192, 64, requires_grad=True)
    wide = (torch.randn(64, 1024) * 0.2).requires_grad_()
    narrow = (torch.randn(1024, 64) * 0.05).requires_grad_()
    weights, left = (hidden, wide, narrow), []

    def train() -> None:
        scores = hidden @ wide
        part, kept = narrow[..., :64], narrow.relu()
        product = part @ hidden.t().unsqueeze(0)
        scaled, gelu = product.mul(0.5).add(0.1), functional.gelu(product)
        values = (scaled, gelu, part, kept[..., :64], scores, product.mean(-1, keepdim=True))
        sum(each.abs().sum() for each in values).backward()

    with threads_set(2):
        for budget in (6_000_000, 6_100_000, 7_000_000, 7_822_562, 7_928_837):
            for weight in weights:
                weight.grad = None
            with Tracker(), suppress(rekindle.OutOfBudget):
                with rekindle.budget(budget, learn=False, split="equal") as run:
                    train()
                gc.collect()
                torch.zeros(())  # Rekindle notices freed storages at the next operator
                left.append(run.memory - 2 * sum(each.nbytes for each in weights))
    assert left == [0] * len(left) != []


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 4.0, 1.5])
@pytest.mark.parametrize("channels", [3, 32])
def test_upsampling_in_slices_is_equal(factor: float, channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, channels, 41, 30)

    def compute() -> Tensor:
        return (functional.interpolate(x, scale_factor=factor) * 2).sum(3)

    expected = compute()
    with rekindle.budget(None, learn=False) as run:
        compute()
    for share in range(25, 100, 10):
        with suppress(rekindle.OutOfBudget), kept_budget(run.peak * share // 100):
            assert same(compute(), expected)
