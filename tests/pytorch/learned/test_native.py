"""Tests of the parts of learned plans that run in the native core (C++)."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle import native
from rekindle.policies import Thrifty
from rekindle.pytorch.learned._step_plan import StepPlan
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native._transcript import KINDS
from rekindle.simulator import replay
from tests.pytorch import cores
from tests.pytorch.learned.test_learned_plans import Training, budget_of, six


def module() -> Any:
    return native_core()


def test_journal_entry_kinds_are_equal_in_python_and_cpp() -> None:
    text = (Path(native.__file__).parent / "engine" / "journal.h").read_text()
    body = text.partition("enum class Kind")[2].partition("};")[0].partition("{")[2]
    assert tuple(re.findall(r"^\s*(\w+),", body, re.MULTILINE)) == KINDS


def _recorded(run: rekindle.Run) -> list[StepPlan]:
    """Return the list to which plans recorded in `run` are appended from now on."""
    learner: Any = run._learner
    plans: list[StepPlan] = []
    read = learner._recording

    def recorded() -> StepPlan | None:
        plan = read()
        plans.extend([] if plan is None else [plan])
        return plan

    learner._recording = recorded
    return plans


def test_simulated_step_recomputes_about_as_much_as_real_step() -> None:
    training = Training()
    with cores.fixed_prices(), rekindle.budget(budget_of(0.6), learn="wait") as run:
        plans = _recorded(run)
        training.step(0)
        before = run.recomputations
        training.step(1)
        again = run.recomputations - before
    (plan,) = plans
    trace = plan.trace
    assert trace is not None
    assert sum(op.is_backward for op in trace.ops) > 20
    assert {"aten::addmm", "aten::tanh_backward", "source"} <= {op.name for op in trace.ops}
    assert len(plan.starts) == len(plan.numbers) == len(plan.op_ids)
    record = replay(trace, budget=run.budget, policy=Thrifty())
    assert 0.9 * again <= record.recomputations <= 1.1 * again


@pytest.mark.parametrize("before", [True, False])
def test_failed_early_recomputation_is_retried_on_use(before: bool) -> None:
    """A plan lets some recomputations run early. If one fails, no error is raised.

    The value is recomputed when it is used, and an error is raised only if that fails. The step
    with the failure abandons its plan, and the next step follows the plan again.
    """
    early = sum(_survives(replays, before=before) for replays in range(12))
    assert early > 0


def _survives(replays: int, *, before: bool) -> bool:
    """Let one recomputation of a step fail, `before` or after it runs.

    Return True if the step continues, and False if it raises the error. Also compare the bits.
    """
    budget = budget_of()  # before the trainings below, because it runs one to measure memory
    plain = Training()
    six(plain)
    training = Training()
    with rekindle.budget(budget, learn="wait") as run:
        driver: Any = run._driver
        for number in range(4):
            training.step(number)
        followed = run.steps_followed  # followed a plan of this run, or of the run before
        driver.core.interrupt(driver.handle, replays, before)
        try:
            training.step(4)
        except RuntimeError as error:
            if "interrupted" in str(error):
                return False
            raise
        assert (run.steps_followed, run.steps_left) == (followed, 1)
        training.step(5)
    assert run.steps_followed == followed + 1
    assert "a value could not be restored ahead of its use" in str(run.report())
    assert run.peak <= (run.budget or 0)
    pairs = zip(training.left_behind(), plain.left_behind(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return True


def test_steps_with_learned_plans_in_two_threads_match_pytorch() -> None:
    """The threads' operators mix in another order in each step, so steps abandon their plans."""
    plain, ours = ([Training(), Training()] for _ in range(2))
    for training in (*plain, *ours):
        training.model.eval()  # no dropout: threads draw from one generator in any order
    for training in plain:
        six(training)
    budget = int(1.5 * budget_of())
    with rekindle.budget(budget, learn="wait") as run:
        threads = [threading.Thread(target=six, args=[training]) for training in ours]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert run.steps == 12
    for one, other in zip(ours, plain, strict=True):
        theirs = other.model.state_dict()
        state = one.model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in theirs.items())
