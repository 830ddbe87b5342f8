"""Tests of PyTorch's optimizers: the memory of a step is measured once, and steps are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import rekindle
from rekindle.pytorch.native import is_seen
from rekindle.pytorch.optimizers import _optimizer_steps
from rekindle.pytorch.optimizers._dry_run import bytes_of_step, most_bytes_of_step
from tests.helpers import name_of
from tests.pytorch.bits import differing
from tests.pytorch.tracker import Tracker, measure

WIDTH = 32


def inside() -> bool:
    """Return True if the core sees operators of this thread."""
    return is_seen()


class Program:
    """A chain of layers, trained by a given optimizer."""

    def __init__(
        self, kind: Callable[..., optim.Optimizer] = optim.AdamW, depth: int = 6, **options: Any
    ) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2} | options)
        self.batch = torch.randn(64, WIDTH)

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.backward()
        self.optimizer.step()
        return loss

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in state.items()}
        return found


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> list[optim.Optimizer]:
    """Collect the optimizers whose memory was predicted by a dry run (a step on shapes only)."""
    found: list[optim.Optimizer] = []
    find_out = _optimizer_steps.bytes_of_step
    monkeypatch.setattr(_optimizer_steps, "_predicted", {})
    # as if no budget were large enough for every step
    monkeypatch.setattr(_optimizer_steps, "most_bytes_of_step", lambda optimizer: 1 << 60)

    def bytes_of_step(optimizer: optim.Optimizer, device: torch.device) -> int:
        found.append(optimizer)
        return find_out(optimizer, device)

    monkeypatch.setattr(_optimizer_steps, "bytes_of_step", bytes_of_step)
    return found


KINDS = [
    (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (optim.SGD, {}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.RMSprop, {"centered": True}),
    (optim.Adagrad, {}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_weights_and_state_of_each_optimizer_match_pytorch(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    plain, ours = Program(kind, **options), Program(kind, **options)
    for _ in range(6):
        plain.step()
    with rekindle.budget("1GiB"):
        for _ in range(6):
            ours.step()
    assert differing(ours.state(), plain.state()) == []


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_optimizer_step_needs_less_than_its_upper_bound(
    kind: type[optim.Optimizer], options: dict[str, Any], settings: dict[str, bool]
) -> None:
    if "fused" in options and "foreach" in settings:
        pytest.skip("PyTorch allows one of them")
    parameters = [nn.Parameter(torch.randn(size, 1_000)) for size in (1_000, 300, 2)]
    optimizer = kind(parameters, **options | settings)
    for _ in range(2):  # the first step makes the state
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        needed = bytes_of_step(optimizer, torch.device("cpu"))
        assert 1.5 * needed <= most_bytes_of_step(optimizer)
        optimizer.step()


def test_optimizer_step_that_fits_in_any_case_is_not_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_optimizer_steps, "_predicted", {})
    monkeypatch.setattr(_optimizer_steps, "bytes_of_step", None)  # an error if it is called
    plain, ours = Program(optim.AdamW), Program(optim.AdamW)
    with rekindle.budget("1GiB"):
        for _ in range(3):
            assert torch.equal(ours.step(), plain.step())
    assert differing(ours.state(), plain.state()) == []


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_step_with_temporaries_stays_within_budget(foreach: bool) -> None:
    """The peak is in the optimizer's step, far above forward and backward pass."""
    plain, ours = Program(foreach=foreach), Program(foreach=foreach)
    plain.batch, ours.batch = plain.batch[:2], ours.batch[:2]
    plain.step()
    limit = measure(lambda: (plain.step(), plain.step())).peak
    with Tracker() as tracker, rekindle.budget(limit) as run:
        for _ in range(5):
            ours.step()
        assert run.peak <= limit
    assert tracker.peak <= limit
    weights = {name: value.clone() for name, value in ours.state().items()}
    with rekindle.budget(limit - 512):
        ours.backward()
        with pytest.raises(rekindle.OutOfBudget, match=r"AdamW\.step\(\) needs"):
            ours.optimizer.step()
        assert inside()
    assert differing(ours.state(), weights) == []


def _widen(program: Program) -> None:
    """Grow the last layer, as programs do that add classes."""
    last = program.model[-2]
    for name, parameter in last.named_parameters():
        wider = torch.cat([parameter.data] * 8)
        parameter.grad = None
        parameter.data = wider
        assert getattr(last, name) is parameter


def _numbers(program: Program) -> dict[str, Any]:
    """Return the weights and the state as lists, which take no memory of a budget."""
    return {name: torch.as_tensor(value).tolist() for name, value in program.state().items()}


CHANGING: list[tuple[type[optim.Optimizer], dict[str, Any], Callable[[Program], None] | None]] = [
    (optim.RAdam, {"depth": 1}, None),  # rectifies from the sixth step on
    (optim.ASGD, {"depth": 1, "t0": 3, "lambd": 0.1}, None),  # averages from a later step on
    (optim.SGD, {"weight_decay": 0.1}, _widen),
]


@pytest.mark.parametrize(("kind", "options", "change"), CHANGING, ids=name_of)
def test_optimizer_step_of_growing_need_runs_whole_or_not(
    kind: type[optim.Optimizer], options: dict[str, Any], change: Callable[[Program], None] | None
) -> None:
    """Rekindle predicts a step's memory from earlier steps, but the sixth step needs more.

    A step that does not fit raises `OutOfBudget` and changes nothing.
    """
    refused: list[int] = []

    def trained(steps: int) -> Program:
        program = Program(kind, **options)
        program.batch = program.batch[:2].clone()
        for number in range(steps):
            if number == 5 and change is not None:
                change(program)
            program.backward()
            before = _numbers(program)
            try:
                program.optimizer.step()
            except rekindle.OutOfBudget:
                refused.append(number)
                assert _numbers(program) == before
                raise
        return program

    with rekindle.budget(None) as early:
        trained(5)
    with rekindle.budget(None) as late:
        trained(8)
    assert late.peak > early.peak
    for share in range(8):
        amount = early.peak + share * (late.peak - early.peak) // 8
        with suppress(rekindle.OutOfBudget), rekindle.budget(amount):
            trained(8)
    assert 5 in refused
    with rekindle.budget(late.peak):
        program = trained(8)
    assert differing(program.state(), trained(8).state()) == []


def test_memory_of_optimizer_step_is_measured_at_most_twice(
    dry_runs: list[optim.Optimizer],
) -> None:
    """The program keeps the loss of the last step, which is no reason to measure again."""
    cell = nn.LSTMCell(8, 8)
    optimizer = optim.SGD(cell.parameters(), lr=0.1)
    with rekindle.budget("1GiB"):
        for _ in range(5):
            hidden = state = torch.zeros(2, 8)
            for batch in torch.ones(3, 2, 8):
                hidden, state = cell(batch, (hidden, state))
            loss = hidden.sum()
            optimizer.zero_grad()
            loss.backward()
            del hidden, state
            optimizer.step()
    assert len(dry_runs) <= 2


def test_optimizer_step_measured_in_one_budget_is_known_to_next(
    dry_runs: list[optim.Optimizer],
) -> None:
    plain, ours = Program(), Program()
    for _ in range(4):
        plain.step()
    for _ in range(4):
        with rekindle.budget("1GiB"):
            ours.step()
    assert len(dry_runs) <= 2
    assert differing(ours.state(), plain.state()) == []


def _more_decay(program: Program) -> None:
    program.optimizer.param_groups[0]["weight_decay"] = 0.3


def _frozen(program: Program) -> None:
    program.model[0].requires_grad_(False)


def _another_group(program: Program) -> None:
    program.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize("change", [_more_decay, _frozen, _another_group])
def test_memory_of_changed_optimizer_step_is_measured_again(
    dry_runs: list[optim.Optimizer], change: Callable[[Program], None]
) -> None:
    ours, plain = Program(optim.Adam), Program(optim.Adam)
    with rekindle.budget("1GiB"):
        for _ in range(4):
            ours.step()
        before = len(dry_runs)
        change(ours)
        for _ in range(4):
            ours.step()
    for _ in range(4):
        plain.step()
    change(plain)
    for _ in range(4):
        plain.step()
    assert before <= 2 < len(dry_runs) <= 4
    assert differing(ours.state(), plain.state()) == []


def test_changed_learning_rate_needs_no_new_measurement(dry_runs: list[optim.Optimizer]) -> None:
    ours = Program()
    schedule = optim.lr_scheduler.ExponentialLR(ours.optimizer, 0.9)
    with rekindle.budget("1GiB"):
        for _ in range(4):
            ours.step()
            schedule.step()
    assert len(dry_runs) <= 2


def test_memory_of_equal_new_optimizer_is_not_measured_again(
    dry_runs: list[optim.Optimizer],
) -> None:
    """Some programs make a new optimizer for each task or each client."""
    plain, peaks = Program(), []
    for _ in range(3):
        plain.step()
    for _ in range(6):
        ours = Program()
        with rekindle.budget("1GiB") as run:
            for _ in range(3):
                ours.step()
        peaks.append(run.peak)
        assert differing(ours.state(), plain.state()) == []
    assert len(dry_runs) <= 4  # two for the first step and two for the second
    assert len(set(peaks)) == 1


def test_step_after_failed_optimizer_step_stays_within_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the failed step, Rekindle observes operators and saved tensors again."""
    ours = Program()
    with rekindle.budget("1GiB") as run:
        for _ in range(3):
            ours.step()
        before = run.peak
        ours.backward()
        with monkeypatch.context() as patch:
            patch.setattr(optim.AdamW, "_init_group", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ours.optimizer.step()
        clock = run._driver.engine.clock
        ours.backward()
        assert run._driver.engine.clock > clock
        assert inside()
        assert run.peak >= before
        ours.optimizer.step()
    assert not inside()


def test_error_in_optimizer_step_leaves_no_mode_or_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Program()

    def train() -> None:
        with rekindle.budget("1GiB"):
            for _ in range(3):
                ours.step()
            monkeypatch.setattr(optim.AdamW, "_init_group", lambda *_: 1 / 0)
            ours.step()

    with pytest.raises(ZeroDivisionError):
        train()
    assert not inside()
    with rekindle.budget("1GiB"):
        ours.backward()


def test_backward_through_weights_changed_by_step_raises() -> None:
    """Plain PyTorch raises too, because the optimizer's step changed the weights.

    Rule R7, version check.
    """
    ours = Program(optim.SGD)
    with rekindle.budget("1GiB"):
        for _ in range(3):
            ours.step()
        loss = ours.model(ours.batch).square().mean()
        loss.backward(retain_graph=True)
        ours.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_optimizer_step_recomputes_values_that_read_weights() -> None:
    """An evicted value that reads a weight is recomputed before the weight changes.

    Rule R4, sources.
    """

    def losses(program: Program) -> Iterator[Tensor]:
        for _ in range(4):
            program.step()
        x = program.batch
        for _ in range(8):  # saves no weights: only recipes read them
            x = (x * 1.5).tanh() + program.model[0].bias
        program.backward()
        program.optimizer.step()
        x.sum().backward()
        yield program.model[0].bias.grad

    ours, plain = Program(), Program()
    wanted = list(losses(plain))
    with rekindle.budget(250_000):
        got = list(losses(ours))
    assert all(map(torch.equal, got, wanted))
    assert differing(ours.state(), plain.state()) == []


def test_learned_plans_are_followed_with_adamw() -> None:
    plain, ours = Program(), Program()
    for _ in range(10):
        plain.step()
    measured = measure(lambda: (plain.step(), plain.step()))
    plain = Program()
    for _ in range(10):
        plain.step()
    with rekindle.budget(measured.budget(0.6), learn="wait") as run:
        for _ in range(10):
            ours.step()
        assert run.steps_followed >= 3
    assert differing(ours.state(), plain.state()) == []


def test_step_after_parameter_was_resized_matches_pytorch() -> None:
    def stepped() -> Tensor:
        w = torch.ones(3, 4, requires_grad=True)
        optimizer = optim.SGD([w], 0.1, momentum=0.5)
        w.square().sum().backward()
        with torch.no_grad():
            w.unsqueeze_(0)  # the gradient still has two dimensions
        optimizer.step()
        return w.detach()

    plain = stepped()
    with rekindle.budget(1 << 20):
        assert torch.equal(stepped(), plain)


class Whitened(optim.SGD):
    """A custom optimizer whose operators use workspaces."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() == 2:
                    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                    p.add_(u @ v, alpha=-group["lr"])


def test_custom_optimizer_step_with_workspace_stays_in_budget() -> None:
    plain = Program(Whitened)
    with rekindle.budget(None) as free:
        losses = [plain.step() for _ in range(3)]
    amount, kept = free.peak, 0
    while True:
        amount -= 2048
        program = Program(Whitened)
        try:
            with rekindle.budget(amount) as run:
                found = [program.step() for _ in range(3)]
        except rekindle.OutOfBudget:
            break
        assert run.peak <= amount
        assert found == losses
        kept += 1
    assert kept > 2
