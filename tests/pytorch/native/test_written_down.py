"""What the native core writes down of a program is what the core in Python writes down: the same
trace, actions and places, at the same prices."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import BaseTorchDispatchMode

import rekindle
from rekindle.pytorch import Run
from rekindle.schedule import Action, Free, verify
from rekindle.trace import Drop, Event, Trace, check_trace
from tests.pytorch import cores
from tests.pytorch.harsh import deeper, vector
from tests.pytorch.native.test_journal import PROGRAMS, Step


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    with cores.taken("native"), cores.fixed_prices(alike=True):
        yield


def _seen_as_by_python(core: cores.Name) -> AbstractContextManager[object]:
    """With a mode around, autograd sums gradients as it does under the core in Python, which is
    one: into new memory, not in place. This one does nothing."""
    return BaseTorchDispatchMode() if core == "native" else nullcontext()


def _recorded(core: cores.Name, program: Callable[[], Step], budget: int | None) -> Run:
    """Two steps."""
    cores.forget_signatures()
    with cores.fixed_prices(alike=True):
        torch.manual_seed(20)
        step = program()
        gc.collect()
        with (
            rekindle.budget(budget, record=True, core=core) as run,
            _seen_as_by_python(core),
        ):
            step()
            step()
        assert run.core.name == core
        return run


def _events(trace: Trace) -> list[object]:
    """Values that die between two operators do so in no order; and what was only counted when the
    trace began is known by its size."""
    found: list[object] = []
    for are_drops, group in groupby(trace.events, key=lambda event: isinstance(event, Drop)):
        events = list(group)
        found += sorted(_dropped(trace, event) for event in events) if are_drops else events
    return found


def _dropped(trace: Trace, event: Event) -> tuple[int, int]:
    assert isinstance(event, Drop)
    is_source = trace.ops[trace.maker[event.value]].name == "source"
    nbytes = trace.storages[trace.values[event.value]]
    return (nbytes, -1) if is_source else (nbytes, event.value)


def _actions(run: Run) -> list[tuple[Action, int]]:
    """With the clock; what is let go at once is in no order."""
    record = run.record
    found: list[tuple[Action, int]] = []
    acted: Iterable[tuple[Action, int]] = zip(record.actions, record.clock, strict=True)
    for are_freed, group in groupby(acted, key=lambda each: isinstance(each[0], Free)):
        each = list(group)
        found += sorted(each, key=_freed) if are_freed else each
    return found


def _freed(acted: tuple[Action, int]) -> int:
    assert isinstance(acted[0], Free)
    return acted[0].storage


def _assert_equal(ours: Trace, theirs: Trace) -> None:
    check_trace(ours)
    assert ours.ops == theirs.ops
    assert ours.storages == theirs.storages
    assert _events(ours) == _events(theirs)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("part", [None, 0.6])
def test_a_recorded_run_is_the_same(program: Callable[[], Step], part: float | None) -> None:
    budget = None
    if part is not None:
        budget = int(part * _recorded("python", program, None).peak)
    ours, theirs = (_recorded(core, program, budget) for core in ("native", "python"))
    _assert_equal(ours.trace, theirs.trace)
    assert _actions(ours) == _actions(theirs)
    assert ours.peak == theirs.peak
    assert part is None or ours.recomputations > 0
    assert ours._driver.places is not None
    assert ours._driver.places.of_op == theirs._driver.places.of_op  # type: ignore[union-attr]
    cost = verify(ours.trace, ours.record.schedule, budget)
    assert (cost.peak, cost.recompute_ns) == (ours.peak, ours.recompute_ns)


def _part(core: cores.Name, program: Callable[[], Step], *, before: int) -> Trace:
    """Of the step that comes after so many."""
    cores.forget_signatures()
    with cores.fixed_prices(alike=True):
        torch.manual_seed(20)
        step = program()
        gc.collect()
        with rekindle.budget("1GiB", core=core) as run, _seen_as_by_python(core):
            for _ in range(before):
                step()
            run.begin_trace()
            step()
            return run.end_trace()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__.strip("_"))
def test_a_first_step_is_the_same(program: Callable[[], Step]) -> None:
    _assert_equal(_part("native", program, before=0), _part("python", program, before=0))


# Of the others the cores have other gradients among what is only counted: each learns in its own
# time what an operator costs.
@pytest.mark.parametrize(
    "program", [PROGRAMS[0], PROGRAMS[1], PROGRAMS[4]], ids=lambda each: each.__name__.strip("_")
)
def test_a_later_step_is_the_same(program: Callable[[], Step]) -> None:
    _assert_equal(_part("native", program, before=8), _part("python", program, before=8))


def test_a_part_of_a_recorded_run() -> None:
    """Both are written at a time, and the whole goes on when the part is over."""
    weight = vector(True)
    with rekindle.budget("1GiB", core="native", record=True) as run:
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


def test_a_part_of_a_run_that_learns() -> None:
    layer = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    batch = torch.rand(64, 32)

    def step() -> None:
        optimizer.zero_grad()
        layer(batch).tanh().square().mean().backward()
        optimizer.step()

    with rekindle.budget("1GiB", core="native", learn="wait") as run:
        step()
        run.begin_trace()
        step()
        step()
        trace = run.end_trace()
        step()
    check_trace(trace)
    assert sum(op.name == "aten::tanh" for op in trace.ops) == 2


def test_nothing_was_begun() -> None:
    with (
        rekindle.budget("1GiB", core="native") as run,
        pytest.raises(rekindle.Unsupported, match=r"write run\.begin_trace\(\)"),
    ):
        run.end_trace()


def test_when_a_part_is_over_nothing_is_written_any_more() -> None:
    weight = vector(True)
    with rekindle.budget("1GiB", core="native") as run:
        run.begin_trace()
        weight.sin().sum().backward()
        first = run.end_trace()
        weight.cos().sum().backward()
        assert not run._driver.written_down
        run.begin_trace()
        weight.exp().sum().backward()
        second = run.end_trace()
    assert "aten::sin" in {op.name for op in first.ops}
    assert "aten::exp" in {op.name for op in second.ops}
    assert "aten::sin" not in {op.name for op in second.ops}
