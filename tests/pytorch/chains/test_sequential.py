"""Tests that a `rekindle.sequential` model within a budget has the bits of the plain model."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import rekindle
from rekindle.planners._chain import Kind
from tests.helpers import others_slow, sampled
from tests.pytorch.bits import differing
from tests.pytorch.chains.helpers import CHAINS, Chain, built, gpt
from tests.pytorch.tracker import Tracker

each_chain = pytest.mark.parametrize("name", CHAINS)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def within(chain: Chain, budget: int, **options: object) -> tuple[nn.Sequential, int]:
    """Return the model of `rekindle.sequential` for `budget`, and that budget.

    If the budget is too small, use the smallest budget that works instead.
    """
    model, x = chain
    try:
        return rekindle.sequential(model, x, budget, loss=loss_of, **options), budget
    except rekindle.OutOfBudget as error:
        budget = max(budget + 1, error.smallest_budget)
        return rekindle.sequential(model, x, budget, loss=loss_of, **options), budget


def train(
    model: nn.Sequential,
    x: Tensor,
    *,
    steps: int = 2,
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    keep: bool = False,
) -> tuple[dict[str, Tensor], int]:
    """Return the results of training steps, and the peak memory of any step."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found, peak = {}, 0
    for step in range(steps):
        if not keep:
            optimizer.zero_grad()
        gc.collect()
        with Tracker() as tracker:
            tracker.count([*model.parameters(), *model.buffers()])
            tracker.count([p.grad for p in model.parameters() if p.grad is not None])
            with around():
                output = model(x)
                loss = loss_of(output)
            loss.backward()
        peak = max(peak, tracker.peak)
        found[f"loss {step}"] = loss.detach()
        del output, loss
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
    found |= {f"state {name}": value for name, value in model.state_dict().items()}
    found["generator"] = torch.get_rng_state()
    return found, peak


@pytest.mark.parametrize("fraction", [pytest.param(1.1, marks=pytest.mark.slow), 0.5, 0.0])
@pytest.mark.parametrize("name", others_slow(sampled(CHAINS, 3)))
def test_sequential_within_budget_matches_pytorch(name: str, fraction: float) -> None:
    model, x = built(name)
    wanted, plain = train(copy.deepcopy(model), x)
    chained, budget = within((model, x), max(1, int(fraction * plain)))
    got, peak = train(chained, x)
    assert differing(got, wanted) == []
    if name != "gates":  # these models need a random amount of memory in each step
        assert peak <= budget
        assert 0.9 * peak <= chained.schedule.peak <= 1.1 * peak
    if fraction == 1.1:
        assert chained.overhead == 0.0
    elif fraction == 0.0:
        assert chained.overhead > 0.0
        assert peak < 0.75 * plain


@each_chain
def test_sequential_leaves_model_input_and_gradients_unchanged(name: str) -> None:
    model, x = built(name)
    before = copy.deepcopy(model.state_dict())
    state, kept = torch.get_rng_state(), x.clone()
    given = [torch.ones_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        parameter.grad = gradient
    chained, _ = within((model, x), 1)
    assert differing(dict(model.state_dict()), before) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, kept)
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        assert parameter.grad is gradient
        assert bool((gradient == 1).all())
    assert [*chained.state_dict()] == [*before]
    assert all(a is b for a, b in zip(chained.parameters(), model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet", "mlp"])
def test_sequential_under_autocast_matches_pytorch(name: str) -> None:
    model, x = built(name)

    def around() -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    wanted, plain = train(copy.deepcopy(model), x, around=around)
    with around():
        chained, _ = within((model, x), plain // 2)
    got, _ = train(chained, x, around=around)
    assert differing(got, wanted) == []
    assert chained.overhead > 0


@pytest.mark.slow
def test_sequential_budget_includes_accumulated_gradients() -> None:
    model, x = built("gpt")
    wanted, _ = train(copy.deepcopy(model), x, steps=3, keep=True)
    _, fresh = train(copy.deepcopy(model), x)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = fresh // 2 + weights
    chained, _ = within((model, x), budget)
    got, peak = train(chained, x, steps=3, keep=True)
    assert differing(got, wanted) == []
    assert peak <= budget


def test_backward_through_sequential_twice_matches_pytorch() -> None:
    model, x = built("resnet")
    plain = copy.deepcopy(model)
    chained, _ = within((model, x), 1)
    results = []
    for each in (plain, chained):
        torch.manual_seed(3)
        loss = loss_of(each(x))
        last = list(each[-1].parameters())
        parts = torch.autograd.grad(loss, last, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([*parts, *(p.grad for p in each.parameters())])
    assert all(map(torch.equal, *results))


def test_second_derivative_of_sequential_matches_pytorch() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    x = torch.randn(64, 32)
    plain = copy.deepcopy(model)
    chained, _ = within((model, x), 1)
    assert chained.overhead > 0
    results = []
    for each in (plain, chained):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(inputs).sum(), inputs, create_graph=True)
        slope.square().sum().backward()
        results.append([slope, *(p.grad for p in each.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results))


def test_sequential_with_two_forward_passes_matches_pytorch() -> None:
    model, x = built("mlp")
    plain = copy.deepcopy(model)
    chained, _ = within((model, x), 1)
    results = []
    for each in (plain, chained):
        torch.manual_seed(3)
        one, other = each(x), each(x * 2)
        (loss_of(one) + loss_of(other)).backward()
        results.append([p.grad for p in each.parameters()])
    assert all(map(torch.equal, *results))


def test_sequential_sets_input_gradient_and_calls_hooks_once() -> None:
    model, _ = built("mlp")
    x = torch.randn(512, 2, 64, requires_grad=True)
    wanted = torch.autograd.grad(loss_of(copy.deepcopy(model).eval()(x)), x)[0]
    chained, _ = within((model.eval(), x), 1)
    fired = []
    for parameter in chained.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    loss_of(chained(x)).backward()
    assert torch.equal(x.grad, wanted)
    assert len(fired) == len([*model.parameters()])


def test_sequential_in_eval_mode_and_no_grad_matches_pytorch() -> None:
    model, x = built("resnet")
    chained, _ = within((model, x), 1)
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        assert torch.equal(chained.eval()(x), plain(x))
    assert torch.equal(chained(x), plain(x))
    loss_of(chained(x)).backward()
    assert chained.train().training
    assert len(chained) == len(model)
    assert chained[3] is model[3]


def test_sequential_with_other_shape_is_measured_or_refused() -> None:
    """A batch of another size is measured again, or raises with `reshape="refuse"`."""
    model, x = built("mlp")
    chained, _ = within((model, x), 1)
    small = x[:64].clone()
    before = chained.schedule.peak
    got, _ = train(copy.deepcopy(chained), small)
    wanted, _ = train(copy.deepcopy(model), small)
    assert differing(got, wanted) == []
    chained, _ = within((model, x), before, reshape="refuse")
    with pytest.raises(rekindle.Unsupported, match='reshape="measure"'):
        chained(small)


def test_sequential_of_tuples_can_be_copied_and_pickled() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            h, c = pair
            return torch.tanh(self.layer(h) + c), torch.sigmoid(c) * h

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0] * pair[1]).sum()

    model = nn.Sequential(*[Pair() for _ in range(6)])
    x = (torch.randn(64, 64), torch.randn(64, 64))
    with pytest.raises(rekindle.OutOfBudget) as caught:
        rekindle.sequential(model, x, "1KB", loss=loss)
    chained = rekindle.sequential(model, x, caught.value.smallest_budget, loss=loss)
    plain, copied = copy.deepcopy(model), copy.deepcopy(chained)
    loss(plain(x)).backward()
    loss(copied(x)).backward()
    for one, other in zip(plain.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    simple, _ = within(built("mlp"), 1)
    assert type(pickle.loads(pickle.dumps(simple))) is type(simple)


def test_sequential_of_unsupported_model_or_call_is_refused() -> None:
    model, x = built("mlp")
    chained, _ = within((model, x), 1)
    with pytest.raises(rekindle.Unsupported, match=r"got 2 inputs"):
        chained(x, x)
    with pytest.raises(rekindle.Unsupported, match=r"got 1 inputs and mask="):
        chained(x, mask=None)
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64))
    with pytest.raises(rekindle.Unsupported, match=r"layer 0 \(ReLU\) writes into the input"):
        rekindle.sequential(first, torch.randn(4, 64), "1MB")
    with pytest.raises(rekindle.Unsupported, match="empty"):
        rekindle.sequential(nn.Sequential(), torch.randn(4, 64), "1MB")
    with pytest.raises(rekindle.Unsupported, match=r"got Linear, wanted an nn.Sequential"):
        rekindle.sequential(nn.Linear(3, 3), torch.randn(4, 3), "1MB")
    with pytest.raises(rekindle.InvalidBudget, match="sequential"):
        rekindle.sequential(model, x, "6 apples")


def test_sequential_stage_that_differs_when_recomputed_raises() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.layer(x)) if self.calls % 2 else self.layer(x)

    model = nn.Sequential(*[Fickle() for _ in range(4)], nn.Linear(64, 4))
    x = torch.randn(256, 64)
    chained, _ = within((model, x), 1)
    loss = loss_of(chained(x))
    with pytest.raises(CheckpointError, match="different number of tensors"):
        loss.backward()


def test_in_place_write_between_passes_of_sequential_raises() -> None:
    model, x = built("gpt")
    chained, _ = within((model, x), 1)
    loss = loss_of(chained(x))
    with torch.no_grad():
        chained[1].mlp[1].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified in place.*before optimizer.step"):
        loss.backward()
    loss = loss_of(chained(x))
    x[0, 0] = 1
    with pytest.raises(RuntimeError, match=r"LongTensor \[4, 64\]\] is at version 1"):
        loss.backward()


def test_sequential_stage_that_writes_its_input_raises() -> None:
    class Late(nn.Module):
        """Writes its input in place once `writes` is set."""

        writes = False

        def forward(self, x: Tensor) -> Tensor:
            return (x.detach().zero_() if self.writes else x) * 2

    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    x, late = torch.randn(256, 64), Late()
    chained, _ = within((nn.Sequential(late, *layers), x), 1)
    late.writes = True
    with pytest.raises(rekindle.Unsupported, match=r"input of stage 0 was modified in place"):
        chained(x)


def test_sequential_runs_stages_as_its_schedule_says() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9)])
    x = torch.randn(256, 64)
    chained, _ = within((model, x), 1)
    ran: list[int] = []
    for number, stage in enumerate(chained._stages):
        stage.modules[0].register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    loss_of(chained(x)).backward()
    runs = (Kind.DROP, Kind.KEEP, Kind.TAPE)
    assert ran == [each.stage for each in chained.schedule.operations if each.kind in runs]
    assert max(map(ran.count, ran)) > 2  # checkpoints in checkpoints


def test_sequential_after_backward_holds_no_activations() -> None:
    model, x = gpt(layers=3)
    chained, _ = within((model, x), 5_000_000)
    assert chained.overhead > 0
    with Tracker() as tracker:
        tracker.count([x, *model.parameters(), *model.buffers()])
        before = tracker.alive
        loss_of(chained(x)).backward()
        gc.collect()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        assert tracker.alive == before + weights
        loss = loss_of(chained(x))
        loss.backward(retain_graph=True)
        first = tracker.alive
        loss.backward(retain_graph=True)
        assert tracker.alive <= first


def test_sequential_measured_with_zeros_updates_statistics_once() -> None:
    """On the sample, a running mean stays what it was."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())
        for _ in range(6)
    ]
    plain = nn.Sequential(*blocks)
    model, _ = within((copy.deepcopy(plain), torch.zeros(256, 32)), 1)
    x = torch.randn(256, 32)
    for each in (plain, model):
        each(x).square().mean().backward()
    assert differing(dict(model.named_buffers()), dict(plain.named_buffers())) == []


def test_sequential_runs_modules_and_hooks_that_it_has_now() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)]
    called: list[str] = []
    layers[2].register_full_backward_hook(lambda *_: called.append("before"))
    x = torch.randn(256, 32)
    plain = nn.Sequential(*layers, nn.Linear(32, 4))
    with pytest.raises(rekindle.OutOfBudget) as caught:
        rekindle.sequential(plain, x, 1, loss=loss_of)
    budget = int(1.2 * caught.value.smallest_budget)
    model = rekindle.sequential(plain, x, budget, loss=loss_of)
    assert model.overhead > 0
    called.clear()  # the measurement has called it
    model(x).sum().backward()
    assert called == ["before"]
    layers[3].register_forward_hook(lambda *_: called.append("after"))
    model[-1] = nn.Linear(32, 4)
    model(x).sum().backward()
    assert "after" in called
    assert model[-1].weight.grad is not None


def test_part_of_sequential_is_an_ordinary_module() -> None:
    x = torch.randn(8, 32)
    plain = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    model, _ = within((plain, x), 1 << 30)
    assert type(model[:-1]) is nn.Sequential
    assert torch.equal(model[:-1](x), plain[:-1](x))
    assert model[1] is plain[1]


def test_sequential_with_replaced_weights_refuses_to_recompute() -> None:
    """`functional_call` puts the parameters back before the backward pass recomputes."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)]
    x = torch.randn(256, 32)
    model, _ = within((nn.Sequential(*layers), x), 1)
    halved = {name: each * 0.5 for name, each in model.named_parameters()}
    loss = torch.func.functional_call(model, halved, (x,)).square().mean()
    with pytest.raises(RuntimeError, match="modified in place or replaced"):
        loss.backward()
