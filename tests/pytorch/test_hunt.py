"""Tests with randomly generated training loops, also with generated loops that once failed.

They compare each loop within budgets with plain PyTorch. The search for loops that fail (`hunt`)
has tests here, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from rekindle.pytorch.native import Driver
from tests.differ.__main__ import main
from tests.differ.judge import Complaint, Plain, collect_little, complaint, judge
from tests.differ.shrink import complaint_of, report, shrunk
from tests.helpers import WHOLE
from tests.pytorch import cores
from tests.pytorch.hunt.blocks import BLOCKS
from tests.pytorch.hunt.drivers import DRIVERS
from tests.pytorch.hunt.habits import HABITS
from tests.pytorch.hunt.hunt import hunted
from tests.pytorch.hunt.known import KNOWN
from tests.pytorch.hunt.loop import LOSSES, Loop
from tests.pytorch.hunt.modes import MODES
from tests.pytorch.hunt.pinned import PINNED
from tests.pytorch.hunt.script import Script
from tests.pytorch.planted import wrong_again

# warnings of all kinds that random programs cause
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> Iterator[None]:
    collect_little()
    yield
    gc.unfreeze()


EVERYTHING = MODES["everything evicted"]
LONG = Loop(
    ("layer_norm", "tanh", "dropout", "linear"),
    "accumulating",
    ("clipped", "average of weights", "loss read"),
    "Adam(parameters(net), 0.01)",
    place="step",
    sizes=((6, 8), (4, 8)),
)


#: The next test runs ten loops for each of these numbers: 40 loops, or 100 with `scripts/sweep`.
TENS = range(10 if WHOLE else 4)


@pytest.mark.slow
@pytest.mark.parametrize("tens", TENS)
def test_random_training_loop_matches_pytorch(tens: int) -> None:
    """`scripts/sweep hunt` runs any number of loops."""
    for seed in range(10 * tens, 10 * tens + 10):
        outcome = hunted(seed, 1)
        if outcome.kind == "different":
            pytest.fail(f"seed {seed}: {report(outcome)}")


@pytest.mark.parametrize("name", PINNED)
def test_stored_training_loop_matches_pytorch(name: str) -> None:
    pin = PINNED[name]
    outcome = judge(Script(pin.lines), [(MODES[mode], 1.0) for mode in pin.modes])
    assert outcome.kind == "same", outcome
    assert not outcome.excepted


def test_long_training_loop_in_every_mode_matches_pytorch() -> None:
    plain = Plain(LONG)
    assert plain.error == ""
    assert plain.peak > plain.kept
    for mode in MODES.values():
        if not mode.planned:
            assert complaint(LONG, plain, mode) is None


def _is_found() -> bool:
    """Return True if the results of one of the first 40 loops differ from plain PyTorch."""
    outcomes = (hunted(seed, 1, [EVERYTHING.name]) for seed in range(40))
    return any(outcome.kind == "different" for outcome in outcomes)


@pytest.mark.slow
def test_hunt_reports_loop_with_planted_wrong_recomputation() -> None:
    """The planted defect is a recomputation whose last bit is wrong."""
    with wrong_again():
        assert _is_found()


def test_hunt_reports_loop_with_memory_above_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = MODES["tight"]
    assert complaint_of(LONG, mode) is None
    make = Driver.__init__

    def unlimited(driver: Driver, *args: Any) -> None:
        make(driver, *args)
        driver.core.set_budget(driver.handle, -1)

    monkeypatch.setattr(Driver, "__init__", unlimited)
    found = complaint_of(LONG, mode)
    assert found is not None
    assert "peak" in found.text


def test_loop_that_copies_weights_each_step_grows_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step replaces the weights by copies of the last step's weights; no optimizer runs.

    Without the limit on the length of recomputation chains, bookkeeping grows, and the test
    method `grown` reports that.
    """
    loop = Loop((), habits=("state assigned",))
    assert loop.grown() is None
    monkeypatch.setattr(cores, "short_memory", lambda longest: nullcontext())
    found = loop.grown()
    assert found is not None
    assert found.text.startswith("storages grow")


def test_hunt_shortens_a_wrong_loop_to_its_cause() -> None:
    def wrong(loop: Loop) -> bool:
        return complaint_of(loop, EVERYTHING) is not None

    with wrong_again():
        assert wrong(LONG)
        short = shrunk(LONG, wrong)
    assert short == Loop(("tanh",), loss=short.loss, steps=1)
    assert "with budget():" in short.source()


def test_interrupted_training_loop_matches_pytorch() -> None:
    loop = Loop(("dropout", "batch_norm"), interrupted=True, trip=("aten.addmm.default", 2))
    plain = Plain(loop)
    assert plain.first["result[log][1][0]"] == "'interrupted'"
    for mode in ("everything evicted", "tight", "anything, tight"):
        assert complaint(loop, plain, MODES[mode]) is None


def test_loop_interrupted_in_optimizer_step_matches_pytorch() -> None:
    loop = Loop(("tanh",), optimizer="Adagrad(parameters(net), 0.02)", interrupted=True)
    # the interruption is in the second step
    loop = replace(loop, trip=("aten.addcmul_.default", 3))
    plain = Plain(loop)
    assert plain.first["result[log][1][0]"] == "'interrupted'"
    for mode in ("unlimited", "tight"):
        assert complaint(loop, plain, MODES[mode]) is None


ASKS = """
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
torch.manual_seed(0)
with budget():
    weight = torch.rand(8, requires_grad=True)
    loss = (weight.sin() * torch.tensor({})).sum()
    loss.backward()
"""


def test_hunt_ignores_loop_that_any_dispatch_mode_changes() -> None:
    """Some programs give other bits within any dispatch mode, also within one that does nothing.

    On some machines, matrix products in inference mode do so. If only a budget changes the bits,
    the search (`hunt`) reports that.
    """
    script = Script(ASKS.format("_get_current_dispatch_mode() is None"))
    found = complaint(script, Plain(script), EVERYTHING)
    assert found is not None
    assert found.excepted
    ours = "__import__('rekindle').budget._active is None"
    script = Script(ASKS.format(ours))
    found = complaint(script, Plain(script), EVERYTHING)
    assert found is not None
    assert not found.excepted


def test_each_known_defect_of_hunt_matches_loop_and_complaint() -> None:
    plainest = Loop(("tanh",), loss=LOSSES[1])
    loops = [replace(plainest, blocks=(name,)) for name in BLOCKS]
    loops += [replace(plainest, driver=name) for name in DRIVERS]
    loops += [replace(plainest, habits=(name,)) for name in HABITS]
    for row in KNOWN:
        said = Complaint("", 0, row.text)
        assert any(loop.known(said) == row.reason for loop in loops), row
    assert not any(loop.known(Complaint("tight", 0, "differing: ['loss']")) for loop in loops)


def test_hunt_command_runs_loops_and_prints_summary() -> None:
    result = CliRunner().invoke(main, ["hunt", "--loops", "3", "--mode", "tight", "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert "3 programs from seed 7: {'same': 3" in result.output
