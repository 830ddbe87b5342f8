"""Tests of rule R7: a saved tensor that is written later raises exactly where plain PyTorch raises.

Each case runs plainly and within a budget. Either both raise the same error, or both compute the
same gradient: a write that PyTorch does not notice (through `.data`) is computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.policies import LRU
from rekindle.pytorch import Run
from tests.pytorch.fuzz.check import letting_go_of_everything
from tests.pytorch.harsh import WIDTH, deeper, harshest, vector

ROOMY = 1_000 * 4 * WIDTH
TIGHT = 14 * 4 * WIDTH
UNSEEN = ("numpy",)  # no operator and no version show it
NOTICED = "one of the variables needed for gradient computation has been modified by an inplace"

Write = Callable[[Tensor], object]
Step = Callable[[], object]


def _no_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


def _resized(x: Tensor) -> None:
    x.data.resize_(WIDTH + 1).resize_(WIDTH)


WRITES: dict[str, Write] = {
    "nothing": lambda x: None,
    "add_": lambda x: x.detach().add_(1),
    "no_grad": _no_grad,
    "data": lambda x: x.data.add_(1),
    "data, a part": lambda x: x.data[3:8].zero_(),
    "detach": lambda x: x.detach().zero_(),
    "detach of a view": lambda x: x.view(20, 50)[2].detach().fill_(0.5),
    "view of detach": lambda x: x.detach().view(20, 50)[2].fill_(0.5),
    "data of detach": lambda x: x.detach().data.fill_(0.5),
    "detach of data": lambda x: x.data.detach().fill_(0.5),
    "out": lambda x: torch.add(x.data, 1, out=x.detach()),
    "out, data": lambda x: torch.add(x.data, 1, out=x.data),
    "foreach": lambda x: torch._foreach_add_([x.detach()], 1),
    "foreach, data": lambda x: torch._foreach_add_([x.data, x.data[:3]], 1),
    "shape of an alias": lambda x: x.detach().unsqueeze_(0),
    "copy_": lambda x: x.detach().copy_(torch.ones(WIDTH)),
    "random": lambda x: x.detach().bernoulli_(0.5, generator=torch.Generator().manual_seed(1)),
    "numpy": lambda x: x.detach().numpy().fill(0.5),
    "twice": lambda x: (x.data.add_(1), x.detach().add_(1)),
    "there and back": lambda x: (x.detach().add_(1), x.detach().sub_(1)),
    "resized": _resized,
}
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "as an input": lambda x: x * x,
    "as a view": lambda x: x.view(20, 50)[:, 3:9].square(),
    "not at all": lambda x: x + 1,
}
Use = Callable[[Tensor], Tensor]
Scenario = Callable[[Use], tuple[Tensor, Tensor, Tensor]]  # loss, weight, what is written


def _load() -> Tensor:
    """Return another value that needs memory, so that a tight budget evicts everything."""
    return deeper(vector(True)).sum()


def leaf(use: Use) -> tuple[Tensor, Tensor, Tensor]:
    weight = vector(True)
    return use(weight).sum() + _load(), weight, weight


def intermediate(use: Use) -> tuple[Tensor, Tensor, Tensor]:
    weight = vector(True)
    x = weight * 2
    return use(x).sum() + _load(), weight, x


def result(use: Use) -> tuple[Tensor, Tensor, Tensor]:
    """The value is saved as the result of the operator that made it, and as an input."""
    weight = vector(True)
    x = weight.exp()
    return use(x).sum() + _load(), weight, x


def batch(use: Use) -> tuple[Tensor, Tensor, Tensor]:
    """A constant that needs no gradient, first seen through an alias that is gone at once."""
    weight, data = vector(True), vector()
    data.detach().sum()
    loss = (use(data) * use(weight)).sum() + _load() + (data * weight).sum()
    return loss, weight, data


SCENARIOS = (leaf, intermediate, result, batch)


def outcome(
    scenario: Scenario, write: Write, use: Use, context: AbstractContextManager[Run | None],
    *, written_outside: bool = False, backward_outside: bool = False,
) -> tuple[str | Tensor, Run | None]:  # fmt: skip
    """The gradient, or the error."""
    torch.manual_seed(20)
    run = None
    try:
        with context as run:
            loss, weight, x = scenario(use)
            if not written_outside:
                write(x)
            if not backward_outside:
                loss.backward()
        if written_outside:
            write(x)
        if backward_outside:
            loss.backward()
    except RuntimeError as error:
        return str(error), run
    assert weight.grad is not None
    return weight.grad, run


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", WRITES)
def test_raises_where_pytorch_does(name: str, scenario: Scenario) -> None:
    """Fails without `Runtime._check_version`, and with one that also minds writes to `.data`."""
    write = WRITES[name]
    budgets = (ROOMY,) if name in UNSEEN else (ROOMY, TIGHT)
    for used, use in USES.items():
        plain, _ = outcome(scenario, write, use, nullcontext())
        for budget, outside in product(budgets, (False, True)):
            context = rekindle.budget(budget)
            got, run = outcome(scenario, write, use, context, backward_outside=outside)
            assert run is not None
            assert (run.evictions > 0) == (budget == TIGHT)
            assert alike(got, plain), (used, budget, outside)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", WRITES)
def test_write_outside_context_raises_as_pytorch_or_is_refused(
    name: str, scenario: Scenario
) -> None:
    """Where PyTorch has no objection but something must be recomputed from it, it is refused.

    Fails if `_replay._home` does not compare versions.
    """
    write = WRITES[name]
    places = {"written_outside": True, "backward_outside": True}
    for used, use in USES.items():
        plain, _ = outcome(scenario, write, use, nullcontext())
        got, _ = outcome(scenario, write, use, rekindle.budget(ROOMY), **places)
        assert alike(got, plain), used
        if "data" not in name and name not in UNSEEN:
            got, _ = outcome(scenario, write, use, rekindle.budget(TIGHT), **places)
            assert alike(got, plain) or _refused(got), used


def test_recomputation_from_weight_written_outside_is_refused() -> None:
    """Fails if `_replay._home` does not compare versions: the gradient would be another one."""
    weight, batch = vector(True), vector()
    with rekindle.budget(TIGHT, policy=LRU()) as run:
        loss = (weight + batch).sin().square().sum() + _load()
    assert run.evictions > 0
    _no_grad(weight)
    with pytest.raises(RuntimeError, match="where the budget does not see it"):
        loss.backward()


def _refused(got: str | Tensor) -> bool:
    return isinstance(got, str) and (
        "budget does not see it" in got or "was resized outside" in got
    )


def alike(got: str | Tensor, plain: str | Tensor) -> bool:
    if isinstance(got, Tensor) and isinstance(plain, Tensor):
        return torch.equal(got, plain)
    if isinstance(got, str) and isinstance(plain, str):
        return got.startswith(NOTICED) and plain.startswith(NOTICED)
    return False


@pytest.mark.parametrize("kept", [False, True], ids=["whole dropped", "whole kept"])
def test_pieces_with_a_version_counter_each(kept: bool) -> None:
    """R7: the pieces of `unsafe_chunk` are written one after the other, as in a GRU on a CPU."""

    def program() -> Step:
        weight = vector(True)
        wholes: list[Tensor] = []

        def step() -> object:
            whole = weight * 3  # saves nothing of its result
            first, second = whole.unsafe_chunk(2)
            if kept:
                wholes.append(whole)
            del whole
            first = first.mul_(2).sigmoid_()
            second = second.mul_(first).tanh_()
            loss = (first * second).sum()
            del first, second
            loss = loss + deeper(weight, 20).sum()
            loss.backward()
            return loss, weight

        return step

    harshest(program)


@pytest.mark.parametrize("kept", [False, True], ids=["whole dropped", "whole kept"])
def test_a_piece_that_was_saved_and_then_written(kept: bool) -> None:
    """R7: its own counter shows the write, whatever those of the other pieces show."""
    weight = vector(True)
    with rekindle.budget("1GiB"):
        whole = weight * 3
        first, _ = whole.unsafe_chunk(2)
        if not kept:
            del whole
        loss = first.sigmoid_().sum()
        first.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_gru_on_a_cpu() -> None:
    def program() -> Step:
        network = nn.GRU(8, 16)
        batch = torch.rand(20, 5, 8)

        def step() -> object:
            output, _ = network(batch)
            loss = output.square().sum()
            del output, _
            loss.backward()
            return loss, network

        return step

    harshest(program)


@pytest.mark.parametrize("what", ["a leaf", "an intermediate"])
def test_data_assigned_to_saved_tensor_is_read(what: str) -> None:
    """`x.data = y` moves no version counter: plain PyTorch computes with what is there now."""

    def program() -> Callable[[], dict[str, Tensor]]:
        x, weight, other = vector(True), vector(True), vector()

        def step() -> dict[str, Tensor]:
            h = x * 1
            loss = (h * weight).sum() + (x * weight).sum() + deeper(h * weight).sum()
            if what == "a leaf":
                x.data = other
            else:
                h.data = other
            loss.backward()
            assert x.grad is not None
            assert weight.grad is not None
            return {"x": x.grad, "weight": weight.grad, "h": h.detach()}

        return step

    assert harshest(program).run.recomputations > 0


class _DoublesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.mul_(2)


@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
@pytest.mark.parametrize("how", ["by the program", "by a node"])
def test_other_data_for_a_view_that_is_written(
    evict: Literal["saved", "auto", "anything"], how: str
) -> None:
    """The view keeps the version counter of its base, which is not written.

    Values made from the base can be recomputed.
    """

    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            view = weight.view(-1)
            made = deeper(weight + 1)
            view.data = view.data.clone()
            if how == "by the program":
                with torch.no_grad():
                    view.mul_(2)
            loss = made.sum() + _DoublesWhatItSaved.apply(view).sum()
            loss.backward()
            return weight, view, loss

        return step

    harshest(program, evict=evict)


class _Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result


@pytest.mark.parametrize("evict", ["saved", "anything"])
@pytest.mark.parametrize("make", [torch.exp, torch.Tensor.tanh_, _Exponential.apply])
def test_other_data_for_a_result_that_its_own_node_saved(
    make: Callable[[Tensor], Tensor], evict: Literal["saved", "anything"]
) -> None:
    """A node's saved result is not the variable, in plain PyTorch either."""

    def program() -> Callable[[], dict[str, Tensor]]:
        x, other = vector(True), vector()

        def step() -> dict[str, Tensor]:
            h = make(x * 1)
            loss = deeper(h * h).sum()
            h.data = other
            loss = loss + deeper(h * h).sum()
            loss.backward()
            assert x.grad is not None
            return {"x": x.grad, "h": h.detach()}

        return step

    assert harshest(program, evict=evict).run.recomputations > 0


@pytest.mark.parametrize("make", [torch.exp, _Exponential.apply])
def test_data_assigned_after_node_ran_is_read(make: Callable[[Tensor], Tensor]) -> None:
    """It has dropped what it saved, and other nodes still compute with what is there now."""
    x, weight = vector(True), vector(True)
    with rekindle.budget("1GiB"):
        h = make(x)
        used = (h * weight).sum()
        h.sum().backward()
        h.data = other = vector()
        (gradient,) = torch.autograd.grad(used, weight)
    assert torch.equal(gradient, other)


def test_a_result_that_its_memory_grew_for() -> None:
    """`out=` writes the tensor that it resizes: no version of it was there before."""

    def program() -> Step:
        x = vector(True)

        def step() -> object:
            held = torch.empty(0)
            torch.add(x.detach(), 1, out=held)
            loss = (x * held).square().sum()
            del held
            loss = loss + deeper(x, 20).sum()
            loss.backward()
            return x

        return step

    harshest(program)


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y, None


class _Writes(_Reads):
    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y.mul_(2), None


@pytest.mark.parametrize("evict", ["saved", "anything"])
@pytest.mark.parametrize("kept", ["nowhere", "a leaf", "an intermediate", "a part of one"])
def test_backward_write_to_tensor_saved_by_other_raises(
    kept: str, evict: Literal["saved", "anything"]
) -> None:
    """PyTorch gives the tensor itself to the backward pass; what we give shares its counter."""

    def step() -> Tensor:
        weight = vector(True)
        makers = {
            "nowhere": lambda: torch.ones(WIDTH),
            "a leaf": lambda: weight,
            "an intermediate": lambda: weight * 1,
            "a part of one": lambda: torch.unsafe_chunk(weight.detach().repeat(2), 2)[1],
        }
        saved = makers[kept]()
        x = _Writes.apply(_Reads.apply(weight, saved), saved)
        if kept == "nowhere":
            del saved
        return torch.autograd.grad(x.sum(), weight)[0]

    with pytest.raises(RuntimeError, match=NOTICED):
        step()
    with rekindle.budget(ROOMY, evict=evict) as run:
        with pytest.raises(RuntimeError, match=NOTICED):
            step()
        run._driver.engine.check()
    budget = rekindle.budget(ROOMY, evict=evict)
    with letting_go_of_everything(), budget, pytest.raises(RuntimeError, match=NOTICED):
        step()


def test_alias_of_dead_result_written_unseen_is_noticed() -> None:
    """The tensor that reads a value has its version, if the first one is dead."""
    weight = vector(requires_grad=True)
    with letting_go_of_everything(), rekindle.budget("1GiB"):
        alias = torch.rand(WIDTH).detach()
        loss = (weight * alias).sin().sum()
        torch.autograd.graph.increment_version(alias)
        with pytest.raises(RuntimeError, match="aten::rand that recomputation needs is at version"):
            loss.backward()
