"""Tests of random training loops, of those that once failed, and of the hunt itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from rekindle.pytorch.native import NativeDriver
from tests.helpers import WHOLE
from tests.pytorch import cores
from tests.pytorch.hunt.__main__ import main
from tests.pytorch.hunt.blocks import BLOCKS
from tests.pytorch.hunt.drivers import DRIVERS
from tests.pytorch.hunt.habits import HABITS
from tests.pytorch.hunt.hunt import hunted
from tests.pytorch.hunt.judge import Complaint, Plain, collect_little, complaint, growth
from tests.pytorch.hunt.known import KNOWN, known
from tests.pytorch.hunt.loop import LOSSES, Loop
from tests.pytorch.hunt.modes import MODES
from tests.pytorch.hunt.pinned import PINNED
from tests.pytorch.hunt.shrink import complaint_of, report, shrunk
from tests.pytorch.planted import wrong_again

pytestmark = pytest.mark.filterwarnings("ignore")  # of all that random programs do


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


#: Ten loops each; one hundred by `scripts/sweep tests`.
TENS = range(10 if WHOLE else 4)


@pytest.mark.slow
@pytest.mark.parametrize("tens", TENS)
def test_drawn_loops_are_the_same_in_a_drawn_mode(tens: int) -> None:
    """`scripts/sweep hunt` draws as many as one likes."""
    for seed in range(10 * tens, 10 * tens + 10):
        outcome = hunted(seed, 1)
        if outcome.kind == "different":
            assert outcome.mode is not None
            told = report(outcome.loop, outcome.mode, outcome.tightness, grows=outcome.grows)
            pytest.fail(f"seed {seed}: {told}")


@pytest.mark.parametrize("name", PINNED)
def test_pinned_loop_has_no_complaint(name: str) -> None:
    pin = PINNED[name]
    plain = Plain(pin.source)
    assert plain.determined
    for mode in pin.modes:
        assert complaint(pin.source, plain, MODES[mode], 1.0) is None


def test_a_long_loop_is_the_same_in_every_mode() -> None:
    plain = Plain(LONG.source())
    assert plain.error == ""
    assert plain.peak > plain.constants
    for mode in MODES.values():
        if not mode.planned:
            assert complaint(LONG.source(), plain, mode, 1.0) is None


def _is_found() -> bool:
    """Return True if one of the first loops differs."""
    outcomes = (hunted(seed, 1, [EVERYTHING.name]) for seed in range(40))
    return any(outcome.kind == "different" for outcome in outcomes)


@pytest.mark.slow
def test_a_planted_defect_is_found() -> None:
    """A recomputation that is off by the last bit."""
    with wrong_again():
        assert _is_found()


def test_memory_above_the_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = MODES["tight"]
    assert complaint_of(LONG, mode, 1.0) is None
    make = NativeDriver.__init__

    def unlimited(driver: NativeDriver, *args: Any) -> None:
        make(driver, *args)
        driver.core.set_budget(driver.handle, -1)

    monkeypatch.setattr(NativeDriver, "__init__", unlimited)
    found = complaint_of(LONG, mode, 1.0)
    assert found is not None
    assert "peak" in found.text


def test_values_chained_over_steps_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are copies of those of the step before, which no optimizer writes.

    With a long memory the growth is found.
    """
    loop, mode = Loop((), habits=("state assigned",)), MODES["unlimited"]
    assert growth(loop, mode) is None
    monkeypatch.setattr(cores, "short_memory", lambda longest: nullcontext())
    found = growth(loop, mode)
    assert found is not None
    assert found.text.startswith("storages grow")


def test_a_wrong_loop_is_made_short() -> None:
    def wrong(loop: Loop) -> bool:
        return complaint_of(loop, EVERYTHING, 1.0) is not None

    with wrong_again():
        assert wrong(LONG)
        short = shrunk(LONG, wrong)
    assert short == Loop(("tanh",), loss=short.loss, steps=1)
    assert "with budget():" in short.source()


def test_interrupted_loop_continues_with_same_bits() -> None:
    loop = Loop(("dropout", "batch_norm"), interrupted=True, trip=("aten.addmm.default", 2))
    plain = Plain(loop.source())
    assert plain.first.found["log"][1] == ["'interrupted'"]
    for mode in ("everything evicted", "tight", "anything, tight"):
        assert complaint(loop.source(), plain, MODES[mode], 1.0) is None


def test_an_optimizers_step_is_interrupted_as_well() -> None:
    loop = Loop(("tanh",), optimizer="Adagrad(parameters(net), 0.02)", interrupted=True)
    loop = replace(loop, trip=("aten.addcmul_.default", 3))  # in the second step
    plain = Plain(loop.source())
    assert plain.first.found["log"][1] == ["'interrupted'"]
    for mode in ("unlimited", "tight"):
        assert complaint(loop.source(), plain, MODES[mode], 1.0) is None


ASKS = """
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
torch.manual_seed(0)
with budget():
    weight = torch.rand(8, requires_grad=True)
    loss = (weight.sin() * torch.tensor({})).sum()
    loss.backward()
"""


def test_change_by_any_mode_is_excepted() -> None:
    """Some programs depend on whether a dispatch mode is active.

    Some products in inference mode do, on some machines. A change by a budget alone is a complaint.
    """
    source = ASKS.format("_get_current_dispatch_mode() is None")
    found = complaint(source, Plain(source), EVERYTHING, 1.0)
    assert found is not None
    assert found.excepted
    ours = "__import__('rekindle').budget._active is None"
    source = ASKS.format(ours)
    found = complaint(source, Plain(source), EVERYTHING, 1.0)
    assert found is not None
    assert not found.excepted


def test_known_reasons_match_parts_and_complaints() -> None:
    plainest = Loop(("tanh",), loss=LOSSES[1])
    loops = [replace(plainest, blocks=(name,)) for name in BLOCKS]
    loops += [replace(plainest, driver=name) for name in DRIVERS]
    loops += [replace(plainest, habits=(name,)) for name in HABITS]
    for row in KNOWN:
        said = Complaint("", 0, row.text)
        assert any(known(loop, said) == row.reason for loop in loops), row
    assert not any(known(loop, Complaint("tight", 0, "differing: ['loss']")) for loop in loops)


def test_the_command() -> None:
    result = CliRunner().invoke(main, ["--loops", "3", "--mode", "tight", "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert "3 loops: {'same': 3" in result.output
