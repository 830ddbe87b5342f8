"""Tests of random programs of thirty kinds; `scripts/sweep scenes` runs more of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.pytorch.scenes import play as playing
from tests.pytorch.scenes.__main__ import main
from tests.pytorch.scenes.functions import FUNCTIONS
from tests.pytorch.scenes.layers import LAYERS, WIDTH
from tests.pytorch.scenes.play import MODES, judge, play, scene_of
from tests.pytorch.scenes.scenes import SCENES

pytestmark = pytest.mark.filterwarnings("ignore")  # of all that random programs do


@pytest.fixture(autouse=True)
def _native() -> None:
    if native_core() is None:
        pytest.skip("no native core")


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 72))]
)
def test_random_program_is_the_same_within_budgets(seed: int) -> None:
    outcome = judge(seed, 1)
    assert outcome.complaint == "", outcome


#: Scenes whose optimizers are not known ahead, or whose threads allocate.
HARD = ("line search", "sparse table", "forward in a thread")


@pytest.mark.parametrize(
    "seed",
    [
        *(next(seed for seed in range(400) if scene_of(seed) == scene) for scene in HARD),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(72, 102)),
    ],
)
def test_random_program_needs_no_more_than_its_plain_peak(seed: int) -> None:
    outcome = judge(seed, only=("peak",))
    assert outcome.complaint == "", outcome


def test_a_program_that_needs_more_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "PEAK_SHARE", 0.2)
    complaint = judge(0, only=("peak",)).complaint
    assert "bytes or more, and gets" in complaint


@pytest.mark.parametrize("seed", [147, 377])
def test_program_whose_results_become_weights_keeps_bits(seed: int) -> None:
    """The first tensor of a value dies, and a weight that shares it has its version."""
    outcome = judge(seed, only=("anything, tight",))
    assert outcome.complaint == "", outcome


def test_scenes_draw_from_many_kinds() -> None:
    assert len(SCENES) >= 30
    assert len(LAYERS) >= 60
    assert len(FUNCTIONS) >= 30
    assert len({scene_of(seed) for seed in range(400)}) == len(SCENES)


@pytest.mark.parametrize("kind", [FUNCTIONS, {name: make() for name, make in LAYERS.items()}],
                         ids=["functions", "layers"])  # fmt: skip
def test_each_piece_keeps_the_shape_and_has_a_gradient(kind: dict[str, Callable[..., Any]]) -> None:
    for name, piece in kind.items():
        x = torch.randn(4, 8, WIDTH, requires_grad=True)
        made = piece(x)
        assert made.shape == x.shape, name
        made.square().sum().backward()
        assert x.grad is not None, name
        assert x.grad.isfinite().all(), name


def test_a_seed_plays_the_same_program_each_time() -> None:
    for seed in range(3):
        assert play(seed, None).left == play(seed, None).left


def test_a_result_that_differs_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = playing.play

    def off_by_one(seed: int, mode: Any, amount: int = 0) -> playing.Played:
        played = plain(seed, mode, amount)
        if mode is not None:
            played.left["generator"] = "drawn once more"
        return played

    monkeypatch.setattr(playing, "play", off_by_one)
    assert "generator" in judge(0, 1, ("roomy",)).complaint


def test_memory_above_the_budget_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next(seed for seed in range(50) if play(seed, None).drawn[0] == "all")
    monkeypatch.setattr(playing, "ROOMY", 1 << 20)
    monkeypatch.setattr(playing, "CAP", 0.0)
    monkeypatch.setattr(playing, "UNNOTICED", 0)
    assert "the allocator gave out" in judge(seed, 1, ("roomy",)).complaint


def test_tally_counts_memory_of_threads() -> None:
    """Also while the first call of an operator is watched for what it takes inside itself."""
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


def test_a_process_that_ends_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", "/dev/null/nowhere")  # no core: "native" is refused
    done = CliRunner().invoke(main, ["--programs", "1", "--mode", "roomy"])
    assert done.exit_code == 1
    assert "seed 0" in done.output
    assert set(MODES) >= {"roomy", "tight"}
