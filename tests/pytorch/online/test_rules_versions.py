"""Tests of rule R7 (version check): a write to a saved tensor raises where plain PyTorch raises.

Each case runs in plain PyTorch and within a budget. Either both raise the same error, or both
compute the same gradient. PyTorch does not notice a write through `.data`, and uses the new
contents. A budget then does so, too.
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
from rekindle import Run
from rekindle.policies import LRU
from tests.pytorch.cores import evicting_before_every_operator
from tests.pytorch.harsh import WIDTH, deeper, harshest, vector

ROOMY = 1_000 * 4 * WIDTH
TIGHT = 14 * 4 * WIDTH
UNSEEN = ("numpy",)  # neither an operator nor a version counter shows this write
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
Scenario = Callable[[Use], tuple[Tensor, Tensor, Tensor]]  # loss, weight, tensor to write


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
    """Save a value twice: as the result of its operator, and as an input of another operator."""
    weight = vector(True)
    x = weight.exp()
    return use(x).sum() + _load(), weight, x


def batch(use: Use) -> tuple[Tensor, Tensor, Tensor]:
    """Use a tensor that needs no gradient, first by an alias, which is deleted at once."""
    weight, data = vector(True), vector()
    data.detach().sum()
    loss = (use(data) * use(weight)).sum() + _load() + (data * weight).sum()
    return loss, weight, data


SCENARIOS = (leaf, intermediate, result, batch)


def outcome(
    scenario: Scenario, write: Write, use: Use, context: AbstractContextManager[Run | None],
    *, written_outside: bool = False, backward_outside: bool = False,
) -> tuple[str | Tensor, Run | None]:  # fmt: skip
    """Return the gradient or the text of the error, and the run."""
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
def test_write_to_saved_tensor_raises_where_pytorch_does(name: str, scenario: Scenario) -> None:
    """The write may be seen by PyTorch (`detach`, `out=`, foreach) or not (`.data`, NumPy)."""
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
def test_write_after_budget_matches_pytorch_or_raises_error(name: str, scenario: Scenario) -> None:
    """PyTorch accepts some of these writes.

    If an evicted value must be recomputed from the old contents, a budget raises an error instead.
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


def test_recomputation_from_weight_written_after_budget_raises() -> None:
    """PyTorch accepts the write, because autograd saved nothing of the weight.

    But an evicted value must be recomputed from the old weight, so the gradient would be wrong.
    """
    weight, batch = vector(True), vector()
    with rekindle.budget(TIGHT, policy=LRU()) as run:
        loss = (weight + batch).sin().square().sum() + _load()
    assert run.evictions > 0
    _no_grad(weight)
    with pytest.raises(RuntimeError, match="was modified outside of the budget"):
        loss.backward()


def _refused(got: str | Tensor) -> bool:
    return isinstance(got, str) and (
        "modified outside of the budget" in got or "was resized outside" in got
    )


def alike(got: str | Tensor, plain: str | Tensor) -> bool:
    if isinstance(got, Tensor) and isinstance(plain, Tensor):
        return torch.equal(got, plain)
    if isinstance(got, str) and isinstance(plain, str):
        return got.startswith(NOTICED) and plain.startswith(NOTICED)
    return False


@pytest.mark.parametrize("kept", [False, True], ids=["whole dropped", "whole kept"])
def test_writes_to_unsafe_chunks_match_pytorch(kept: bool) -> None:
    """The results of `unsafe_chunk` are written one after the other, as in a GRU on a CPU.

    Rule R7, version check.
    """

    def program() -> Step:
        weight = vector(True)
        wholes: list[Tensor] = []

        def step() -> object:
            whole = weight * 3  # does not save its result
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
def test_write_to_saved_chunk_raises(kept: bool) -> None:
    """The chunk's own version counter shows the write; those of other chunks do not.

    Rule R7, version check.
    """
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


def test_gru_with_in_place_gates_on_cpu_matches_pytorch() -> None:
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
def test_data_assigned_to_saved_tensor_is_read_by_backward(what: str) -> None:
    """`x.data = y` moves no version counter, so plain PyTorch uses the new contents."""

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
@pytest.mark.parametrize("how", ["by the program", "through another view", "by a node"])
def test_data_assigned_to_view_does_not_change_its_base(
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
            elif how == "through another view":
                view.detach().mul_(2)
            loss = made.sum()
            if how == "by a node":
                loss = loss + _DoublesWhatItSaved.apply(view).sum()
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
def test_data_assigned_to_saved_result_is_ignored_by_its_node(
    make: Callable[[Tensor], Tensor], evict: Literal["saved", "anything"]
) -> None:
    """Assign to `h.data`, where `h` is the result of `make`, whose backward pass reads that result.

    In plain PyTorch the autograd node saves its result as a tensor apart from `h`. So the backward
    pass reads the computed result, and not the assigned data.
    """

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
def test_backward_pass_reads_tensor_assigned_to_data(
    make: Callable[[Tensor], Tensor],
) -> None:
    """The multiplication saved `h`, so its backward pass reads what `h.data` is then."""
    x, weight = vector(True), vector(True)
    with rekindle.budget("1GiB"):
        h = make(x)
        used = (h * weight).sum()
        h.sum().backward()
        h.data = other = vector()
        (gradient,) = torch.autograd.grad(used, weight)
    assert torch.equal(gradient, other)


def test_result_resized_by_out_argument_matches_pytorch() -> None:
    """`out=` resizes and writes an empty tensor, whose version before the write has no bytes."""

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
def test_write_in_backward_to_tensor_of_other_node_raises(
    kept: str, evict: Literal["saved", "anything"]
) -> None:
    """One function's backward pass writes to a tensor that the other function saved as well.

    Within a budget, the tensor that a function unpacks shares the version counter of the original.
    """

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
    with evicting_before_every_operator(), budget, pytest.raises(RuntimeError, match=NOTICED):
        step()


def test_version_bump_of_alias_of_deleted_result_raises() -> None:
    """The alias is the only tensor left, so its version counter shows writes to the value."""
    weight = vector(requires_grad=True)
    with evicting_before_every_operator(), rekindle.budget("1GiB"):
        alias = torch.rand(WIDTH).detach()
        loss = (weight * alias).sin().sum()
        torch._C._autograd._unsafe_set_version_counter((alias,), (1,))
        with pytest.raises(RuntimeError, match="aten::rand that recomputation needs is at version"):
            loss.backward()
