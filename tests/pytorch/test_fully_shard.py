"""Tests of FSDP2 with its default `reshard_after_forward=True`, in a group of one rank.

FSDP frees the gathered parameters of a unit after its forward pass, and gathers them again before
its backward pass. Values computed from them can be recomputed only while they are gathered.
tests/pytorch/test_distributed.py has several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle.pytorch.online import InterruptedPasses
from tests.distributed.ranks import join
from tests.pytorch import cores
from tests.pytorch.harsh import Program, harshest

pytestmark = pytest.mark.filterwarnings("ignore:.*(FSDP2-wrapped module|saved tensor)")
WIDTH, ROWS = 16, 64


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    join(0, 1, str(tmp_path_factory.mktemp("ranks")))
    yield
    dist.destroy_process_group()


class Unit(nn.Module):
    """A layer that saves several tensors, of which two depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.narrow(nn.functional.dropout(self.wide(x).sin(), 0.1)))


class Nested(nn.Module):
    """A unit that contains another unit between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = Unit(), Unit(), Unit()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)).tanh())


class Checkpointed(Unit):
    """A unit that contains a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Leaking(Unit):
    """A unit that stores a loss as an attribute, from which a backward pass starts as well.

    If that loss is computed after the unit's result, its backward pass comes first. FSDP has not
    gathered the parameters then, but the backward pass needs values computed from them.
    """

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x).sin()
        if not self.after:
            self.loss = hidden.exp().square().sum()
        result = x + self.norm(self.narrow(hidden))
        if self.after:
            self.loss = hidden.exp().square().sum()
        return result


def sharded(units: Any, *, inner: bool = False, **settings: Any) -> Any:
    model = nn.Sequential(*units)
    mesh = init_device_mesh("cpu", (1,))
    for unit in dict.fromkeys(units):
        if inner:
            fully_shard(unit.inner, mesh=mesh, reshard_after_forward=True, **settings)
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, **settings)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True, **settings)


def weights(model: Any) -> list[Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def gradients(model: Any) -> list[Tensor]:
    return [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def steps(build: Callable[[], nn.Module], one: Callable[[nn.Module, Tensor], Tensor]) -> Program:
    """Return a program of two training steps, whose forward and backward passes `one` makes."""

    def program() -> Callable[[], object]:
        model, x = build(), torch.randn(ROWS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> object:
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                losses.append(one(model, x).detach())
                optimizer.step()
            return losses, weights(model), gradients(model)

        return step

    return program


def usual(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    return loss


def two_forward_passes(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x) + loss_of(model, x.cos())
    loss.backward()
    return loss


def twice_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def accumulated(model: Any, x: Tensor) -> Tensor:
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        loss = usual(model, x)
    return loss


def resharded_by_hand(model: Any, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    model.unshard()
    model.reshard()
    loss.backward()
    return loss


def between_evaluations(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    with torch.no_grad():
        model(x)
    loss.backward()
    return loss


def overwritten_between(model: Any, x: Tensor) -> Tensor:
    """Overwrite the result of a unit in place, after the next unit has read a copy of it."""
    first, *others = model
    result = first(x)
    for unit in others:
        result += unit(result.to(torch.float64).to(torch.float32))
    loss = result.square().mean()
    loss.backward()
    return loss


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PROGRAMS: dict[str, Program] = {
    "usual": steps(lambda: sharded([Unit() for _ in range(4)]), usual),
    "nested": steps(lambda: sharded([Nested() for _ in range(2)], inner=True), usual),
    "mixed precision": steps(lambda: sharded([Unit() for _ in range(4)], mp_policy=HALF), usual),
    "accumulated": steps(lambda: sharded([Unit() for _ in range(4)]), accumulated),
    "checkpointed": steps(lambda: sharded([Unit(), Checkpointed(), Unit()]), usual),
    "one unit used three times": steps(lambda: sharded([Unit()] * 3), usual),
    "two forward passes": steps(lambda: sharded([Unit() for _ in range(3)]), two_forward_passes),
    "two backward passes": steps(lambda: sharded([Unit() for _ in range(3)]), twice_backward),
    "resharded by hand": steps(lambda: sharded([Unit() for _ in range(3)]), resharded_by_hand),
    "overwritten between": steps(lambda: sharded([Unit() for _ in range(3)]), overwritten_between),
    "between evaluations": steps(lambda: sharded([Unit() for _ in range(3)]), between_evaluations),
}


@pytest.mark.slow
@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_fsdp_matches_pytorch_within_budget(
    name: str, evict: Literal["saved", "auto", "anything"]
) -> None:
    harshest(PROGRAMS[name], evict=evict, resized=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_fsdp_with_eviction_at_every_operator_matches_pytorch(name: str) -> None:
    torch.manual_seed(20)
    wanted = PROGRAMS[name]()()
    evicting_always()
    torch.manual_seed(20)
    step = PROGRAMS[name]()
    with rekindle.budget("1GiB", evict="saved") as run:
        found = step()
    assert run.recomputations > 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.slow
def test_fsdp_with_learned_plans_matches_pytorch() -> None:
    """A plan lets values be recomputed early, but not before FSDP gathers their parameters."""

    def run(budget: int | None) -> list[Tensor]:
        torch.manual_seed(7)
        model, x = sharded([Unit() for _ in range(6)]), torch.randn(ROWS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        context: Any = nullcontext()
        if budget is not None:
            context = rekindle.budget(budget, learn="wait")
        with context as within:
            for _ in range(12):
                optimizer.zero_grad()
                usual(model, x)
                optimizer.step()
        assert within is None or within.recomputations > 0
        if within is not None:
            followed.append(within.steps_followed)
        return weights(model)

    followed: list[int] = []
    wanted = run(None)
    with rekindle.budget.unlimited() as roomy:
        run(None)
    for share in (0.35, 0.5, 0.7):
        budget = int(roomy.memory + share * (roomy.peak - roomy.memory))
        torch.testing.assert_close(run(budget), wanted, rtol=0, atol=0)
    assert sum(followed) > 0


def units(number: int = 4, *, gathered_before: bool = True) -> Any:
    """Return a new FSDP model.

    FSDP allocates the memory of gathered parameters in a model's first step. If `gathered_before`
    is True, that step has already run.
    """
    torch.manual_seed(7)
    model = sharded([Unit() for _ in range(number)])
    if gathered_before:
        usual(model, torch.randn(ROWS, WIDTH))
        model.zero_grad()
    return model


def evicting_always() -> None:
    """Evict all that may be evicted before every operator, to the end of the test."""
    cores.tune(lambda driver: driver.core.evict_before_every_op(driver.handle, True))


def within(budget: int | None) -> Any:
    return nullcontext() if budget is None else rekindle.budget(budget, evict="saved")


def backward_after(
    change: Callable[[Any], None], budget: int | None, *, gathered_before: bool = True
) -> list[Tensor]:
    """Run forward pass, `change(model)` and backward pass within `budget`; return the gradients."""
    model = units(gathered_before=gathered_before)
    x = torch.randn(ROWS, WIDTH)
    with within(budget) as run:
        loss = loss_of(model, x)
        change(model)
        loss.backward()
    assert run is None or run.recomputations > 0
    return gradients(model)


def step_of_an_optimizer(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def exchanged_values(model: Any) -> None:
    """Change contents but not their sum, without a change of version counters."""
    for parameter in model.parameters():
        local = parameter.to_local().detach()
        local.numpy()[...] = local.flip(0).numpy()


def changed_and_changed_back(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            before = local.clone()
            parameter.zero_()
            local.copy_(before)


@pytest.mark.parametrize("change", [step_of_an_optimizer, exchanged_values])
def test_fsdp_weights_changed_before_backward_raise_unsupported(
    change: Callable[[Any], None],
) -> None:
    """Plain PyTorch continues with the new parameters and the old activations.

    Within a budget, old activations that were evicted cannot be recomputed.
    """
    evicting_always()
    with pytest.raises(rekindle.Unsupported, match="has other contents than in the forward pass"):
        backward_after(change, 1 << 30)


def test_fsdp_parameters_changed_in_first_step_match_pytorch() -> None:
    """In the first step, FSDP's gathered parameters are a copy, which Rekindle can recompute."""
    wanted = backward_after(step_of_an_optimizer, None, gathered_before=False)
    evicting_always()
    found = backward_after(step_of_an_optimizer, 1 << 30, gathered_before=False)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("change", [step_of_an_optimizer, exchanged_values])
def test_fsdp_parameters_changed_in_ample_budget_match_pytorch(
    change: Callable[[Any], None],
) -> None:
    def run(budget: int | None) -> list[Tensor]:
        model = units()
        x = torch.randn(ROWS, WIDTH)
        with within(budget):
            loss = loss_of(model, x)
            change(model)
            loss.backward()
        return gradients(model)

    torch.testing.assert_close(run(1 << 30), run(None), rtol=0, atol=0)


def test_fsdp_parameters_changed_back_match_pytorch() -> None:
    wanted = backward_after(changed_and_changed_back, None)
    evicting_always()
    found = backward_after(changed_and_changed_back, 1 << 30)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_fsdp_second_forward_uses_changed_parameters() -> None:
    """The graph of the first forward pass, which read the old parameters, still exists then."""

    def run(budget: int | None) -> list[Tensor]:
        model = units()
        x = torch.randn(ROWS, WIDTH)
        with within(budget):
            first = loss_of(model, x)
            step_of_an_optimizer(model)
            loss_of(model, x).backward()
            found = gradients(model)
            if budget is not None:
                with pytest.raises(rekindle.Unsupported, match="has other contents"):
                    first.backward()
        return found

    wanted = run(None)
    evicting_always()
    torch.testing.assert_close(run(1 << 30), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("after", [False, True])
def test_fsdp_with_losses_stored_as_attributes_matches_pytorch(after: bool) -> None:
    def run(budget: int | None) -> list[Tensor]:
        torch.manual_seed(7)
        leaking = [Leaking(after=after) for _ in range(3)]
        model, x = sharded([*leaking]), torch.randn(ROWS, WIDTH)
        with within(budget) as run:
            loss = loss_of(model, x)
            (loss + sum(unit.loss for unit in leaking)).backward()
        assert run is None or run.recomputations > 0
        return gradients(model)

    wanted = run(None)
    evicting_always()
    torch.testing.assert_close(run(1 << 30), wanted, rtol=0, atol=0)


class Peeked(Unit):
    """A unit that shows a node of its graph to the program."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x).sin()
        self.node: Any = hidden.grad_fn
        return x + self.narrow(hidden)


def test_fsdp_saved_value_read_before_backward_raises_error() -> None:
    peeked = Peeked()
    model, x = sharded([Unit(), peeked]), torch.randn(ROWS, WIDTH)
    usual(model, x)
    evicting_always()
    with rekindle.budget(1 << 30, evict="saved"):
        loss_of(model, x)
        with pytest.raises(rekindle.Unsupported, match="is not gathered"):
            peeked.node._saved_self.sum()


def test_fsdp_backward_after_budget_matches_pytorch() -> None:
    def run(budget: int | None) -> list[Tensor]:
        model = units()
        x = torch.randn(ROWS, WIDTH)
        with within(budget) as run:
            loss = loss_of(model, x)
        loss.backward()
        assert run is None or run.recomputations > 0
        return gradients(model)

    wanted = run(None)
    evicting_always()
    torch.testing.assert_close(run(1 << 30), wanted, rtol=0, atol=0)


def test_fsdp_backward_after_step_outside_of_budget_is_refused() -> None:
    model = units()
    evicting_always()
    with rekindle.budget(1 << 30, evict="saved"):
        loss = loss_of(model, torch.randn(ROWS, WIDTH))
    step_of_an_optimizer(model)
    with pytest.raises(rekindle.Unsupported, match="has other contents than in the forward pass"):
        loss.backward()


class Fails(nn.Module):
    """A module whose forward or backward pass exceeds any budget while `on` is set."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.backward, self.on = backward, True
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result = x * self.scale
        if not self.backward:
            self.fill()
        elif result.requires_grad:
            result.register_hook(lambda gradient: self.fill())
        return result

    def fill(self) -> None:
        if self.on:
            torch.empty(1 << 40)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_fsdp_step_after_out_of_budget_matches_pytorch(backward: bool, inside: bool) -> None:
    """`OutOfBudget` ends a pass while parameters are gathered. Later, Rekindle frees them."""
    torch.manual_seed(7)
    fails = Fails(backward=backward)
    model, x = sharded([Unit(), Nested(), fails, Unit()], inner=False), torch.randn(ROWS, WIDTH)
    fails.on = False
    torch.manual_seed(8)
    usual(model, x)
    wanted = gradients(model)
    model.zero_grad()
    fails.on = True
    if inside:
        with rekindle.budget(1 << 30):
            with pytest.raises(rekindle.OutOfBudget):
                usual(model, x)
            fails.on = False
            model.zero_grad()
            torch.manual_seed(8)
            usual(model, x)
    else:
        with pytest.raises(rekindle.OutOfBudget), rekindle.budget(1 << 30):
            usual(model, x)
        assert all(hasattr(each, "full_tensor") for each in model.parameters())
        fails.on = False
        model.zero_grad()
        torch.manual_seed(8)
        usual(model, x)
    torch.testing.assert_close(gradients(model), wanted, rtol=0, atol=0)


def test_fsdp_out_of_budget_leaves_no_global_hook() -> None:
    """`OutOfBudget` may also come in a backward pass after the budget, whose end removes hooks."""
    model = sharded([Unit(), Unit()])
    usual(model, torch.randn(ROWS, WIDTH))  # FSDP finds its root module in the first step
    before = list(hooks._global_forward_pre_hooks)
    passes = InterruptedPasses()
    with passes.watch():
        passes.expect()
        assert len(hooks._global_forward_pre_hooks) == len(before) + 1
    passes.expect()
    assert list(hooks._global_forward_pre_hooks) == before
