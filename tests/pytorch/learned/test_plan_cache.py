"""Tests of the cache of learned plans: files that later processes and parallel processes read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

import rekindle
from rekindle import Run
from rekindle.engine import Route
from rekindle.pytorch.learned import _plan_cache, _step_plans
from rekindle.pytorch.learned._plan_cache import PlanCache
from rekindle.pytorch.learned._step_plan import GRAPH, StepPlan
from tests.pytorch.learned.conftest import AtOnce
from tests.pytorch.learned.test_learned_plans import Training, budget_of, learned, six
from tests.pytorch.plans import forget_plans

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def another_process(
    budget: int,
    steps: Callable[[Training], object] = six,
    *,
    cache: bool = True,
    learn: bool | Literal["wait"] = "wait",
) -> Run:
    """Run the training from its beginning, as if this process had just started."""
    forget_plans()
    training = Training()
    with rekindle.budget(budget, learn=learn, cache=cache) as run:
        steps(training)
    return run


def files() -> list[Path]:
    return sorted(Path(os.environ["REKINDLE_CACHE"]).glob("plans/*"))


def test_second_process_follows_cached_plan_from_first_step() -> None:
    budget = budget_of()
    plain = Training()
    six(plain)
    first = another_process(budget)
    assert (first.steps_followed, AtOnce.made) == (3, 1)
    forget_plans()
    training = Training()
    with rekindle.budget(budget, learn="wait") as second:
        six(training)
    assert (second.steps_followed, second.steps_left, AtOnce.made) == (6, 0, 1)
    assert second.peak <= budget
    pairs = zip(training.left_behind(), plain.left_behind(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_plan_cache_keeps_plan_of_each_kind_of_step() -> None:
    def steps(training: Training) -> None:
        for number in range(12):
            training.step(number, depth=(None, 6)[number % 2])

    budget = budget_of(0.4, steps)
    another_process(budget, steps)
    assert len(files()) == AtOnce.made == 2
    second = another_process(budget, steps)
    assert (second.steps_followed, second.steps_left, AtOnce.made) == (12, 0, 2)


def test_slightly_larger_budget_uses_cached_plan() -> None:
    """A budget of "auto" differs a little from run to run.

    A smaller or much larger budget does not use the cached plan.
    """
    budget = budget_of()
    another_process(budget)
    assert another_process(budget + budget // 50).steps_followed == 6
    assert another_process(budget - 64).steps_followed == 3
    assert another_process(budget + budget // 10).steps_followed == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("FORMAT", "another"), ("_name_of", lambda device: "another device")],
)
def test_cached_plan_of_other_device_or_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    budget = budget_of()
    another_process(budget)
    monkeypatch.setattr(_plan_cache, name, value)
    assert another_process(budget).steps_followed == 3
    assert AtOnce.made == 2


def test_budget_without_cache_writes_and_reads_no_plan_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = budget_of()
    assert another_process(budget, cache=False).steps_followed == 3
    assert files() == []
    another_process(budget)
    (kept,) = files()
    assert another_process(budget, cache=False).steps_followed == 3
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    assert another_process(budget).steps_followed == 3
    assert not Path("off").exists()
    assert kept.exists()


def test_budget_with_cache_argument_other_than_bool_is_refused() -> None:
    with pytest.raises(rekindle.InvalidArgument, match="cache=False"):
        rekindle.budget("1GiB", cache="no")  # type: ignore[arg-type]


def test_unwritable_plan_cache_folder_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", os.devnull)
    assert another_process(budget_of()).steps_followed == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\xff" + content,
        lambda content: content.replace(b"7", b"8"),
    ],
)
def test_broken_plan_cache_file_is_ignored(damage: Callable[[bytes], bytes]) -> None:
    budget = budget_of()
    another_process(budget)
    (kept,) = files()
    kept.write_bytes(damage(kept.read_bytes()))
    assert another_process(budget).steps_followed == 3
    assert another_process(budget).steps_followed == 6  # the file was written again


def test_step_of_other_program_does_not_follow_cached_plan() -> None:
    budget = budget_of()
    another_process(budget)

    def shallow(training: Training) -> None:
        for number in range(3):
            training.step(number, depth=5)

    run = another_process(budget, shallow)
    assert (run.steps_followed, run.steps_left) == (0, 3)


def test_interrupted_search_of_cached_plan_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the search is repeated, steps follow the best plan that the first search found."""
    budget = budget_of()
    monkeypatch.setattr(AtOnce, "running", True)
    assert another_process(budget, learn=True).steps_followed == 3
    monkeypatch.setattr(AtOnce, "running", False)
    assert another_process(budget).steps_followed == 6
    assert AtOnce.made == 2
    assert another_process(budget).steps_followed == 6
    assert AtOnce.made == 2


def plan(number: int, route: Route) -> StepPlan:
    return StepPlan([number << 2 | GRAPH], [0], [0], None, route=route, finished=True)


def test_full_plan_cache_deletes_least_recently_used_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan_cache, "MOST_FILES", 8)
    route = Route((0, 0), (), ())
    plan_cache = PlanCache(_step_plans.cache_folder(), 1000, CPU)
    for number in range(20):
        plan_cache.keep(plan(number, route))
        for old, path in enumerate(files()):
            os.utime(path, (old, old))  # modification times must differ
        assert plan_cache.same(plan(0, route)) is not None  # the plan is used
    assert len(files()) <= 8
    nbytes = files()[0].stat().st_size
    monkeypatch.setattr(_plan_cache, "MOST_BYTES", 3 * nbytes + 10)
    plan_cache.keep(plan(21, route))
    assert 1 <= len(files()) <= 3


def test_search_for_one_plan_is_claimed_by_one_process() -> None:
    pytest.importorskip("fcntl")
    plan_cache, other = (PlanCache(_step_plans.cache_folder(), 1000, CPU) for _ in range(2))
    wanted = StepPlan([GRAPH], [0], [0], None)
    claim = plan_cache.claim(wanted)
    assert claim is not None
    assert other.claim(wanted) is None
    claim.release()
    claim.release()  # releasing the claim twice is harmless
    again = other.claim(wanted)
    assert again is not None
    again.release()
    assert files() == []


def test_process_uses_plan_that_other_process_searched() -> None:
    pytest.importorskip("fcntl")
    budget = budget_of()
    another_process(budget)
    (kept,) = files()
    content = kept.read_bytes()
    kept.unlink()
    forget_plans()
    training = Training()
    with rekindle.budget(budget, learn=True) as run:
        training.step(0)
        training.step(1)
        (shape,) = learned(run).shapes
        plan_cache = PlanCache(_step_plans.cache_folder(), budget, CPU)
        claim = plan_cache.claim(shape)
        training.step(2)
        assert not run.wait_for_plan(0.1)
        kept.write_bytes(content)
        assert claim is not None
        claim.release()
        assert run.wait_for_plan(10.0)
        training.step(3)
    assert (run.steps_followed, AtOnce.made) == (1, 1)


SCRIPT = """
import sys
import rekindle
from rekindle.pytorch.learned import _step_plans
from rekindle.pytorch.learned._background import Planning
from tests.pytorch.learned.test_learned_plans import Training, six

def counted(*arguments):
    print("searched")
    return Planning(*arguments)

_step_plans.Planning, _step_plans.SECONDS, _step_plans.DEARER = counted, 1.0, float("inf")
with rekindle.budget(int(sys.argv[1]), learn="wait") as run:
    six(Training())
print("followed", run.steps_followed, "left", run.steps_left)
"""


@pytest.mark.slow
def test_parallel_processes_share_one_search_for_plan() -> None:
    """The ranks of one distributed job are such processes."""
    pytest.importorskip("fcntl")
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(budget_of())]

    def together(count: int) -> list[str]:
        started = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        return [process.communicate()[0] for process in started]

    first = together(2)
    assert sum(output.count("searched") for output in first) == 1
    assert all("followed 3 left 0" in output for output in first)
    assert together(1) == ["followed 6 left 0\n"]
    assert [path.suffix for path in files()] == [".plan"]
