"""Tests of rule R10 (after the context) with autograd.

They retain graphs, compute higher derivatives, and run backward passes in other threads and after
the budget has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import pytest
import torch
from torch import nn

import rekindle
from tests.pytorch.harsh import WIDTH, deeper, differing, everything, harshest, vector

Step = Callable[[], object]
TIGHT = 14 * 4 * WIDTH


def test_second_backward_through_retained_graph_matches_pytorch() -> None:
    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            loss = deeper(weight, 8).sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True, inputs=[weight])
            loss.backward()
            return loss, weight

        return step

    harsh = harshest(program)
    assert harsh.again["exp"] >= 3


def test_second_backward_without_retain_graph_raises() -> None:
    weight = vector(True)
    with rekindle.budget(TIGHT):
        loss = deeper(weight, 8).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_autograd_grad_of_some_inputs_matches_pytorch() -> None:
    """The calls have several outputs, an unused input, and given or batched output gradients."""

    def program() -> Step:
        first, second, unused = vector(True), vector(True), vector(True)

        def step() -> object:
            one, two = deeper(first, 4), deeper(second, 4)
            both = one * two
            gradients = torch.autograd.grad(
                [both, one.sum()],
                [first, second, unused],
                [torch.full((WIDTH,), 0.5), torch.tensor(2.0)],
                retain_graph=True,
                allow_unused=True,
            )
            ways = torch.stack([torch.ones(WIDTH), torch.linspace(0, 1, WIDTH)])
            (batched,) = torch.autograd.grad(both, [first], ways, is_grads_batched=True)
            return gradients[:2], gradients[2] is None, batched

        return step

    harshest(program)


@pytest.mark.parametrize("way", ["batched", "jacobian", "vmap"])
@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_batched_gradients_of_dropout_match_pytorch(
    way: str, evict: Literal["saved", "anything"]
) -> None:
    """Recomputation bypasses `vmap`, which would refuse random operators (R5, randomness)."""

    def program() -> Step:
        weight, ways = vector(True), torch.eye(4)

        def rows(weight: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout((weight.sin() * weight).exp(), 0.5)
            return (x.exp() * x).view(4, -1).sum(1)

        def step() -> object:
            if way == "jacobian":
                return torch.autograd.functional.jacobian(rows, weight, vectorize=True)
            out = rows(weight)
            if way == "batched":
                return torch.autograd.grad(out, weight, ways, is_grads_batched=True)
            return torch.func.vmap(lambda row: torch.autograd.grad(out, weight, row))(ways)

        return step

    again = harshest(program, evict=evict).again
    assert again["bernoulli_"] > 0


def test_second_derivative_matches_pytorch() -> None:
    """With a gradient penalty, autograd also records the backward pass. Its values are evicted."""

    def program() -> Step:
        network = nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Tanh()) for _ in range(3)]
        )
        batch = torch.rand(200, 8)

        def step() -> object:
            x = batch.clone().requires_grad_()
            score = network(x).square().sum()
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            loss = score + (slope.norm(dim=1) - 1).square().mean()
            del score, slope
            loss.backward()
            return loss, network, x

        return step

    harshest(program)


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_second_derivative_of_instance_norm_matches_pytorch(
    evict: Literal["saved", "anything"],
) -> None:
    """The first backward pass unpacks a saved tensor, and saves it again for the second one.

    Both saved tensors have the same version (R7, version check).
    """

    def program() -> Step:
        norms = nn.Sequential(
            *[nn.InstanceNorm1d(4, affine=True, track_running_stats=True) for _ in range(3)]
        )
        weight = torch.randn(16, 160, requires_grad=True)
        batch = torch.randn(40, 16)

        def step() -> object:
            x = batch.clone().requires_grad_()
            loss = norms((x @ weight).view(40, 4, 40)).tanh().square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
            del slope
            loss.backward()
            return loss, norms, weight, x

        return step

    harshest(program, evict=evict)


def test_third_derivative_matches_pytorch() -> None:
    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            y = deeper(weight, 2).sum()
            for _ in range(2):
                (y,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
            loss = y.sum()
            del y
            loss.backward()
            return loss, weight

        return step

    harshest(program)


def test_backward_with_create_graph_and_step_matches_pytorch() -> None:
    """The program itself makes optimizer steps through which gradients flow."""

    def program() -> Step:
        weight, rate = vector(True), torch.tensor(0.1, requires_grad=True)

        def step() -> object:
            x = weight
            for _ in range(3):  # differentiable optimizer steps, as in meta-learning
                (slope,) = torch.autograd.grad(deeper(x, 2).sum(), x, create_graph=True)
                x = x - rate * slope
                del slope
            loss = x.square().sum()
            del x
            loss.backward()
            return loss, weight, rate

        return step

    harshest(program)


class Cube(torch.autograd.Function):
    """A function that saves an input twice, an intermediate value, and its result."""

    @staticmethod
    def forward(ctx, x, factor):
        square = x * x
        result = square * x * factor
        ctx.save_for_backward(x, square, x, result)
        ctx.factor = factor
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, square, again, result = ctx.saved_tensors
        assert torch.equal(x, again)
        once_more, _, _, _ = ctx.saved_tensors
        assert torch.equal(once_more, x)
        return gradient * (2 * square + result / (x * ctx.factor)) * ctx.factor, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result


class Sorted(torch.autograd.Function):
    """A function with one result that needs no gradient and one that does."""

    @staticmethod
    def forward(ctx, x):
        values, order = x.sort()
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order)
        return values, order

    @staticmethod
    def backward(ctx, gradient, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter_(0, order, gradient)


def test_custom_autograd_functions_match_pytorch() -> None:
    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            x = weight
            for _ in range(3):
                x = Cube.apply(x.cos(), 0.7)
                x = InPlace.apply(x * 0.5) + x
                values, order = Sorted.apply(x.sin())
                x = values * x[order]
            loss = x.sum()
            del x, values, order
            loss.backward()
            return loss, weight

        return step

    harshest(program)


def test_second_derivative_of_custom_function_matches_pytorch() -> None:
    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            x = Cube.apply(deeper(weight, 2), 0.3)
            (slope,) = torch.autograd.grad(x.sin().sum(), weight, create_graph=True)
            loss = slope.square().sum()
            del x, slope
            loss.backward()
            return loss, weight

        return step

    harshest(program)


@pytest.mark.parametrize("threaded", [False, True], ids=["here", "in a thread"])
@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_backward_in_thread_or_after_budget_matches_pytorch(inside: bool, threaded: bool) -> None:
    """Handles, which autograd holds in place of saved tensors, outlive the budget.

    They can be unpacked in any thread, also several times.

    Rule R10, after the context.
    """

    def trained(budget: int | None) -> tuple[dict[str, object], int]:
        torch.manual_seed(20)
        weight = vector(True)
        context = nullcontext() if budget is None else rekindle.budget(budget)

        def backward() -> None:
            loss.backward(retain_graph=True)
            loss.backward()

        def wherever() -> None:
            if threaded:
                thread = threading.Thread(target=backward)
                thread.start()
                thread.join()
            else:
                backward()

        with context as run:
            loss = deeper(weight, 30).sum()
            if inside:
                wherever()
        if not inside:
            wherever()
        return everything((loss.detach(), weight)), run.recomputations if run else 0

    plain, _ = trained(None)
    got, recomputations = trained(3 * TIGHT)
    assert recomputations > 0
    assert differing(got, plain) == []


def test_second_derivative_after_budget_matches_pytorch() -> None:
    """The backward pass unpacks handles of the budget, and saves their tensors in a second graph.

    Rule R10, after the context.
    """

    def trained(budget: int | None) -> tuple[dict[str, object], int]:
        torch.manual_seed(20)
        weight = vector(True)
        context = nullcontext() if budget is None else rekindle.budget(budget)
        with context as run:
            loss = deeper(weight, 4).sum()
            deeper(vector(True), 30)  # evicts the saved values; its own memory is freed
        before = run.recomputations if run else 0
        (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        slope.square().sum().backward()
        return everything((loss.detach(), weight)), run.recomputations - before if run else 0

    plain, _ = trained(None)
    got, recomputations = trained(3 * TIGHT)
    assert recomputations > 0
    assert differing(got, plain) == []


def test_backward_passes_in_several_threads_match_pytorch() -> None:
    """Several graphs run backward in parallel after the budget has ended.

    Rule R10, after the context.
    """

    def trained(budget: int | None) -> dict[str, object]:
        torch.manual_seed(20)
        weights = [vector(True) for _ in range(4)]
        context = nullcontext() if budget is None else rekindle.budget(budget)
        with context as run:
            losses = [deeper(weight, 20).sum() for weight in weights]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert run is None or run.recomputations > 20
        return everything((losses, weights))

    assert differing(trained(4 * TIGHT), trained(None)) == []


def test_backward_in_inference_mode_matches_pytorch() -> None:
    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            loss = deeper(weight, 8).sum()
            with torch.inference_mode():
                loss.backward()
            return loss, weight

        return step

    assert harshest(program).again["exp"] >= 1
