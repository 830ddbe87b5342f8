"""Tests of `run.release` and `run.resume`: others use the memory between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import rekindle
from tests.pytorch.bits import differing
from tests.pytorch.held.placeholders import empty
from tests.pytorch.held.test_moved_state import LARGEST, LAYERS, Task, after, moving

AMPLE = 100 * LARGEST


def test_released_training_continues_with_equal_bits(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path, AMPLE) as run:
        task.step()
        held = run.memory
        stays = run.release()
        assert stays == run.memory < held / 8
        assert empty(task.model.parameters()) >= LAYERS
        task.step()
    assert differing(task.left(), after(2)) == []


def test_resumed_state_is_in_memory_before_it_is_read(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path, AMPLE) as run:
        task.step()
        held = run.memory
        run.release()
        run.resume()
        assert run.memory >= 0.9 * held
        assert empty(task.model.parameters()) == 0
        task.step()
        assert run.peak <= AMPLE
    assert differing(task.left(), after(2)) == []


def test_resumed_state_stays_within_lowered_budget(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path, AMPLE) as run:
        task.step()
        run.release()
        run.budget = 12 * LARGEST
        run.resume()
        assert 6 * LARGEST < run.memory <= 12 * LARGEST
        task.step()
    assert differing(task.left(), after(2)) == []


def test_release_twice_and_resume_twice_changes_nothing(tmp_path: Path) -> None:
    task = Task()
    with moving(tmp_path, AMPLE) as run:
        task.step()
        assert run.release() == run.release()
        run.resume()
        held = run.memory
        run.resume()
        assert run.memory == held
    assert differing(task.left(), after(1)) == []


@pytest.mark.parametrize("name", ["release", "resume"])
def test_release_without_moved_state_is_refused(name: str) -> None:
    with (
        rekindle.budget("1GiB") as run,
        pytest.raises(rekindle.Unsupported, match=rf"run\.{name}\(\)"),
    ):
        getattr(run, name)()
