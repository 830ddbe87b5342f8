"""Tests of `record=True`: it gives a trace of the program and a schedule of what the budget did.

The schedule must be valid for the trace.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import rekindle
from rekindle import Run
from rekindle.schedule import verify
from rekindle.trace import check_trace
from tests.pytorch import cores
from tests.pytorch.harsh import deeper, vector
from tests.pytorch.native.test_journal import PROGRAMS, Step


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    with cores.fixed_prices():
        yield


def _recorded(program: Callable[[], Step], budget: int | None) -> Run:
    """Record a run of two steps."""
    cores.forget_signatures()
    with cores.fixed_prices():
        torch.manual_seed(20)
        step = program()
        gc.collect()
        with rekindle.budget(budget, record=True) as run:
            step()
            step()
        return run


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("part", [None, 0.6])
def test_recorded_run_of_program_is_valid_schedule(
    program: Callable[[], Step], part: float | None
) -> None:
    budget = None if part is None else int(part * _recorded(program, None).peak)
    run = _recorded(program, budget)
    check_trace(run.trace)
    assert part is None or run.recomputations > 0
    cost = verify(run.trace, run.record.schedule, budget)
    assert (cost.peak, cost.recompute_ns) == (run.peak, run.recompute_ns)
    assert run._driver.places is not None
    assert len(run._driver.places.of_op) == len(run.trace.ops)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("before", [0, 8])
def test_recorded_step_of_program_is_valid_trace(program: Callable[[], Step], before: int) -> None:
    torch.manual_seed(20)
    step = program()
    gc.collect()
    with rekindle.budget("1GiB") as run:
        for _ in range(before):
            step()
        run.begin_trace()
        step()
        trace = run.end_trace()
        run._driver.engine.check()
    check_trace(trace)
    assert sum(op.name != "source" for op in trace.ops) > 20


def test_trace_of_part_of_recorded_run_is_valid_trace() -> None:
    """The whole run is recorded, and a part of it once more by `begin_trace` and `end_trace`.

    The recording of the whole run continues after the part.
    """
    weight = vector(True)
    with rekindle.budget("1GiB", record=True) as run:
        deeper(weight, 4).sum().backward()
        run.begin_trace()
        deeper(weight, 8).sum().backward()
        part = run.end_trace()
        weight.grad = None
        deeper(weight, 4).sum().backward()
    check_trace(part)
    made = [op.name for op in part.ops if op.name != "source"]
    names = [op.name for op in run.trace.ops]
    starts = [i for i in range(len(names)) if names[i : i + len(made)] == made]
    assert len(made) > 16
    assert len(starts) == 1
    assert len(names) > starts[0] + len(made)


def test_trace_of_part_of_run_with_learned_plans_is_valid() -> None:
    layer = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    batch = torch.rand(64, 32)

    def step() -> None:
        optimizer.zero_grad()
        layer(batch).tanh().square().mean().backward()
        optimizer.step()

    with rekindle.budget("1GiB", learn="wait") as run:
        step()
        run.begin_trace()
        step()
        step()
        trace = run.end_trace()
        step()
    check_trace(trace)
    assert sum(op.name == "aten::tanh" for op in trace.ops) == 2


def test_end_trace_without_begin_trace_is_refused() -> None:
    with (
        rekindle.budget("1GiB") as run,
        pytest.raises(rekindle.Unsupported, match=r"write run\.begin_trace\(\)"),
    ):
        run.end_trace()


def test_end_trace_stops_recording() -> None:
    weight = vector(True)
    with rekindle.budget("1GiB") as run:
        run.begin_trace()
        weight.sin().sum().backward()
        first = run.end_trace()
        weight.cos().sum().backward()
        assert not run._driver.is_recorded
        run.begin_trace()
        weight.exp().sum().backward()
        second = run.end_trace()
    assert "aten::sin" in {op.name for op in first.ops}
    assert "aten::exp" in {op.name for op in second.ops}
    assert "aten::sin" not in {op.name for op in second.ops}
