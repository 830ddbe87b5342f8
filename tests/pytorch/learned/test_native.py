"""What the native core does of learning is what the core in Python does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rekindle
from rekindle import native
from rekindle.policies import Thrifty
from rekindle.pytorch.learned._transcript import KINDS
from rekindle.pytorch.learned._walk import BACKWARD, FAR, GRAPH, places
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native import why_not
from rekindle.simulator import replay
from tests.pytorch import cores
from tests.pytorch.learned.test_learned import Training, budget_of


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    if native_core() is None:
        pytest.skip(f"no native core: {why_not()}")
    with cores.taken("native"):
        yield


def module() -> Any:
    return native_core()


METS = st.builds(
    lambda number, part: number << 2 | part,
    st.integers(0, 3),
    st.sampled_from([0, GRAPH, GRAPH | BACKWARD]),
)


@given(st.lists(METS, min_size=1, max_size=12), st.lists(METS, max_size=12))
def test_a_walk_finds_the_same_places(shape: list[int], step: list[int]) -> None:
    assert module().places_in(shape, step) == places(shape, step)


@given(st.lists(METS, min_size=1, max_size=8), st.data())
def test_a_walk_along_a_step_that_is_nearly_the_same(shape: list[int], data: st.DataObject) -> None:
    step = [met for met in shape if met & GRAPH or data.draw(st.booleans())]
    assert module().places_in(shape, step) == places(shape, step)


def test_a_walk_past_many_operators_beside_the_graph() -> None:
    shape = [GRAPH, *[4] * 3 * FAR, 8, 12 | GRAPH]
    step = [GRAPH, 8, 12 | GRAPH]
    assert module().places_in(shape, step) == places(shape, step)


def test_kinds_of_entries_are_those_of_the_journal() -> None:
    text = (Path(native.__file__).parent / "engine" / "journal.h").read_text()
    body = text.partition("enum class Kind")[2].partition("};")[0].partition("{")[2]
    assert tuple(re.findall(r"^\s*(\w+),", body, re.MULTILINE)) == KINDS


def test_the_core_runs_it() -> None:
    with rekindle.budget(budget_of(), learn="wait") as run:
        assert run.core.native


def test_a_step_that_was_written_down_replays_as_it_was() -> None:
    """What the trace of a step needs, step after step, is what the step itself needed."""
    training = Training()
    with cores.fixed_prices(), rekindle.budget(budget_of(0.6), learn="wait") as run:
        learner: Any = run._learner
        traces = []
        keep = learner._written

        def written() -> Any:
            lesson = keep()
            if lesson is not None:
                traces.append(lesson.trace)
            return lesson

        learner._written = written
        for number in range(2):
            training.step(number)
        before = run.recomputations, run.evictions
        training.losses.clear()
        training.step(2)
    assert traces
    trace = traces[0]
    assert sum(op.is_backward for op in trace.ops) > 20
    assert "aten::addmm" in {op.name for op in trace.ops}
    record = replay(trace, budget=run.budget, policy=Thrifty())
    assert 0 < record.peak <= (run.budget or 0)
    assert record.recomputations > 0
    assert before[0] > 0
