"""Tests of `recomputable` functions that Rekindle does not recompute, and of the stated reasons."""

from __future__ import annotations

import ctypes
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import rekindle
from rekindle.pytorch.native import _functions as functions
from tests.pytorch.native.gates import (
    DEPTH,
    ROWS,
    WIDTH,
    compared,
    gate,
    kept,
    straight,
    trained,
)


def test_function_that_calls_mark_dirty_is_not_recomputed() -> None:
    @rekindle.recomputable
    class Into(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            ctx.save_for_backward(weight)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            (weight,) = ctx.saved_tensors
            return gradient * 2, weight * 0

    why = kept(lambda x, w: Into.apply(x @ w, w))
    assert why == "it writes to its arguments (ctx.mark_dirty)"


def test_function_that_writes_its_argument_is_not_recomputed() -> None:
    """If it ran again, it would write to its argument again."""
    layer = straight(lambda _, x, w: x.mul_(0.5) @ w)
    assert (
        kept(lambda x, w: layer((x * 2).detach(), w))
        == "it writes to memory that it did not allocate (aten::mul_)"
    )


def test_function_that_writes_by_address_is_not_recomputed() -> None:
    def body(_: Any, x: Tensor, weight: Tensor) -> Tensor:
        product = x @ weight
        ctypes.memset(x.data_ptr(), 0, 4)
        return product

    layer = straight(body)
    assert kept(lambda x, w: layer(x.detach().clone(), w)) == "it writes to its arguments"


def test_function_that_writes_source_first_recomputes_readers() -> None:
    """The function overwrites `buffer`, from which an evicted value would be recomputed.

    Rekindle recomputes that value before the function runs, and keeps it in memory (R4, sources).
    """
    layer = straight(lambda _, x, w: (x.add_(1) @ w).tanh())

    def found() -> list[Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        buffer = torch.randn(ROWS, WIDTH)
        y = buffer.sin() @ weight
        for _ in range(DEPTH):
            y = y.sin() * y
        z = layer(buffer, weight)
        (y.mean() + z.mean()).backward()
        assert weight.grad is not None
        return [buffer, weight.grad]

    wanted = found()
    for harsh in (False, True):
        with rekindle.budget("1GiB", learn=False) as run:
            run._driver.core.evict_before_every_op(run._driver.handle, harsh)
            assert all(map(torch.equal, found(), wanted))


def test_function_that_updates_running_statistics_runs_once() -> None:
    moved = torch.zeros(())
    layer = straight(lambda _, x, w: (moved.add_(1), x @ w)[1])
    assert kept(layer) == "it writes to memory that it did not allocate (aten::add_)"
    assert moved.item() == 2 * DEPTH


def test_function_that_writes_closure_is_not_recomputed() -> None:
    mean, variance = torch.zeros(WIDTH), torch.ones(WIDTH)
    layer = straight(
        lambda _, x, w: torch.batch_norm(x @ w, None, None, mean, variance, True, 0.1, 1e-5, False)
    )
    assert kept(layer) == "it writes to memory that it did not allocate (aten::native_batch_norm)"


def test_nondeterministic_function_is_not_recomputed() -> None:
    calls: list[int] = []

    def body(_: Any, x: Tensor, weight: Tensor) -> Tensor:
        calls.append(1)
        return x @ weight + len(calls) % 2

    layer = straight(body)
    x, weight = torch.rand(ROWS, WIDTH), torch.rand(WIDTH, WIDTH, requires_grad=True)
    with rekindle.budget("4MiB") as run:
        layer(x, weight)
        ran = len(calls)
        layer(x, weight)
    assert ran == 2
    assert len(calls) == 3
    (why,) = run._driver.functions_kept.values()
    assert why == "the bits of its results differ when it is recomputed"


@pytest.mark.parametrize("module", ["random", "numpy"])
def test_function_that_calls_python_random_is_not_recomputed(module: str) -> None:
    if module == "random":
        draw, seed = random.random, random.seed
    else:
        numpy = pytest.importorskip("numpy")
        draw, seed = numpy.random.rand, numpy.random.seed
    layer = straight(lambda _, x, w: x @ w * draw())

    def found() -> list[Any]:
        seed(0)
        return [*trained(layer), torch.tensor(draw())]

    wanted = found()
    with rekindle.budget(None) as run:
        assert all(map(torch.equal, found(), wanted))
    (why,) = run._driver.functions_kept.values()
    assert why == "it draws from a generator of Python's or NumPy's"


def test_function_with_own_generator_is_not_recomputed() -> None:
    generator = torch.Generator()
    layer = straight(lambda _, x, w: x @ w * torch.rand(1, generator=generator))

    def found() -> list[Tensor]:
        generator.manual_seed(0)
        return [*trained(layer), generator.get_state()]

    wanted = found()
    with rekindle.budget(None) as run:
        assert all(map(torch.equal, found(), wanted))
    (why,) = run._driver.functions_kept.values()
    assert why == "it draws from a random number generator of its own"


def test_function_that_returns_cached_tensor_is_not_recomputed() -> None:
    cache: dict[int, Tensor] = {}
    layer = straight(lambda _, x, w: cache.setdefault(0, torch.ones(ROWS, WIDTH)).view_as(x))
    assert kept(layer) in (
        "it returns memory that it also keeps for itself",
        "it gives other results when it is recomputed",
    )


def test_function_with_collective_is_not_recomputed() -> None:
    """The group has one rank. With more ranks, a second collective would wait for ever."""
    import torch.distributed as dist

    ran: list[int] = []

    def body(_: Any, x: Tensor, weight: Tensor) -> Tensor:
        product = x @ weight
        ran.append(1)
        dist.all_reduce(product)
        return product

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = straight(body)
        assert kept(layer) == "it communicates with other processes"
        assert len(ran) == 2 * DEPTH
    finally:
        dist.destroy_process_group()


def test_function_that_hides_tensors_on_ctx_is_named() -> None:
    """Tensors in objects and closures on `ctx` are not found, so they are counted and kept."""

    @rekindle.recomputable
    class Hidden(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, closure: bool) -> Tensor:
            value = torch.sigmoid(x @ weight)
            ctx.state = (lambda: value) if closure else SimpleNamespace(several=[value])
            ctx.save_for_backward(x, weight)
            return x * value

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
            x, weight = ctx.saved_tensors
            value = ctx.state() if ctx.needs_input_grad[2] is None else None
            return gradient @ weight.t(), x.t() @ (gradient if value is None else value), None

    x, weight = torch.rand(ROWS, WIDTH), torch.rand(WIDTH, WIDTH, requires_grad=True)
    for closure, name in ((False, "SimpleNamespace"), (True, "function")):
        with rekindle.budget(None) as run:
            before = run.memory
            y = Hidden.apply(x, weight, closure)
            assert run.memory - before >= x.nbytes + weight.nbytes + 2 * y.nbytes
            (why,) = run._driver.functions_kept.values()
        assert name in why
        assert "ctx.save_for_backward" in why


def test_function_that_keeps_graph_on_ctx_is_named() -> None:
    """The values that the inner graph saves are kept."""

    @rekindle.recomputable
    class Inner(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.inner = x.detach().requires_grad_(), weight.detach().requires_grad_()
                ctx.result = (ctx.inner[0] @ ctx.inner[1]).tanh()
            return ctx.result.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(ctx.result, ctx.inner, gradient)

    assert "graph" in kept(Inner.apply)


def test_function_is_named_until_trial_has_room() -> None:
    """A trial needs room for the results of a second run."""

    @rekindle.recomputable
    class Wide(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made = torch.cat([x] * 16)
            ctx.save_for_backward(made)
            return made

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient[:ROWS] * ctx.saved_tensors[0][:ROWS]

    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    with rekindle.budget(24 * x.nbytes, learn=False) as run:
        Wide.apply(x)
        (why,) = run._driver.functions_kept.values()
        assert "room" in why
        run._driver.engine.budget = 64 * x.nbytes
        for _ in range(3):
            Wide.apply(x)
        assert run._driver.functions_kept == {}


def test_function_with_mutable_argument_is_not_recomputed() -> None:
    @rekindle.recomputable
    class Configured(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, what: Any) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.t(), x.t() @ gradient, None

    with rekindle.budget(None) as run:
        for what in (object(), {"a": 1}, [torch.ones(1)], lambda: run, ModuleType("m")):
            trained(lambda x, w, what=what: Configured.apply(x, w, what), 1)
            (why,) = run._driver.functions_kept.values()
            assert "it is given" in why
            run._driver.functions_kept.clear()
        fixed = (None, 1, True, 0.5, "text", (1, (2, 3)), [1, 2], torch.float32, torch.relu, len)
        for what in fixed:
            trained(lambda x, w, what=what: Configured.apply(x, w, what), 1)
        assert run._driver.functions_kept == {}


def test_function_with_new_number_each_call_is_not_recomputed() -> None:
    ran: list[int] = []

    @rekindle.recomputable
    class Numbered(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
            ran.append(1)
            return x * number

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    x = torch.rand(4, requires_grad=True)
    with rekindle.budget("1MiB") as run:
        for number in range(400):
            Numbered.apply(x, number)
    assert len(ran) == 400 + functions._MOST_VARIANTS
    assert [*run._driver.functions_kept.values()] == ["its arguments change too often"]


def test_function_in_torch_function_mode_is_not_recomputed() -> None:
    x, weight = torch.rand(ROWS, WIDTH), torch.rand(WIDTH, WIDTH, requires_grad=True)
    with rekindle.budget("4MiB") as run, torch.device("cpu"):
        gate(x, weight)
    (why,) = run._driver.functions_kept.values()
    assert why == "it is called inside a mode of torch.overrides, such as torch.device(...)"


def test_recomputed_function_repeats_its_python_side_effects() -> None:
    """Python side effects are not observed, so each recomputation appends to the list once more."""
    ran: list[int] = []
    layer = straight(lambda _, x, w: (ran.append(1), torch.sigmoid(x @ w))[1])
    run = compared(lambda x, w: layer(x, w).tanh())
    assert run.recomputations > 0
    assert len(ran) > 3 * DEPTH + 2
