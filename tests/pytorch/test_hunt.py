"""Random training loops: a hundred of them, those that once went wrong, and that the hunt finds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.online import _driver
from rekindle.pytorch.online._runtime import Runtime
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


#: Ten loops each; one hundred on both by `scripts/sweep tests`.
TENS = [
    *(("native", tens) for tens in range(10 if WHOLE else 4)),
    *(("python", tens) for tens in range(10 if WHOLE else 1)),
]
NATIVE = tuple(name for name, mode in MODES.items() if mode.native)


@pytest.mark.slow
@pytest.mark.parametrize(("its_core", "tens"), TENS)
def test_drawn_loops_are_the_same_in_a_drawn_mode(its_core: cores.Name, tens: int) -> None:
    """`scripts/sweep hunt` draws as many as one likes."""
    only = NATIVE if its_core == "native" else ()
    if only and native_core() is None:
        pytest.skip("no native core")
    for seed in range(10 * tens, 10 * tens + 10):
        outcome = hunted(seed, 1, only)
        if outcome.kind == "different":
            assert outcome.mode is not None
            told = report(outcome.loop, outcome.mode, outcome.tightness, grows=outcome.grows)
            pytest.fail(f"seed {seed}: {told}")


@pytest.mark.slow
def test_some_loops_on_the_native_core() -> None:
    with cores.taken("native"):  # or skips
        only = [mode.name for mode in MODES.values() if mode.native]
        outcomes = [hunted(seed, 1, only) for seed in range(20)]
    different = [(seed, each) for seed, each in enumerate(outcomes) if each.kind == "different"]
    assert different == []
    assert sum(each.modes.total() for each in outcomes) > 10


@pytest.mark.parametrize("name", PINNED)
def test_what_once_went_wrong(name: str) -> None:
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
        if not (mode.planned or mode.native):
            assert complaint(LONG.source(), plain, mode, 1.0) is None


def _is_found() -> bool:
    """Whether one of the first loops differs."""
    outcomes = (hunted(seed, 1, [EVERYTHING.name]) for seed in range(40))
    return any(outcome.kind == "different" for outcome in outcomes)


def _draws_anew(call: Any, **options: Any) -> list[torch.Tensor]:
    call.payload.random = None
    return _run_again(call, **options)


_run_again = _driver.run_again

DEFECTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "versions are not checked": lambda patch: patch.setattr(
        Runtime, "_check_version", lambda *_: None
    ),
    "random numbers are drawn anew": lambda patch: patch.setattr(_driver, "run_again", _draws_anew),
    "recipes read what is there now": lambda patch: patch.setattr(
        _driver.Driver, "forget", lambda *_: None
    ),
    "a recomputation is off by the last bit": lambda patch: patch.setattr(
        _driver,
        "run_again",
        lambda call, **options: [
            each.nextafter(each + 1) if each.is_floating_point() else each
            for each in _run_again(call, **options)
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[name](monkeypatch)
    assert _is_found()


def test_memory_above_the_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = MODES["tight"]
    assert complaint_of(LONG, mode, 1.0) is None
    monkeypatch.setattr(_driver.Driver, "make_room", lambda *_: None)
    found = complaint_of(LONG, mode, 1.0)
    assert found is not None
    assert "peak" in found.text


def test_bookkeeping_that_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = MODES["unlimited"]
    loop = Loop(("tanh",))
    assert growth(loop, mode) is None
    kept, pack = [], Runtime.pack

    def keeping(self: Runtime, tensor: torch.Tensor) -> Any:
        kept.append(pack(self, tensor))
        return kept[-1]

    monkeypatch.setattr(Runtime, "pack", keeping)
    found = growth(loop, mode)
    kept.clear()
    assert found is not None
    assert found.text.startswith("storages grow")


@pytest.mark.parametrize("mode", ["unlimited", "native, unlimited"])
def test_what_hangs_on_the_last_step_does_not_for_ever(mode: str) -> None:
    """Weights that are copies of those of the step before, which no optimizer writes."""
    loop = Loop((), habits=("state assigned",))
    if MODES[mode].native and native_core() is None:
        pytest.skip("no native core")
    assert growth(loop, MODES[mode]) is None


def test_a_wrong_loop_is_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "run_again", _draws_anew)

    def wrong(loop: Loop) -> bool:
        return complaint_of(loop, EVERYTHING, 1.0) is not None

    assert wrong(LONG)
    short = shrunk(LONG, wrong)
    assert short == Loop(("dropout",), loss=short.loss, steps=1)
    assert "with budget():" in short.source()


def test_an_interrupted_loop_goes_on_in_the_same_way() -> None:
    loop = Loop(("dropout", "batch_norm"), interrupted=True, trip=("aten.addmm.default", 2))
    plain = Plain(loop.source())
    assert plain.first.found["log"][1] == ["'interrupted'"]
    for mode in ("everything evicted", "tight", "anything, tight"):
        assert complaint(loop.source(), plain, MODES[mode], 1.0) is None


def test_a_step_that_the_budget_does_not_see_is_interrupted_as_well() -> None:
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


def test_what_any_mode_changes_is_no_complaint() -> None:
    """As some products in inference mode, which PyTorch computes otherwise below one, on some
    machines: a program that asks whether there is one. What a budget alone changes is one."""
    source = ASKS.format("_get_current_dispatch_mode() is None")
    found = complaint(source, Plain(source), EVERYTHING, 1.0)
    assert found is not None
    assert found.excepted
    ours = "type(_get_current_dispatch_mode()).__module__.startswith('rekindle')"
    source = ASKS.format(ours)
    found = complaint(source, Plain(source), EVERYTHING, 1.0)
    assert found is not None
    assert not found.excepted


def test_what_is_known_is_said_of_a_part_and_a_complaint() -> None:
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
