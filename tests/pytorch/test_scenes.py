"""Tests with random programs of thirty kinds (scenes); `scripts/sweep scenes` runs more of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.differ.__main__ import main
from tests.differ.judge import Outcome, Plain
from tests.differ.modes import Setting
from tests.pytorch.bits import differing
from tests.pytorch.scenes import play as playing
from tests.pytorch.scenes.functions import FUNCTIONS
from tests.pytorch.scenes.layers import LAYERS, WIDTH
from tests.pytorch.scenes.play import MODES, Scene, judged, scene_of
from tests.pytorch.scenes.scenes import SCENES
from tests.pytorch.scenes.world import World

# warnings of all kinds that random programs cause
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _native() -> None:
    if native_core() is None:
        pytest.skip("no native core")


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 72))]
)
def test_random_program_within_budgets_matches_pytorch(seed: int) -> None:
    outcome = judged(seed, 1)
    assert outcome.kind == "same", outcome


#: Scenes whose peak is hard to keep: custom optimizers, or threads that allocate.
HARD = ("line search", "sparse table", "forward in a thread")


@pytest.mark.parametrize(
    "seed",
    [
        *(next(seed for seed in range(400) if scene_of(seed) == scene) for scene in HARD),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(72, 102)),
    ],
)
def test_random_program_within_its_plain_peak_matches_pytorch(seed: int) -> None:
    outcome = judged(seed, only=("peak",))
    assert outcome.kind == "same", outcome


def test_random_program_that_needs_larger_budget_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(playing, "PEAK_SHARE", 0.2)
    assert "bytes or more, and gets" in _complaint(judged(0, only=("peak",)))


@pytest.mark.parametrize("seed", [147, 377])
def test_random_program_that_makes_weights_matches_pytorch(seed: int) -> None:
    """A weight is made from an operator's result, and shares its storage and version counter."""
    outcome = judged(seed, only=("anything, tight",))
    assert outcome.kind == "same", outcome


def test_program_whose_operator_frees_its_input_matches_pytorch() -> None:
    """In forward mode, autograd passes zeros to an operator that nothing else holds."""
    outcome = judged(50069, only=("tight",))
    assert outcome.kind == "same", outcome


def test_random_programs_draw_from_30_kinds_and_60_layers() -> None:
    assert len(SCENES) >= 30
    assert len(LAYERS) >= 60
    assert len(FUNCTIONS) >= 30
    assert len({scene_of(seed) for seed in range(400)}) == len(SCENES)


@pytest.mark.parametrize("kind", [FUNCTIONS, {name: make() for name, make in LAYERS.items()}],
                         ids=["functions", "layers"])  # fmt: skip
def test_layer_of_random_program_keeps_shape_and_has_gradient(
    kind: dict[str, Callable[..., Any]],
) -> None:
    for name, piece in kind.items():
        x = torch.randn(4, 8, WIDTH, requires_grad=True)
        made = piece(x)
        assert made.shape == x.shape, name
        made.square().sum().backward()
        assert x.grad is not None, name
        assert x.grad.isfinite().all(), name


def test_random_program_of_same_seed_is_equal_each_time() -> None:
    for seed in range(3):
        plain = Plain(Scene(seed))
        assert differing(plain.below, plain.first) == []


def _complaint(outcome: Outcome) -> str:
    assert outcome.complaint is not None
    return outcome.complaint.text


def test_random_program_with_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Scene.run

    def off_by_one(scene: Scene, setting: Setting) -> dict[str, Any]:
        found = run(scene, setting)
        if setting.mode is not None:
            found["generator"] = found["generator"] + 1
        return found

    monkeypatch.setattr(Scene, "run", off_by_one)
    assert "generator" in _complaint(judged(0, 1, ("roomy",)))


def test_random_program_that_exceeds_budget_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(seed for seed in range(50) if World(seed).place == "all")
    monkeypatch.setattr(playing, "CAP", 0.0)
    monkeypatch.setattr(playing, "UNNOTICED", 0)
    assert "the peak was" in _complaint(judged(seed, 1, ("roomy",)))


def test_memory_count_of_random_program_includes_threads() -> None:
    """Memory that another thread allocates counts, also while a workspace is being measured."""
    tally, there = playing.Tally(), []
    with tally.counting(), ThreadPoolExecutor(1) as pool, rekindle.budget("1GiB"):
        with tally.of_a_budget():
            for _ in range(3):
                there.append(torch.ones(5000))
                pool.submit(there.clear).result()
                pool.submit(lambda: there.append(torch.rand(5000).cumsum(0))).result()
                there.clear()
        assert tally.within == 2 * 20_000
        kept = torch.ones(1000)
        with tally.of_a_budget():
            torch.ones(1000).sort()
        assert tally.within == 2 * 20_000
    assert tally.peak >= 2 * 20_000
    del kept


def test_random_program_that_ends_its_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", "/dev/null/nowhere")  # an unknown mode is refused
    done = CliRunner().invoke(main, ["scenes", "--programs", "1", "--mode", "roomy"])
    assert done.exit_code == 1
    assert "seed 0" in done.output
    assert set(MODES) >= {"roomy", "tight"}
