"""Tests of error messages, reports and records of a run, of `run.keep` and `never_recompute`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle import OutOfBudget
from rekindle.policies import LRU
from rekindle.pytorch.online import _explain
from rekindle.pytorch.online._budget_history import BudgetHistory
from rekindle.schedule import Compute, Free
from tests.pytorch.harsh import WIDTH, Watch, deeper, vector

VECTOR = 4 * WIDTH
TIGHT = 14 * VECTOR


@pytest.mark.parametrize(
    ("amount", "line"),
    [
        ("6 Gigs", 'rekindle.budget("6GiB")'),
        ("", 'rekindle.budget("6GiB")'),
        ("-6GiB", 'rekindle.budget("6GiB")'),
        (0, 'rekindle.budget("6GiB")'),
        (-100, 'rekindle.budget("6GiB")'),
        (6e9, "rekindle.budget(6000000000)"),
        (0.5, 'rekindle.budget("6GiB")'),
        (float("nan"), 'rekindle.budget("6GiB")'),
        (True, 'rekindle.budget("6GiB")'),
        (24, 'rekindle.budget("24GiB")'),
        ("8", 'rekindle.budget("8B")'),
        (torch.ones(3), 'rekindle.budget("6GiB")'),
    ],
)
def test_wrong_budget_is_refused_with_line_to_write(amount: object, line: str) -> None:
    with pytest.raises(rekindle.InvalidBudget) as caught:
        rekindle.budget(amount)  # type: ignore[arg-type]
    assert line in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_report_of_first_optimizer_step_lists_its_state() -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    with rekindle.budget(None) as run:
        model(torch.rand(2, 100)).sum().backward()
        optimizer.step()
    state = 2 * sum(each.nbytes for each in model.parameters())
    assert run.report().at_peak.categories["optimizer state"] >= state
    assert "are optimizer state" in str(run.report())


def test_budget_of_24_bytes_with_unit_is_accepted() -> None:
    with rekindle.budget("24B") as run:
        assert run.budget == 24


def test_budget_below_parameters_raises_out_of_budget() -> None:
    network = nn.Sequential(*[nn.Linear(30, 30) for _ in range(5)])
    with rekindle.budget(10_000), pytest.raises(OutOfBudget) as caught:
        network(torch.rand(1, 30))
    parameters = sum(parameter.nbytes for parameter in network.parameters())
    assert caught.value.held["parameters"] + caught.value.needed == parameters
    assert caught.value.smallest_budget == parameters  # even the input of the network was evicted
    assert str(caught.value).startswith("a model needs 14.6 KiB more")
    assert "parameters" in str(caught.value)
    with rekindle.budget(100), pytest.raises(OutOfBudget) as caught:
        network[0].weight.sum()
    assert caught.value.needed == 30 * 30 * 4
    assert str(caught.value).startswith("a parameter needs 3.5 KiB more")


def test_budget_below_optimizer_state_raises_out_of_budget() -> None:
    weight = vector(True)
    optimizer = torch.optim.Adam([weight], foreach=False)
    with rekindle.budget(8 * VECTOR):
        weight.sin().sum().backward()
        optimizer.step()

    def train() -> None:
        hoard = []
        while True:
            optimizer.zero_grad(set_to_none=False)
            (weight * weight).sum().backward()
            optimizer.step()
            hoard.append(torch.ones(WIDTH))

    with rekindle.budget(10 * VECTOR, evict="saved"), pytest.raises(OutOfBudget) as caught:
        train()
    held = caught.value.held
    assert held["parameters"] == VECTOR
    assert held["gradients"] == VECTOR
    assert held["optimizer state"] >= 2 * VECTOR
    assert sum(held.values()) <= 10 * VECTOR


def chain_of_states() -> None:
    """Use each of 20 states in a loss made last: all their gradients wait for the last state."""
    weight, state = nn.Parameter(torch.rand(64, 64) / 64), torch.rand(160, 64)
    states = []
    for _ in range(20):
        state = (state @ weight).tanh()
        states.append(state)
    torch.stack([(each * each).mean() for each in states]).sum().backward()


def hoard_without_gradients() -> None:
    states = [torch.rand(160, 64)]
    with torch.no_grad():
        for _ in range(20):
            states.append(states[-1].tanh())


@pytest.mark.parametrize(
    ("step", "category"),
    [
        (chain_of_states, "gradients in the backward pass"),
        (hoard_without_gradients, "made without gradients"),
    ],
)
def test_out_of_budget_that_evict_anything_avoids_says_so(
    step: Callable[[], None], category: str
) -> None:
    state = 160 * 64 * 4
    budget = rekindle.budget(14 * state, learn=False, split="never")
    with budget, pytest.raises(OutOfBudget) as caught:
        step()
    held = caught.value.held
    assert held[category] > 10 * state
    assert held.get("in use by the operator", 0) == 0
    assert 'evict="anything" may also evict' in str(caught.value)
    with rekindle.budget(14 * state, evict="anything", learn=False):
        step()


def test_out_of_budget_in_any_case_does_not_name_evict_anything() -> None:
    """The operator itself does not fit, or all that could be evicted are its arguments."""
    x = torch.rand(1_000)
    steps = {11_000: lambda: torch.cat([x.sin(), x.cos(), x]), 9_000: lambda: x.atan2(x.sin())}
    for budget, step in steps.items():
        with torch.no_grad(), rekindle.budget(budget, learn=False), pytest.raises(OutOfBudget) as e:
            step()
        assert "evict=" not in str(e.value)


def test_values_that_variables_hold_are_not_in_use_by_operator() -> None:
    with rekindle.budget(None) as run:
        x = torch.rand(1_000, requires_grad=True)
        kept = [x + i for i in range(12)]
    categories = run.report().at_peak.categories
    assert categories["held by your code"] >= 11 * x.nbytes
    assert categories.get("in use by the operator", 0) <= x.nbytes
    del kept


def test_out_of_budget_names_operator_its_line_and_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_explain, "too_small", BudgetHistory())  # no budget was too small before
    monkeypatch.setenv("REKINDLE_CACHE", "off")  # neither in another process
    weight, batch = vector(True), vector()

    def forward() -> None:
        x = [weight * batch]
        while True:
            x.append(x[-1].cos())  # here

    with rekindle.budget(TIGHT, evict="saved"), pytest.raises(OutOfBudget) as caught:
        forward()
    error = caught.value
    assert isinstance(error, MemoryError)
    assert isinstance(error, rekindle.RekindleError)
    assert (error.budget, error.needed, error.operator) == (TIGHT, VECTOR, "aten::cos")
    assert error.smallest_budget == 15 * VECTOR
    assert error.held == {
        "parameters": VECTOR,
        "inputs and buffers": VECTOR,
        "held by your code": 12 * VECTOR,
    }
    path, _, line = error.where.rpartition(":")
    assert path == __file__
    with open(path) as source:
        assert source.readlines()[int(line) - 1].endswith("# here\n")
    message = str(error)
    assert message.splitlines()[0] == (
        "aten::cos needs 3.9 KiB more, and nothing is left to evict: "
        "54.7 KiB of a budget of 54.7 KiB cannot be recomputed or is in use"
    )
    assert f"at {error.where}" in message
    assert "held by your code" in message
    assert message.splitlines()[-2].endswith("rekindle.budget(60000)")
    assert "out of memory" in message.splitlines()[-1]
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_smallest_budget_that_error_names_suffices() -> None:
    """The error's `smallest_budget` is exact: with one byte less, the operator does not fit."""
    weight = vector(True)

    def loss() -> None:
        hoard = [weight]
        for _ in range(20):
            hoard.append(hoard[-1].sin())

    with rekindle.budget(TIGHT, evict="saved"), pytest.raises(OutOfBudget) as caught:
        loss()
    smallest = caught.value.smallest_budget
    with rekindle.budget(smallest - 1, evict="saved"), pytest.raises(OutOfBudget) as again:
        loss()
    assert again.value.smallest_budget == smallest
    with rekindle.budget(smallest, evict="saved"), pytest.raises(OutOfBudget) as caught:
        loss()
    assert caught.value.smallest_budget > smallest


def test_out_of_budget_of_held_chain_suggests_about_plain_peak() -> None:
    """The program holds all values of a loop, so each iteration needs one vector more.

    The first budget that an error suggests is at most the memory peak without a budget. Later ones
    may exceed that peak by its fraction 1/`SLACK`.
    """
    weight = vector(True)

    def loss() -> torch.Tensor:
        hoard = [weight]
        for _ in range(100):
            hoard.append(hoard[-1].sin())
        return hoard[-1].sum()

    with rekindle.budget.unlimited() as free:
        loss()
    errors: list[OutOfBudget] = []
    budget = 10 * VECTOR
    while True:
        try:
            with rekindle.budget(budget, evict="saved"):
                loss()
            break
        except OutOfBudget as error:
            errors.append(error)
            budget = error.worth_trying
    most = free.peak + free.peak // BudgetHistory.GROWTH
    assert errors[0].worth_trying <= free.peak
    assert len(errors) <= 7  # a tenth of the need at first
    for error in errors:
        assert error.smallest_budget <= free.peak
        assert error.smallest_budget <= error.worth_trying <= most
        named = re.findall(r"rekindle\.budget\((\d+)\)", str(error))
        assert named == [str(error.worth_trying)]


def test_repeated_out_of_budget_suggests_larger_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a suggested budget fails, the next suggestion adds half the need.

    After a budget that was not suggested, nothing is added.
    """
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    tried = BudgetHistory()
    assert tried.suggest_after(1_000, 1_100) == 1_100
    assert tried.suggest_after(1_100, 1_200) == 1_800
    assert tried.suggest_after(1_800, 1_900) == 2_850
    assert tried.suggest_after(1_050, 1_100) == 1_100


def test_suggestion_that_user_rounds_up_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    tried = BudgetHistory()
    assert tried.suggest_after(1_000, 1_010) == 1_010
    assert tried.suggest_after(1_070, 1_080) == 1_620
    assert tried.suggest_after(2_000, 2_010) == 2_010


def test_budget_after_failed_forecast_is_a_tenth_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    tried = BudgetHistory()
    tried.suggest_after(1_000, 1_010)
    assert not tried.replace_suggestion(1_000, 1_005)
    assert tried.replace_suggestion(1_000, 1_500)
    assert tried.suggest_after(1_500, 1_600) == 1_760
    assert tried.suggest_after(1_760, 1_800) == 2_160


def test_out_of_budget_of_function_results_names_recomputable() -> None:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    weight = vector(True)

    @rekindle.budget(8 * VECTOR, evict="saved")
    def chain(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        held = [weight]
        for _ in range(20):
            held.append(function(held[-1]))

    line = "rekindle.recomputable(TheFunction)"
    with pytest.raises(OutOfBudget, match=re.escape(line)):
        chain(Kept.apply)
    with pytest.raises(OutOfBudget) as caught:
        chain(torch.sin)
    assert line not in str(caught.value)


def test_exit_of_budget_that_was_not_entered_is_refused() -> None:
    with pytest.raises(rekindle.Unsupported, match=r"was not entered, or has ended"):
        rekindle.budget(VECTOR).__exit__(None, None, None)


def test_report_shows_peak_evictions_and_time_lost() -> None:
    weight = vector(True)
    with rekindle.budget(TIGHT) as run:
        deeper(weight, 8).sum().backward()
    report = str(run.report())
    assert re.search(r"^budget +54\.7 KiB$", report, re.MULTILINE)
    assert re.search(r"^peak +5\d\.\d KiB +\d+\.\d% of budget$", report, re.MULTILINE)
    assert re.search(rf"^evictions +{run.evictions}$", report, re.MULTILINE)
    assert re.search(rf"^recomputations +{run.recomputations}$", report, re.MULTILINE)
    assert re.search(r"^time lost +[\d.]+ \w+ +[\d.]+% of the computation$", report, re.MULTILINE)
    assert "near the peak" in report
    assert "saved for backward" in report
    assert re.search(r", at .*harsh\.py:\d+\):$", report, re.MULTILINE)


def test_report_lists_parameters_of_model_built_inside_budget() -> None:
    """Operators made these tensors, so only the modules show that they are parameters."""
    with rekindle.budget("1GiB") as run:
        model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(8, 16)).square().mean().backward()
            optimizer.step()
    parameters = 4 * (16 * 64 + 64 + 2 * 64)
    found = run.report().at_peak.categories
    assert found["parameters"] == found["gradients"] == parameters
    assert found["inputs and buffers"] >= 4 * 2 * 64


def test_report_of_run_without_operators_has_zero_peak() -> None:
    with rekindle.budget("1MiB") as run:
        pass
    assert re.match(r"budget +1\.0 MiB\npeak +0 B ", str(run.report()))
    assert run.record.actions == ()


def test_recorded_run_has_trace_and_valid_schedule() -> None:
    weight = vector(True)
    with rekindle.budget(TIGHT, record=True) as run:
        deeper(weight, 8).sum().backward()
    record = run.record
    assert (record.budget, record.peak) == (TIGHT, run.peak)
    assert (record.evictions, record.recomputations) == (run.evictions, run.recomputations)
    assert record.recomputations > 0
    assert record.recompute_ns > 0
    assert max(record.memory) <= record.peak <= TIGHT
    assert list(record.clock) == sorted(record.clock)
    assert sum(isinstance(action, Free) for action in record.actions) >= record.evictions
    assert sum(isinstance(action, Compute) for action in record.actions) >= record.recomputations


def test_tensors_passed_to_run_keep_are_not_evicted() -> None:
    """An operator whose result is passed to `run.keep` runs once, and otherwise twice."""

    def made(*, keep: bool) -> int:
        weight = vector(True)
        with Watch() as watch, rekindle.budget(20 * VECTOR, policy=LRU()) as run:
            x = deeper(weight, 4).atan()
            x = run.keep(x) if keep else x
            loss = (x * x).sum() + deeper(weight, 12).sum()
            del x
            loss.backward()
        assert run.recomputations > 0
        return watch.operators["atan"]

    assert made(keep=True) == 1
    assert made(keep=False) > 1


def test_run_keep_of_view_pins_its_whole_storage() -> None:
    weight = vector(True)
    with Watch() as watch, rekindle.budget(20 * VECTOR) as run:
        x = deeper(weight, 4).atan()
        assert run.keep(x[3:9]).shape == (6,)
        loss = (x * x).sum() + deeper(weight, 12).sum()
        del x
        loss.backward()
    assert watch.operators["atan"] == 1


def test_tensor_passed_to_run_keep_is_freed_after_last_use() -> None:
    weight = vector(True)
    with rekindle.budget(20 * VECTOR) as run:
        for _ in range(30):
            x = run.keep(weight.sin())
            (x * x).sum().backward()
            del x
    assert run.memory < 5 * VECTOR


def test_never_recompute_without_budget_has_no_effect() -> None:
    with rekindle.never_recompute():
        assert vector().sin().shape == (WIDTH,)


def test_never_recompute_ends_if_its_block_raises() -> None:
    weight = vector(True)
    with rekindle.budget(TIGHT) as run:
        with pytest.raises(ZeroDivisionError), rekindle.never_recompute():
            _ = weight.sin(), 1 / 0
        deeper(weight, 8).sum().backward()
    assert run.recomputations > 0


def test_workspace_of_lstm_is_not_reported_as_user_held() -> None:
    """While the operator runs it holds its workspace; afterwards autograd holds that memory."""
    model, batch = nn.LSTM(32, 32, 1), torch.rand(60, 8, 32)
    with rekindle.budget(None) as run:
        output = model(batch)[0]
    table = run.report().at_peak.categories
    assert table.get("held by your code", 0) <= output.nbytes + 2 * 8 * 32 * 4
    assert "your program's variables hold" not in str(run.report())


def test_budget_set_below_pinned_memory_raises_with_real_figures() -> None:
    kept = [vector(True) for _ in range(8)]
    with rekindle.budget(20 * VECTOR) as run:
        for each in kept:
            run.keep(each.exp())
        with pytest.raises(OutOfBudget) as caught:
            run.budget = VECTOR
    assert "more than the budget is in use" in str(caught.value)
    assert "0 B" not in str(caught.value)


def test_value_that_backward_node_reads_is_shown_as_in_use() -> None:
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    batch = torch.rand(256, 32)
    with rekindle.budget(None) as run:
        model(batch).sum().backward()
    report = run.report()
    activation, scalar = 256 * 512 * 4, 4
    assert report.at_peak.categories.get("in use by the operator", 0) >= activation
    assert report.at_peak.categories.get("gradients in the backward pass", 0) >= activation
    assert report.at_peak.categories.get("held by your code", 0) <= 2 * scalar
    with pytest.raises(OutOfBudget) as caught, rekindle.budget(run.peak // 2):
        model(batch).sum().backward()
    assert caught.value.held.get("held by your code", 0) <= 2 * scalar
