"""Tests that generators and running statistics advance once, and that user code runs once.

Rules R5, randomness; R6, hidden writes; R8, routing; R9, everything else runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.operators import generator_of
from tests.pytorch.harsh import WIDTH, Watch, deeper, harshest, vector

Step = Callable[[], object]

_generator = torch.Generator()

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "feature dropout": lambda x: F.dropout2d(x.view(1, 20, 10, 5), 0.4).flatten(),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4),
    "rand": lambda x: x * torch.rand(WIDTH),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((WIDTH,), 0.6)),
    "bernoulli of values": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "normal": lambda x: torch.normal(x, 0.5),
    "normal_": lambda x: x * torch.empty(WIDTH).normal_(1, 0.2),
    "exponential_": lambda x: x / (1 + torch.empty_like(x).exponential_()),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(0.5, 1),
    "poisson": lambda x: x * torch.poisson(x.detach().abs() * 3),
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x.view(20, 50)).flatten(),
    "own generator": lambda x: x * torch.rand(WIDTH, generator=_generator),
    "own generator, in place": lambda x: x * (x.detach() * 1).random_(9, generator=_generator),
    "randint": lambda x: x * torch.randint(1, 5, (WIDTH,)),
    "randperm": lambda x: x[torch.randperm(WIDTH)],
    "multinomial": lambda x: x[torch.multinomial(x.detach().abs(), WIDTH, replacement=True)],
    "dirichlet": lambda x: x * torch.distributions.Dirichlet(torch.ones(WIDTH)).sample(),
    "gamma, reparametrized": lambda x: torch.distributions.Gamma(
        x.abs() + 1, x.abs() + 1
    ).rsample(),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(2, 10, 50)] * 3, dropout_p=0.3
    ).flatten(),
    "lstm": lambda x: _lstm(x),
}


def _lstm(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        lstm = nn.LSTM(50, 25, num_layers=2, dropout=0.5)
    return lstm(x.view(20, 1, 50))[0].repeat(1, 1, 2).flatten()


@pytest.mark.parametrize("name", RANDOM)
def test_recomputed_random_operators_match_pytorch(name: str) -> None:
    """Recomputation draws the same numbers again, and does not advance the program's generators.

    `harshest` compares the state of the global generator. The state of the program's own generator
    is among the results.

    Rule R5, randomness.
    """
    draw = RANDOM[name]

    def program() -> Step:
        weight = vector(True)
        _generator.manual_seed(7)

        def step() -> object:
            x = weight
            for _ in range(3):
                y = draw(x.sin() + 0.5)
                x = y.cos() * y.exp().tanh()
            loss = x.sum()
            del x, y
            loss.backward()
            after = torch.rand(3), torch.rand(3, generator=_generator)
            return loss, weight, _generator.get_state(), after

        return step

    harshest(program)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recomputed_random_operators_on_device_match_pytorch() -> None:
    """Each device has its own generator. An operator such as `rand` has no tensor argument.

    Rule R5, randomness.
    """

    def program() -> Step:
        weight = vector().cuda().requires_grad_()

        def step() -> object:
            x = weight
            for _ in range(4):
                x = F.dropout(x.sin() * torch.rand(WIDTH, device="cuda"), 0.3).exp()
                x = x * torch.rand(WIDTH).cuda()
            loss = x.sum()
            del x
            loss.backward()
            return loss.cpu(), weight.grad.cpu(), torch.cuda.get_rng_state()

        return step

    harshest(program)


def test_random_generator_is_that_of_result_device(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (one, other))
    cpu = [torch.ones(1)]
    assert generator_of([], [], torch.device("cuda", 1)) is other
    assert generator_of(cpu, [], torch.device("cuda", 0)) is one
    assert generator_of([], [], None) is torch.default_generator
    assert generator_of(cpu, [one], None) is one


def test_scalar_cpu_argument_does_not_select_random_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (one, other))
    device = torch.device("cuda", 1)
    there = SimpleNamespace(device=device, is_cpu=False)
    beside: Any = [torch.ones(()), there]
    assert generator_of(beside, [], None) is other


def test_recomputation_after_reseeding_draws_first_numbers() -> None:
    """The program reseeds the generator, but recomputation draws the numbers of the first run.

    Rule R5, randomness.
    """

    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            x = F.dropout(weight, 0.5).sin()
            with torch.random.fork_rng():
                torch.manual_seed(5)
                x = F.dropout(x, 0.5).cos() * x
            x = F.dropout(x, 0.5).exp() * x
            loss = x.sum() + deeper(weight).sum()
            del x
            torch.manual_seed(9)
            loss.backward()
            return loss, weight, torch.rand(3)

        return step

    harshest(program)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "cumulative": lambda: nn.BatchNorm1d(8, momentum=None),
    "without statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "without weights": lambda: nn.BatchNorm1d(8, affine=False),
    "evaluating": lambda: nn.BatchNorm1d(8).eval(),
    "instance norm": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    "lazy": lambda: nn.LazyBatchNorm1d(),
    "in double": lambda: nn.BatchNorm1d(8).double(),
    "of bfloat16": lambda: nn.BatchNorm1d(8, affine=False),
}
DTYPES = {"in double": torch.float64, "of bfloat16": torch.bfloat16}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_updates_its_statistics_once(name: str) -> None:
    """Recomputed batch norms must not update the running statistics again.

    Rule R6, hidden writes.
    """

    def program() -> Step:
        norms = nn.ModuleList(NORMS[name]() for _ in range(4))
        weight = torch.rand(50, 8, 5, requires_grad=True)
        dtype = DTYPES.get(name, torch.float32)

        def step() -> object:
            losses = []
            for _ in range(2):
                x = weight.to(dtype)
                for norm in norms:
                    x = norm(x.sin() + x).exp().tanh()
                loss = x.square().sum()
                del x
                loss.backward()
                losses.append(loss.detach())
            return losses, norms, weight

        return step

    again = harshest(program).again
    assert again["native_batch_norm"] > 0


def test_batch_norm_in_train_and_eval_mode_matches_pytorch() -> None:
    """Evicted values whose recipes read the old statistics are recomputed before the update.

    Rules R4, sources; R6, hidden writes.
    """

    def program() -> Step:
        norm = nn.BatchNorm1d(8)
        weight = torch.rand(100, 8, requires_grad=True)
        other = torch.rand(100, 8, requires_grad=True)

        def step() -> object:
            norm.eval()
            x = norm(weight.sin()).cos().square()
            loss = x.sum() + deeper(other, 8).sum()
            del x
            norm.train()
            loss = loss + norm(weight.cos()).exp().sum() + deeper(other, 8).sum()
            loss.backward()
            return loss, norm, weight, other

        return step

    harshest(program)


ROUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda x: x.gather(1, x.topk(5).indices),
    "sort": lambda x: x.gather(1, x.sort(dim=1).indices),
    "argsort": lambda x: x.gather(1, x.argsort(dim=1)),
    "argmax": lambda x: x[torch.arange(20), x.argmax(1)],
    "max": lambda x: x.max(1).values,
    "nonzero": lambda x: x[(x > 0.8).nonzero(as_tuple=True)],
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.detach().abs(), 5)),
    "unique": lambda x: x[:, torch.unique((x[0] * 20).long() % 50)],
    "boolean mask": lambda x: x[x > 0.8],
    "masked_select": lambda x: x.masked_select(x > 0.8),
    "where": lambda x: x[torch.where(x > 0.8)],
    "searchsorted": lambda x: x[:, torch.searchsorted(x[0].detach().sort()[0], x[1].detach()) % 50],
    "randperm": lambda x: x[torch.randperm(20)],
    "kthvalue": lambda x: x.gather(1, x.kthvalue(7, keepdim=True).indices),
}
DISPATCHED = {
    "argsort": "sort", "unique": "_unique2", "boolean mask": "nonzero", "where": "nonzero",
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_indices_from_topk_and_sort_are_never_recomputed(name: str) -> None:
    """Indices stay in memory, because with ties a second run could choose other elements.

    Rule R8, routing.
    """
    route = ROUTES[name]

    def program() -> Step:
        weight = torch.rand(20, 50, requires_grad=True)

        def step() -> object:
            x = weight
            loss = torch.zeros(())
            for _ in range(3):
                x = (x.sin() + 0.3).exp()
                loss = loss + (route(x).cos() * 2).tanh().square().sum()
            del x
            loss = loss + deeper(weight, 8).sum()
            loss.backward()
            return loss, weight

        return step

    harsh = harshest(program)
    operator = DISPATCHED.get(name, name)
    if name not in ("boolean mask", "max", "masked_select"):
        assert harsh.plain[operator] > 0
        assert harsh.again[operator] == 0
    assert harsh.again["sin"] > 0


def test_python_code_and_hooks_of_user_run_once() -> None:
    """The program has side effects and all kinds of hooks. Recomputation runs no Python code again.

    Rule R9, everything else runs once.
    """
    log: list[str] = []

    def program() -> Step:
        log.clear()
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        batch = torch.rand(100, 8, requires_grad=True)
        for module in layers.modules():
            module.register_forward_pre_hook(lambda *_: log.append("forward pre"))
            module.register_forward_hook(lambda *_: log.append("forward"))
            module.register_full_backward_hook(lambda *_: log.append("backward"))
        for parameter in layers.parameters():
            parameter.register_hook(lambda gradient: log.append("gradient") or gradient * 2)

        def step() -> object:
            x = layers(batch)
            x.register_hook(lambda gradient: log.append("output") or gradient + 0.1)
            loss = x.square().sum()
            del x
            loss.backward()
            return loss, layers, tuple(log)

        return step

    assert harshest(program).again["addmm"] > 0


def test_custom_function_with_side_effects_runs_once() -> None:
    class Counting(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            Counting.calls += 1
            result = x.sin() * Counting.calls
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx, gradient):
            Counting.calls += 10
            return gradient * ctx.saved_tensors[0]

    def program() -> Step:
        Counting.calls = 0
        weight = vector(True)

        def step() -> object:
            x = weight
            for _ in range(3):
                x = Counting.apply(x.cos()) * x.exp()
            loss = x.sum()
            del x
            loss.backward()
            return loss, weight, Counting.calls

        return step

    harshest(program)


def test_operator_inside_never_recompute_runs_once() -> None:
    """Values made inside `never_recompute` stay in memory, so the operator runs once."""
    weight = vector(True)
    with Watch() as watch, rekindle.budget(30 * 4 * WIDTH) as run:
        x = weight
        for _ in range(4):
            x = deeper(x, 4)
            with rekindle.pytorch.never_recompute():
                x = x.atan()
        loss = x.sum()
        del x
        loss.backward()
    assert run.recomputations > 0
    assert watch.operators["atan"] == 4
