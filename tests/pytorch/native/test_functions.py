"""Tests of `rekindle.recomputable`, which recomputes an `autograd.Function` as one operator."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rekindle
from tests.pytorch.native.gates import (
    DEPTH,
    ROWS,
    WIDTH,
    Gate,
    Layer,
    compared,
    filled,
    gate,
    trained,
    units_recomputed,
)


def test_recomputable_function_is_recomputed_as_one_operator() -> None:
    assert units_recomputed(gate) > 0


def test_autograd_function_is_not_recomputed_by_default() -> None:
    plain: Any = type("Plain", (Function,), {**vars(Gate), "__module__": __name__})
    with rekindle.budget(None) as run:
        trained(lambda x, w: plain.apply(x, w, 1.5))
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(run.peak // 2):
        trained(lambda x, w: plain.apply(x, w, 1.5))


def test_recomputable_function_runs_twice_on_first_call() -> None:
    ran: list[int] = []

    @rekindle.recomputable
    class Counted(Gate):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
            ran.append(1)
            return Gate.__dict__["forward"].__func__(ctx, x, weight, scale)

    layer: Layer = lambda x, w: Counted.apply(x, w, 1.5)  # noqa: E731
    # Each new kind of call runs twice. The first budget sees two kinds: the argument of the chain's
    # first call needs no gradient, but those of the others do.
    for runs in (DEPTH + 2, DEPTH):
        ran.clear()
        with rekindle.budget(None):
            trained(layer)
        assert len(ran) == runs


def test_function_that_saves_view_of_argument_is_recomputed() -> None:
    """The norm of the Liger kernels saves such a view: `X.view(-1, dim)`."""

    @rekindle.recomputable
    class Flat(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            flat = x.view(-1, 2, WIDTH // 2)
            root = flat.square().mean(-1, keepdim=True).rsqrt()
            ctx.save_for_backward(flat, weight.t(), root)
            return filled(flat * root).view_as(x) @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            flat, turned, root = ctx.saved_tensors
            inner = (gradient @ turned).view_as(flat)
            normed = flat * root
            dx = root * (inner - normed * (inner * normed).mean(-1, keepdim=True))
            return dx.view_as(gradient), normed.view_as(gradient).t() @ gradient

    assert units_recomputed(Flat.apply) > 0


def _swiglu(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x @ weight).chunk(2, -1)
    ctx.save_for_backward(x, weight, gate, up)
    return torch.cat([torch.sigmoid(gate) * gate * up] * 2, -1)


def _lora(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    inner = x @ weight[:, :8]
    ctx.save_for_backward(x, weight, inner, weight.t())
    return x @ weight + inner @ weight[:8]


def _attention(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
    query = (x @ weight).view(*x.shape[:2], 4, -1).transpose(1, 2)
    scores = (query @ query.transpose(-1, -2)).softmax(-1)
    output = (scores @ query).transpose(1, 2).reshape(x.shape)
    ctx.save_for_backward(x, weight, query, scores, output)
    return output @ weight


@pytest.mark.parametrize("body", [_swiglu, _lora, _attention])
def test_function_of_three_dimensions_is_recomputed(
    body: Callable[[Any, Tensor, Tensor], Tensor],
) -> None:
    """A product with a batch dimension folds its operand through a view."""

    @rekindle.recomputable
    class Batched(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return body(ctx, x, weight)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, *others = ctx.saved_tensors
            total = torch.stack([each.mean() for each in others]).sum()
            return gradient @ weight.t() * total, x.flatten(0, 1).t() @ gradient.flatten(0, 1)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return Batched.apply(x.view(16, -1, WIDTH), weight).flatten(0, 1)

    assert units_recomputed(layer) > 0


def test_tensors_stored_on_ctx_are_evicted_and_recomputed() -> None:
    @rekindle.recomputable
    class Attributes(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.x, ctx.weight = x, weight
            ctx.several = {"gate": torch.sigmoid(x @ weight), "scale": 2}
            return x * ctx.several["gate"]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            value = ctx.several["gate"]
            inner = gradient * ctx.x * value * (1 - value)
            return gradient * value + inner @ ctx.weight.t(), ctx.x.t() @ inner

    compared(Attributes.apply, 0.9)
    with rekindle.budget(None) as run:
        trained(Attributes.apply)
    assert run._driver.functions_kept == {}


def test_function_with_nondifferentiable_output_is_recomputed() -> None:
    @rekindle.recomputable
    class Most(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, int]:
            values = x @ weight
            largest, where = values.max(-1)
            ctx.mark_non_differentiable(where)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, weight, values.tanh())
            return values.tanh() + largest[:, None] * 0, where, 3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, of_where: None, of_number: None) -> Any:
            assert of_where is None
            assert of_number is None
            x, weight, tanh = ctx.saved_tensors
            inner = gradient * (1 - tanh * tanh)
            return inner @ weight.t(), x.t() @ inner

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        values, where, number = Most.apply(x, weight)
        assert not where.requires_grad
        assert number == 3
        return values

    assert units_recomputed(layer) > 0


def test_function_that_returns_its_argument_is_recomputed() -> None:
    @rekindle.recomputable
    class Through(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            ctx.save_for_backward(x, weight, torch.sin(x))
            return x, x @ weight

        @staticmethod
        def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, sine = ctx.saved_tensors
            return one * sine + other @ weight.t(), x.t() @ other

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        same, other = Through.apply(x, weight)
        assert same.data_ptr() == x.data_ptr()
        return (same + other).tanh()

    assert units_recomputed(layer) > 0


def test_function_with_setup_context_is_recomputed() -> None:
    @rekindle.recomputable
    class Later(Function):
        @staticmethod
        def forward(x: Tensor, weight: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor]:
            value = torch.sigmoid(x @ weight)
            return x * value * scale, value

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            x, weight, ctx.scale = inputs
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(x, weight, output[1])

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
            x, weight, value = ctx.saved_tensors
            gradient = gradient * ctx.scale
            inner = gradient * x * value * (1 - value)
            return gradient * value + inner @ weight.t(), x.t() @ inner, None

    assert units_recomputed(lambda x, w: Later.apply(x, w)[0]) > 0


def test_recomputed_function_draws_same_random_numbers() -> None:
    @rekindle.recomputable
    class Dropout(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            mask = torch.rand_like(x) > 0.3
            ctx.save_for_backward(x, weight, mask)
            return x * mask @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, mask = ctx.saved_tensors
            return gradient @ weight.t() * mask, (x * mask).t() @ gradient

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.dropout(Dropout.apply(x, weight), 0.1)

    wanted = [*trained(layer), torch.get_rng_state()]
    with rekindle.budget(None) as roomy:
        got = [*trained(layer), torch.get_rng_state()]
    assert all(map(torch.equal, got, wanted))
    with rekindle.budget(int(0.6 * roomy.peak), learn=False) as run:
        got = [*trained(layer), torch.get_rng_state()]
    assert all(map(torch.equal, got, wanted))
    assert run.recomputations > 0


def test_recomputed_function_can_be_differentiated_twice() -> None:
    @rekindle.recomputable
    class Cube(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            square = x * x
            ctx.save_for_backward(x, square)
            return square * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x, _ = ctx.saved_tensors
            return gradient * 3 * x * x

    def second() -> Tensor:
        torch.manual_seed(0)
        x = torch.rand(ROWS, WIDTH, requires_grad=True)
        y = x
        for _ in range(DEPTH):
            y = Cube.apply(y).sin()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    wanted = second()
    with rekindle.budget(None) as roomy:
        assert torch.equal(second(), wanted)
    with rekindle.budget(int(0.7 * roomy.peak), learn=False) as run:
        assert torch.equal(second(), wanted)
    assert run.recomputations > 0
    assert run._driver.functions_kept == {}


def test_once_differentiable_function_raises_error_of_pytorch() -> None:
    @rekindle.recomputable
    class Once(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.cos())
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]

    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget("1MiB"):
        (first,) = torch.autograd.grad(Once.apply(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputable_function_in_checkpoint_matches_pytorch(reentrant: bool) -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return gate(gate(x, weight).tanh(), weight)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(block, x, weight, use_reentrant=reentrant)

    assert units_recomputed(layer, 0.95 if reentrant else 0.8) > 0


def test_recomputable_function_under_vmap_matches_pytorch() -> None:
    @rekindle.recomputable
    class Sine(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0].cos()

    def found() -> Tensor:
        x = torch.linspace(0, 1, WIDTH).expand(4, -1).clone().requires_grad_()
        torch.vmap(Sine.apply)(x).sum().backward()
        assert x.grad is not None
        return x.grad + torch.func.grad(lambda y: Sine.apply(y).sum())(x.detach())

    wanted = found()
    with rekindle.budget("1MiB"):
        assert torch.equal(found(), wanted)


@pytest.mark.parametrize("cast", [None, torch.float32])
def test_recomputable_function_under_autocast_matches_pytorch(cast: torch.dtype | None) -> None:
    """The function uses `torch.amp.custom_fwd`, and is recomputed after autocast has ended."""

    @rekindle.recomputable
    class Product(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            product = x @ weight
            ctx.save_for_backward(x, weight, product.tanh())
            return product.tanh()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, tanh = ctx.saved_tensors
            inner = gradient * (1 - tanh * tanh)
            return (inner @ weight.t()).to(x.dtype), (x.t().to(inner.dtype) @ inner).to(
                weight.dtype
            )

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = Product.apply(x, weight)
        assert made.dtype == (cast or torch.bfloat16)
        return made.float() + x

    assert units_recomputed(layer, 0.7) > 0


def test_function_that_reads_requires_grad_is_recomputed() -> None:
    """In flash_attn, the tensors that the function saves depend on `requires_grad` as well."""

    @rekindle.recomputable
    class Asks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            assert ctx.needs_input_grad[1]
            ctx.save_for_backward(x, weight, x.sin() if weight.requires_grad else None)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, sine = ctx.saved_tensors
            return gradient @ weight.t() + sine * 0, x.t() @ gradient

    assert units_recomputed(Asks.apply) > 0


def test_autograd_function_under_no_grad_keeps_no_inputs() -> None:
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
    with rekindle.budget("8MiB") as run, torch.no_grad():
        for _ in range(4 * DEPTH):
            x = gate(x, weight)
        assert run.memory < 8 * x.nbytes


def test_graph_of_recomputable_function_outlives_budget() -> None:
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH).div(4).requires_grad_()

    def loss() -> Tensor:
        x = torch.ones(ROWS, WIDTH)
        for _ in range(DEPTH):
            x = gate(x, weight)
        return x.square().mean()

    (wanted,) = torch.autograd.grad(loss(), weight)
    with rekindle.budget(None) as roomy:
        torch.autograd.grad(loss(), weight)
    with rekindle.budget(int(0.6 * roomy.peak), learn=False):
        left = loss()
    (got,) = torch.autograd.grad(left, weight)
    assert torch.equal(got, wanted)


def test_recomputable_function_in_two_threads_matches_pytorch() -> None:
    wanted = _seeded()
    with rekindle.budget(None, learn=False) as roomy:
        _seeded()
    found: list[list[Tensor]] = []
    with rekindle.budget(int(1.2 * roomy.peak), learn=False):
        threads = [threading.Thread(target=lambda: found.append(_seeded())) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(found) == 2
    for each in found:
        assert all(map(torch.equal, each, wanted))


def _seeded() -> list[Tensor]:
    """Train on fixed numbers, so that the results do not depend on other threads."""
    weights = [torch.linspace(-1, 1, WIDTH**2).view(WIDTH, WIDTH).requires_grad_() for _ in "abcd"]
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    for weight in weights:
        x = gate(x, weight)
    x.square().mean().backward()
    return [x.detach(), *(each.grad for each in weights if each.grad is not None)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # a warning of Dynamo itself
def test_torch_compile_traces_recomputable_function_in_one_graph() -> None:
    @rekindle.recomputable
    class Sine(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0].cos()

    torch._dynamo.reset()
    layer = torch.compile(lambda x: Sine.apply(x).exp(), fullgraph=True, backend="eager")
    x = torch.rand(WIDTH, requires_grad=True)
    with rekindle.budget("8MiB"):
        assert torch.equal(layer(x), x.sin().exp())
    assert torch.equal(layer(x), x.sin().exp())


@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
def test_step_with_recomputable_functions_stays_within_budget(evict: Any) -> None:
    with rekindle.budget(None, evict=evict) as roomy:
        wanted = trained(gate)
    amount = int(0.6 * roomy.peak)
    with rekindle.budget(amount, evict=evict, learn=False) as run:
        got = trained(gate)
    assert all(map(torch.equal, got, wanted))
    assert run.peak <= amount
    assert run.recomputations > 0
    run._driver.engine.check()


def test_verify_of_step_with_recomputable_functions_passes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH).div(4).requires_grad_()

    def step() -> Tensor:
        weight.grad = None
        x = torch.ones(ROWS, WIDTH)
        for _ in range(DEPTH):
            x = gate(x, weight)
        loss = x.square().mean()
        loss.backward()
        return loss

    with rekindle.budget(None) as roomy:
        step()
    found = rekindle.verify(step, budget=int(0.6 * roomy.peak))
    assert found.recomputations > 0


def test_dispatch_mode_sees_operators_of_recomputable_function() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Names() as plain:
        wanted = trained(gate)
    with rekindle.budget(None, learn=False) as roomy:
        trained(gate)
    with rekindle.budget(roomy.peak // 2, learn=False) as run, Names() as within:
        got = trained(gate)
    assert all(map(torch.equal, got, wanted))
    assert run.recomputations > 0
    # without the aliases that PyTorch makes when it unpacks saved tensors
    seen = [name for name in within.names if name != "aten::detach"]
    assert seen == [name for name in plain.names if name != "aten::detach"]


def test_steps_with_recomputable_functions_leak_no_memory() -> None:
    gc.collect()
    gc.disable()  # a step's memory is freed without the collector
    try:
        with rekindle.budget("64MiB", learn=False) as run:
            found: list[tuple[int, int, int]] = []
            for steps in (3, 20):
                for _ in range(steps):
                    trained(gate)
                torch.zeros(())  # Rekindle notices freed storages at the next operator
                now = run._driver.engine.now()
                found.append((now.storages, now.alive, run.memory))
    finally:
        gc.enable()
    assert found[0] == found[1]
