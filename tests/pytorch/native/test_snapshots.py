"""Tests of the snapshot: what was in memory at its peak, by category such as parameters."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Run
from rekindle.pytorch.online import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS, PROGRAM
from tests.pytorch.harsh import WIDTH, deeper, vector

VECTOR = 4 * WIDTH


def unlimited() -> rekindle.budget:
    return rekindle.budget.unlimited()


def held(run: Run) -> Mapping[str, int]:
    """Return the bytes at the peak by category."""
    return run.report().at_peak.categories


def test_new_memory_peak_runs_no_python_code() -> None:
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("rekindle."):
            called[frame.f_code.co_qualname] += 1

    weight = vector(True)
    with unlimited() as run:
        weight.sin()  # at the first operator, Rekindle's Python code looks for the model
        kept: list[Tensor] = []
        sys.setprofile(note)
        try:
            while len(kept) < 20:
                kept.append(weight.sin())
        finally:
            sys.setprofile(None)
    assert called == {}
    assert held(run)[PROGRAM] >= 19 * VECTOR


def test_report_names_line_of_operator_at_peak() -> None:
    weight = vector(True)
    with unlimited() as run:
        kept = [weight.sin() for _ in range(3)]
        kept.append(weight.cos())  # the peak
        del kept
        weight.sin()
    path, _, line = run.report().at_peak.where.rpartition(":")
    assert path == __file__
    with open(path, encoding="utf-8") as source:
        assert source.readlines()[int(line) - 1].endswith("# the peak\n")


def test_snapshot_of_peak_adds_up_to_98_percent_of_peak() -> None:
    weight = vector(True)
    with unlimited() as run:
        deeper(weight, 60).sum().backward()
    at_peak = run.report().at_peak
    assert 0.98 * run.peak <= at_peak.memory <= run.peak
    assert sum(at_peak.categories.values()) == at_peak.memory


def test_report_lists_state_of_freed_optimizer_at_peak() -> None:
    def train() -> Run:
        weight = vector(True)
        optimizer = torch.optim.Adam([weight], foreach=False)
        with unlimited() as run:
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                deeper(weight, 8).sum().backward()
                optimizer.step()
        return run

    found = held(train())
    assert found[PARAMETERS] == found[GRADIENTS] == VECTOR
    assert 2 * VECTOR <= found[OPTIMIZER] < 2 * VECTOR + 100


def test_report_of_peak_in_first_step_lists_optimizer_state() -> None:
    weight = vector(True)
    optimizer = torch.optim.Adam([weight], foreach=False)
    with unlimited() as run:
        (weight * weight).sum().backward()
        optimizer.step()
    found = held(run)
    assert found[OPTIMIZER] >= 2 * VECTOR
    assert found[PARAMETERS] == found[GRADIENTS] == VECTOR


def test_report_counts_tensors_in_lists_of_optimizer_state() -> None:
    weight = vector(True)
    optimizer = torch.optim.LBFGS([weight], max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight - 1).square().sum() + weight.exp().sum()
        loss.backward()
        return loss

    with unlimited() as run:
        for _ in range(3):
            optimizer.step(closure)
        state = optimizer.state[weight]
        assert len(state["old_dirs"]) >= 3
    assert held(run)[OPTIMIZER] >= 6 * VECTOR


def test_report_ignores_optimizer_state_made_after_the_peak() -> None:
    """The state reuses the address of a tensor that was in memory at the peak and freed later."""
    weight = vector(True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with unlimited() as run:
        kept = [weight.detach() + number for number in range(30)]
        addresses = {each.data_ptr() for each in kept}
        del kept
        (weight * weight).sum().backward()
        optimizer.step()
        buffer = optimizer.state[weight]["momentum_buffer"]
    if buffer.data_ptr() not in addresses:
        pytest.skip("the allocator did not use the memory again")
    assert OPTIMIZER not in held(run)
    assert held(run)[PROGRAM] >= 29 * VECTOR


def test_report_lists_parameters_of_freed_model_at_peak() -> None:
    with unlimited() as run:
        model = nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))
        for _ in range(2):
            model(torch.rand(8, 100)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
        del model
    found = held(run)
    parameters = 4 * (100 * 100 + 100 + 2 * 100)
    assert found[PARAMETERS] == found[GRADIENTS] == parameters
    assert found[INPUTS] >= 2 * 4 * 100


def test_thousand_freed_modules_do_not_grow_bookkeeping() -> None:
    with unlimited() as run:
        engine: Any = run._driver.engine
        for _ in range(100):
            nn.Linear(2, 2)
        before = engine.now().bookkeeping
        for _ in range(1_000):
            nn.Linear(2, 2)
        assert engine.now().bookkeeping <= before


def test_snapshot_of_peak_is_not_replaced_at_lower_memory() -> None:
    weight = vector(True)
    with unlimited() as run:
        kept = [weight.sin() for _ in range(20)]
        most = run.report().at_peak.memory
        del kept
        again = [weight.sin() for _ in range(10)]
    assert len(again) < 20
    assert run.report().at_peak.memory == most
