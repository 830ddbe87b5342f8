"""Tests of the workspace of operators: memory that an operator allocates and frees internally.

Rekindle measures it in the first calls, and later frees memory for it before the operator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.pytorch import cores
from tests.pytorch.allocations import allocated

SIZE = 100_000  # floats in most vectors
VECTOR = 4 * SIZE


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    module: Any = native_core()
    if not module.count_allocations():
        pytest.skip("another CPU allocator is installed, so allocations cannot be counted")
    cores.forget_signatures()
    yield
    cores.forget_signatures()


@torch.library.custom_op("workspaces::curve", mutates_args=(), device_types="cpu")
def _curve(x: Tensor) -> Tensor:
    """An operator that uses four times its result as workspace, and frees it."""
    workspace = x.new_empty(4 * x.numel())
    y = torch.sin(x)
    del workspace
    return y


_curve.register_fake(torch.empty_like)
_curve.register_autograd(
    lambda ctx, gradient: gradient * _curve(*ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _curves(weight: Tensor) -> None:
    x = weight
    for _ in range(10):
        x = _curve(x * 0.9)
    x.sum().backward()


def _within(budget: int, step: Callable[[], object]) -> tuple[int, rekindle.Run]:
    """Return the largest number of bytes allocated at once, and the run."""
    runs: list[rekindle.Run] = []

    def run() -> None:
        with rekindle.budget(budget) as run:
            step()
        runs.append(run)

    return allocated(run).peak, runs[0]


def test_values_are_evicted_for_workspace_of_recomputation_too() -> None:
    weight = torch.rand(SIZE, requires_grad=True)
    budget = 10 * VECTOR
    peak, run = _within(budget, lambda: _curves(weight))
    assert run.recomputations > 0
    assert VECTOR + peak < budget + 1024  # smaller workspaces, such as scalars, are not measured


def test_smallest_budget_of_error_includes_workspace() -> None:
    weight = torch.rand(SIZE, requires_grad=True)
    with rekindle.budget("1GiB"):
        _curve(weight)
    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget(4 * VECTOR):
        _curve(weight)
    # allocated blocks are a little larger
    assert 5 * VECTOR <= caught.value.needed < 5 * VECTOR + 64
    assert caught.value.smallest_budget == caught.value.needed + VECTOR
    with rekindle.budget(caught.value.smallest_budget):
        _curve(weight)


def test_convolution_workspaces_stay_within_budget() -> None:
    def program() -> tuple[Callable[[], None], int]:
        torch.manual_seed(0)

        def block(channels: int) -> nn.Module:
            convolution = nn.Conv2d(channels, 32, 3, padding=1)
            return nn.Sequential(convolution, nn.BatchNorm2d(32), nn.ReLU(inplace=True))

        model = nn.Sequential(block(3), *(block(32) for _ in range(7)))
        batch = torch.rand(8, 3, 32, 32)

        def step() -> None:
            model(batch).square().mean().backward()
            model.zero_grad()

        constants = [*model.parameters(), *model.buffers(), batch]
        return step, sum(each.nbytes for each in constants)

    step, constants = program()
    plain = allocated(step).peak
    step, constants = program()
    budget = constants + plain // 2
    peak, run = _within(budget, step)
    assert run.recomputations > 0
    assert constants + peak <= 1.02 * budget


def test_budget_equal_to_measured_peak_evicts_nothing() -> None:
    """The measured peak includes workspace, so a budget equal to the peak evicts nothing."""
    weight = torch.rand(SIZE, requires_grad=True)
    with rekindle.budget(None) as measured:
        _curves(weight)
    with rekindle.budget(measured.peak) as run:
        _curves(weight)
    assert run.evictions == 0
    assert run.peak == measured.peak
    with rekindle.budget(measured.peak - VECTOR) as run:
        _curves(weight)
    assert run.evictions > 0


def test_workspace_of_operators_without_grad_counts_in_peak() -> None:
    x = torch.rand(SIZE)
    with rekindle.budget(None) as run, torch.no_grad():
        for _ in range(5):
            _curve(x)
    assert 6 * VECTOR <= run.peak < 6 * VECTOR + 1000


def test_input_freed_by_operator_is_not_workspace() -> None:
    """The input has no other reference, is freed when the operator ends, and counts once."""
    x = torch.rand(SIZE)
    with rekindle.budget(None) as run, torch.no_grad():
        for _ in range(5):
            (x * 2).sum()
    assert run.peak < 2 * VECTOR + 1000


def test_memory_from_before_budget_is_subtracted_when_freed() -> None:
    """Rekindle wraps the allocator when a budget begins, but also counts frees of older memory."""
    tensors = [torch.rand(SIZE) for _ in range(2)]
    with rekindle.budget(None) as run, torch.no_grad():
        tensors.append(tensors[0] + tensors[1])
        assert run.memory == 3 * VECTOR
        tensors.pop(0)
        assert run.memory == 2 * VECTOR
        tensors.clear()
        assert run.memory == 0


def _layers(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def test_reading_first_parameter_counts_memory_of_whole_model() -> None:
    """From its first operator on, `run.memory` includes all parameters and existing gradients."""
    model, x = _layers(50), torch.rand(3, 50)
    model(x).sum().backward()
    weights = sum(each.nbytes for each in model.parameters())
    seen: list[int] = []
    runs: list[rekindle.Run] = []
    model[0].register_forward_hook(lambda *_: seen.append(runs[0].memory))
    with rekindle.budget("1GiB") as run:
        runs.append(run)
        model(x)
    assert seen[0] >= 2 * weights + x.nbytes


def test_parameters_of_deeply_nested_model_count_towards_memory() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(600)))
    with rekindle.budget(None) as run, torch.no_grad():
        model(torch.rand(1, 2))
        assert run.memory >= sum(each.nbytes for each in model.parameters())


def test_model_larger_than_budget_is_refused_at_first_operator() -> None:
    model, x = _layers(50), torch.rand(3, 50)
    weights = sum(each.nbytes for each in model.parameters())
    calls: list[int] = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(rekindle.OutOfBudget, match="a model needs"), rekindle.budget(weights // 2):
        model(x)
    assert not calls


def test_weight_outside_of_module_counts_from_its_first_use() -> None:
    first, second = (torch.rand(SIZE, requires_grad=True) for _ in range(2))
    with rekindle.budget(None) as run:
        first.sum()
        assert run.memory < VECTOR + 1000
        second.sum()
        assert run.memory >= 2 * VECTOR


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(50, 50)
        self.elsewhere = nn.Linear(50, 50, device="meta")
        self.none = nn.LazyLinear(50)

    def forward(self, x: Tensor) -> Tensor:
        return self.here(x)


def test_parameters_on_other_device_do_not_count() -> None:
    model = _Half()
    with rekindle.budget(None) as run:
        model(torch.rand(1, 50))
        assert model.here.weight.nbytes <= run.memory < 2 * model.here.weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_of_mean_stays_within_budget(dtype: torch.dtype) -> None:
    """In half precision, `mean` sums a temporary copy in single precision."""
    weight = torch.rand(SIZE, dtype=dtype, requires_grad=True)
    budget = 12 * weight.nbytes

    def step() -> None:
        x = weight
        for _ in range(10):
            x = torch.sin(x)
        x.mean().backward()

    peak, run = _within(budget, step)
    assert run.recomputations > 0
    assert run.peak <= budget
    assert weight.nbytes + peak < budget + 1024


def test_workspace_above_budget_on_first_run_is_refused() -> None:
    """The workspace of the first run is larger than estimated. Half of it fits into the budget."""
    weight = torch.rand(SIZE, requires_grad=True)
    budget = 4 * VECTOR

    def step() -> None:
        with rekindle.budget(budget, learn=False), pytest.raises(rekindle.OutOfBudget) as caught:
            _curve(weight)
        assert caught.value.operator == "workspaces::curve"
        assert caught.value.smallest_budget > budget

    assert weight.nbytes + allocated(step).peak <= budget


@pytest.fixture
def grow() -> Iterator[Callable[[Tensor, int], Tensor]]:
    """A new custom operator without a fake kernel, so that the size of its result is unknown."""
    with torch.library._scoped_library("rekindle_sizes", "FRAGMENT"):
        made = torch.library.custom_op(
            "rekindle_sizes::grow", lambda x, times: x.repeat(times), mutates_args=(),
            schema="(Tensor x, int times) -> Tensor",
        )  # fmt: skip
        made.register_autograd(lambda ctx, gradient: (gradient[: SIZE // 10] * 1, None))
        yield made


def _grown(grow: Any, weight: Tensor) -> Tensor:
    y = weight
    for _ in range(12):
        y = y.sin() * y
    return grow(y, 8).sum()


def _multiplied_sparse(grow: Any, weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(200, 100, generator=generator)
    left = torch.where(dense > 0.5, dense, 0).to_sparse().requires_grad_()
    right = torch.rand(100, 50, generator=generator).requires_grad_()
    return (torch.sparse.mm(left, right) * _grown(lambda y, _: y, weight)).sum()


@pytest.mark.parametrize("loss", [_grown, _multiplied_sparse])
def test_memory_inside_operator_stays_in_budget_or_is_told(
    grow: Callable[[Tensor, int], Tensor],
    loss: Callable[[Any, Tensor], Tensor],
) -> None:
    """The operator runs for the first time, so its memory is unknown."""

    def step() -> None:
        weight = torch.ones(SIZE // 10, requires_grad=True)
        loss(grow, weight).backward()

    plain = allocated(step).peak
    ran = 0
    for percent in range(100, 10, -6):
        budget = plain * percent // 100
        cores.forget_signatures()

        def within(budget: int = budget) -> None:
            with rekindle.budget(budget, learn=False, cache=False):
                step()

        with suppress(rekindle.OutOfBudget):
            peak = allocated(within).peak
            assert peak <= budget + 1024, percent
            ran += 1
    assert ran > 4


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2, stride=2)],
    ids=["3x3", "1x1", "transposed"],
)
def test_allocations_of_onednn_count_as_workspace(layer: nn.Module) -> None:
    """oneDNN converts images to a layout of its own. That memory counts, and is in the trace."""
    images = torch.rand(4, 8, 64, 64)
    with torch.no_grad():
        layer(images)
        given_out = allocated(lambda: layer(images))
        with rekindle.budget.unlimited(record=True) as run:
            for _ in range(2):
                layer(images)
    trace = run.trace
    made = 4 * layer(images).numel()
    inside = [op.workspace for op in trace.ops if "convolution" in op.name]
    assert inside == [given_out.peak - made] * 2


# -- results whose size depends on contents --------------------------------------------------------

torch.manual_seed(0)
_WIDE = torch.randn(400, 400)
_MASK = _WIDE > 0
_INTEGERS = torch.arange(160_000) % 7
_LOGITS = torch.randn(60, 40, 50).log_softmax(2)
_TARGETS = torch.randint(1, 50, (40, 20))
_LENGTHS = torch.full((40,), 60), torch.full((40,), 20)
_aten: Any = torch.ops.aten
#: Operator -> a call of it. The sizes of its results depend on the contents of its arguments.
DYNAMIC: dict[str, Callable[[], object]] = {
    "aten::index.Tensor": lambda: _WIDE[_MASK],
    "aten::masked_select": lambda: torch.masked_select(_WIDE, _MASK),
    "aten::nonzero": _MASK.nonzero,
    "aten::_unique": lambda: _aten._unique(_WIDE),
    "aten::_unique2": lambda: torch.unique(_WIDE, return_inverse=True),
    "aten::unique_consecutive": lambda: torch.unique_consecutive(_INTEGERS),
    "aten::unique_dim": lambda: torch.unique(_WIDE, dim=0),
    "aten::unique_dim_consecutive": lambda: torch.unique_consecutive(_WIDE, dim=0),
    "aten::repeat_interleave.Tensor": lambda: torch.repeat_interleave(_INTEGERS),
    "aten::bincount": lambda: torch.bincount(_INTEGERS),
    "aten::_ctc_loss": lambda: _aten._ctc_loss(
        _LOGITS, _TARGETS, _LENGTHS[0].tolist(), _LENGTHS[1].tolist()
    ),
    "aten::_ctc_loss.Tensor": lambda: _aten._ctc_loss.Tensor(_LOGITS, _TARGETS, *_LENGTHS),
    "aten::linalg_lstsq": lambda: torch.linalg.lstsq(_WIDE[:, :100], _WIDE[:, :50]),
    "aten::argwhere": lambda: torch.argwhere(_MASK),
    "aten::one_hot": lambda: nn.functional.one_hot(_INTEGERS[:20_000]),
    "combinations": lambda: torch.combinations(torch.arange(300.0), 2),
}


def test_each_operator_with_result_of_unknown_size_is_tested() -> None:
    tagged: set[str] = set()
    for name in torch._C._dispatch_get_all_op_names():
        short, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(_aten, short, None), overload or "default", None)
        if name.startswith("aten::") and op is not None and overload != "out":
            tagged |= {name} if torch.Tag.dynamic_output_shape in op.tags else set()
    assert len(tagged) > 10
    assert tagged <= DYNAMIC.keys()


@pytest.mark.parametrize("name", DYNAMIC)
def test_workspace_beside_result_of_unknown_size_is_in_budget(name: str) -> None:
    weight = torch.randn(400, 400, requires_grad=True)
    call = DYNAMIC[name]
    alone = allocated(call).peak
    constants = sum(
        each.nbytes for each in (_WIDE, _MASK, _INTEGERS, _LOGITS, _TARGETS, *_LENGTHS, weight)
    )
    budget = constants + alone + 6 * weight.nbytes

    def step() -> None:
        saved = [((weight * n).sin() * weight).sum() for n in range(12)]
        call()
        del saved

    with rekindle.budget(budget, learn=False, cache=False) as run:
        for each in (_WIDE, _MASK, _INTEGERS, _LOGITS, _TARGETS, *_LENGTHS, weight):
            run.keep(each.detach())
        for _ in range(3):
            step()
        before = run.memory
        peak = allocated(lambda: [step() for _ in range(3)]).peak
    assert run.evictions > 10
    assert before + peak <= 1.01 * budget + 4096
