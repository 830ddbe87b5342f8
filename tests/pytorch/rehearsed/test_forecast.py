"""Tests of `OutOfBudget.rehearse`, which suggests a budget that suffices for whole steps.

It runs the model on shapes only (a rehearsal), and simulates the step within budgets.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.context import _ahead
from rekindle.pytorch.online import _explain
from rekindle.pytorch.online._budget_history import BudgetHistory
from tests.pytorch import cores, networks
from tests.pytorch.tracker import measure

Step = Callable[[], object]

#: Seconds for a rehearsal. What one finds in ten seconds, the default, depends on the machine.
FOREVER = float("inf")


@pytest.fixture(autouse=True)
def _no_budget_came_too_short_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    fresh = BudgetHistory()
    monkeypatch.setattr(_explain, "too_small", fresh)
    monkeypatch.setattr(_ahead, "too_small", fresh)


def step_of(model: nn.Module, x: Tensor, target: Tensor) -> Step:
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        scores = model(x)
        F.cross_entropy(scores.flatten(0, -2), target.flatten()).backward()
        optimizer.step()

    return step


def chain() -> Step:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)]
    return step_of(nn.Sequential(*layers), torch.rand(512, 64), torch.randint(64, (512,)))


def gpt() -> Step:
    model = networks.GPT(vocabulary=64, width=64, heads=2, layers=6, context=32)
    tokens = torch.randint(64, (8, 32))
    return step_of(model, tokens, tokens)


def lstm() -> Step:
    model = networks.UnrolledLSTM(vocabulary=64, width=32, layers=2)
    tokens = torch.randint(64, (32, 24))
    return step_of(model, tokens, tokens)


def densenet() -> Step:
    model = networks.DenseNet(growth=8, blocks=(4, 4), classes=10)
    return step_of(model, torch.rand(8, 3, 32, 32), torch.randint(10, (8,)))


def twice(step: Step) -> Step:
    return lambda: (step(), step())


def refused(program: Callable[[], Step], budget: str = "450KiB") -> rekindle.OutOfBudget:
    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget(budget):
        program()()
    return caught.value


def follow(program: Callable[[], Step], budget: int) -> list[int]:
    """Start the program within `budget`, and then within the budgets that errors suggest.

    Returns:
        The budgets in order; the last one was large enough.
    """
    tried = [budget]
    while True:
        step = program()
        try:
            with rekindle.budget(tried[-1]):
                step()
                step()
            return tried
        except rekindle.OutOfBudget as error:
            tried.append(error.rehearse(FOREVER))


@pytest.mark.parametrize("program", [chain, gpt, lstm, densenet])
def test_rehearsed_budget_is_large_enough_after_one_restart(program: Callable[[], Step]) -> None:
    plain = program()
    plain()
    whole = measure(plain)
    del plain
    with cores.fixed_prices():  # otherwise evictions would depend on measured times
        tried = follow(program, whole.budget(0.02))
    assert 2 <= len(tried) <= 3
    assert tried[-1] < whole.budget(0.7)


def named(error: rekindle.OutOfBudget) -> list[int]:
    """Return the budgets that the text of the error suggests."""
    return [int(each) for each in re.findall(r"rekindle\.budget\((\d+)\)", str(error))]


def test_rehearsed_out_of_budget_suggests_exactly_one_budget() -> None:
    error = refused(chain)
    assert named(error) == [error.smallest_budget]
    found = error.rehearse(FOREVER)
    assert named(error) == [found] == [error.worth_trying]
    assert found > error.smallest_budget
    assert f"by a rehearsal on shapes: rekindle.budget({found})" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.worth_trying) == (str(error), error.worth_trying)


def test_rehearse_of_unpickled_error_returns_smallest_budget() -> None:
    again = pickle.loads(pickle.dumps(refused(chain)))
    assert again.rehearse(FOREVER) == again.worth_trying == again.smallest_budget


def test_printing_out_of_budget_does_not_run_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[Any] = []
    monkeypatch.setattr(_ahead, "forecast", lambda *given, moves: rehearsed.append(given))
    error = refused(chain)
    assert str(error)
    assert repr(error)
    assert error.worth_trying == error.smallest_budget
    assert pickle.dumps(copy.copy(error))
    assert rehearsed == []
    error.rehearse(FOREVER)
    error.rehearse(FOREVER)
    assert len(rehearsed) == 1


def test_rehearse_without_time_returns_smallest_budget() -> None:
    error = refused(chain)
    assert error.rehearse(seconds=0) == error.smallest_budget
    assert error.rehearse(FOREVER) > error.smallest_budget


def test_rehearse_inside_other_budget_does_not_run_model() -> None:
    error = refused(chain)
    with rekindle.budget.unlimited() as run:
        assert error.rehearse(FOREVER) == error.smallest_budget
        assert "by a rehearsal" not in str(error)
    assert run.memory == 0
    assert error.rehearse(FOREVER) > error.smallest_budget
    assert "by a rehearsal" in str(error)


@pytest.mark.parametrize("program", [chain, gpt, lstm, densenet])
def test_rehearsed_budget_is_at_most_peak_of_plain_pytorch(program: Callable[[], Step]) -> None:
    plain = program()
    plain()
    whole = measure(plain)
    del plain
    for share in (0.01, 0.05, 0.1):
        steps = twice(program())
        with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget(whole.budget(share)):
            steps()
        assert caught.value.worth_trying <= whole.budget(1.0)
        assert caught.value.rehearse(FOREVER) <= whole.budget(1.0)


@pytest.mark.parametrize("program", [chain, gpt, lstm, densenet])
def test_rehearsed_budget_suffices_if_state_moves(
    program: Callable[[], Step], tmp_path: Path
) -> None:
    def moving(budget: int) -> rekindle.budget:
        return rekindle.budget(
            budget, evict="anything", swap="1GiB", swap_directory=tmp_path, cache=False
        )

    plain = program()
    plain()
    whole = measure(plain)
    del plain
    step = program()
    with pytest.raises(rekindle.OutOfBudget) as caught, moving(whole.peak // 20):
        step()
    found = caught.value.rehearse(FOREVER)
    assert named(caught.value) == [found]
    step = program()
    with moving(found) as run:
        step()
        step()
    assert run.peak <= found
    assert found < 0.7 * whole.peak


def test_rehearse_notes_budget_for_state_on_host(tmp_path: Path) -> None:
    def program() -> Step:
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(10)])
        return step_of(model, torch.rand(8, 128), torch.randint(128, (8,)))

    error = refused(lambda: twice(program()), "1900KiB")
    needed = error.rehearse(FOREVER)
    (note,) = error.__notes__
    line = note.rpartition("whole steps: ")[2].replace("swap=...", 'swap="1GiB", **folder')
    step = program()
    folder = {"swap_directory": tmp_path}
    with eval(line, {"rekindle": rekindle, "folder": folder}) as run:
        step()
        step()
    assert run.peak <= run.budget < needed / 4
    # Where activations take the memory, nothing is said.
    other = refused(chain)
    other.rehearse(FOREVER)
    assert not hasattr(other, "__notes__")


def test_rehearse_after_error_in_backward_pass_names_budget() -> None:
    """The error is raised in the backward pass. Rekindle then rehearses the model's last call."""
    model = nn.Sequential(nn.Linear(8, 4000), nn.Linear(4000, 8))
    x = torch.rand(4, 8)
    losses: list[Tensor] = []

    def train() -> None:
        losses.append(model(x).sum())
        losses[0].backward()

    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget("470KiB"):
        train()
    assert losses
    assert caught.value.rehearse(FOREVER) > caught.value.smallest_budget
    with rekindle.budget(caught.value.worth_trying):
        model(x).sum().backward()


def test_failed_rehearsal_leaves_error_message_unchanged() -> None:
    class Routed(nn.Module):
        """A model with sizes that depend on the data."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x[x.sum(1) > -1e9]).tanh()
            return x

    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget("450KiB"):
        Routed()(torch.rand(512, 64))
    assert caught.value.rehearse(FOREVER) == caught.value.smallest_budget
    assert "by a rehearsal" not in str(caught.value)


def test_rehearsal_shows_progress_on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(_ahead.ProgressLine, "__call__", lambda line, text: said.append(text))
    monkeypatch.setattr(_ahead.ProgressLine, "done", lambda line: said.append("done"))
    refused(chain).rehearse(FOREVER)
    assert "rehearsing the step" in said[0]
    assert said[-1] == "done"


ALARMING = """
import torch, rekindle
from torch import nn

class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.rand(4, 64, 64))

    def forward(self, x):
        ends = torch.arange(128, 513, 128, dtype=torch.int32)
        for _ in range(12):
            x = nn.functional.grouped_mm(x, self.weights, offs=ends)
        return x

try:
    with rekindle.budget("256KiB"):
        Grouped()(torch.rand(512, 64))
except rekindle.OutOfBudget as error:
    print(error.rehearse(float("inf")) >= error.smallest_budget)
"""


@pytest.mark.slow
def test_rehearsal_logs_no_errors_of_pytorch() -> None:
    """The test runs in a new process: PyTorch logs an error if an operator cannot run on shapes."""
    ran = subprocess.run([sys.executable, "-c", ALARMING], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "True")
    assert "grouped_mm" not in ran.stderr


def test_rehearsal_calls_no_forward_hooks_of_user() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    heard: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: heard.append(output))
    within = rekindle.budget("500KiB", evict="saved")  # pins the outputs that the hook keeps
    with pytest.raises(rekindle.OutOfBudget) as caught, within:
        model(torch.rand(512, 64))
    assert caught.value.rehearse(FOREVER) > caught.value.smallest_budget
    assert len(heard) == 1


def test_rehearsal_leaves_generators_and_model_unchanged() -> None:
    """A rehearsal works on copies of the model and of the random generators."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.BatchNorm1d(64))
                            for _ in range(12)])  # fmt: skip
    x = torch.rand(512, 64)
    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget("600KiB"):
        model(x).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    assert caught.value.rehearse(FOREVER) > caught.value.smallest_budget
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_out_of_budget_error_does_not_keep_model_alive() -> None:
    error = refused(chain).with_traceback(None)
    error.__context__ = None
    gc.collect()
    assert error.rehearse(FOREVER) == error.smallest_budget


def test_model_made_inside_budget_is_rehearsed_after_backward() -> None:
    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget("800KiB"):
        twice(chain())()
    assert caught.value.operator == "Adam.step()"
    budget = caught.value.rehearse(FOREVER)
    assert budget > caught.value.smallest_budget
    with rekindle.budget(budget):
        twice(chain())()


def test_second_refused_budget_is_rehearsed_automatically() -> None:
    first = refused(lambda: twice(chain()), "800KiB")
    second = refused(lambda: twice(chain()), f"{first.worth_trying}B")
    assert "by a rehearsal on shapes" in str(second)
    assert "by a rehearsal on shapes" not in str(first)


def test_state_of_other_optimizers_is_in_rehearsed_budget() -> None:
    """The state of the second model does not exist yet when the first model runs out of memory."""

    def train(second_width: int) -> int:
        torch.manual_seed(0)
        optimizers: list[torch.optim.Optimizer] = []

        def two_models() -> None:
            other = nn.Linear(second_width, 64)
            optimizers.append(torch.optim.Adam(other.parameters()))
            other(torch.rand(1, second_width)).sum().backward()
            chain()()

        error = refused(lambda: two_models, "700KiB")
        assert not optimizers[0].state
        return error.rehearse(FOREVER)

    more = train(128) - train(64)
    assert more == 4 * 64 * 64 * 4  # the weight, its gradient, and two tensors of Adam
