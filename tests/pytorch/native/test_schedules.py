"""Tests of several threads within one budget, under many schedules: the bits of plain PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import WHOLE

MODES = ["saved", "auto", "anything"]


def outcomes(evict: str, first: int, count: int) -> dict[str, int]:
    command = [sys.executable, "-W", "error", "-m", "tests.pytorch.native.schedules"]
    done = subprocess.run(
        [*command, evict, str(first), str(count)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60 + 10 * count,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == [], found["seen"]
    return found["seen"]


@pytest.mark.parametrize("evict", MODES)
def test_threads_under_schedules_have_the_same_bits(evict: str) -> None:
    assert outcomes(evict, 0, 6)["evicted"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [254, 422, 609])
def test_operand_dropped_during_recomputation_is_recomputed(seed: int) -> None:
    """Another thread drops, without an operator, what a recomputation is about to read."""
    assert outcomes("anything", seed, 1) == {"evicted": 1}


@pytest.mark.slow
@pytest.mark.parametrize("evict", MODES)
@pytest.mark.parametrize("first", range(100, 1_100 if WHOLE else 300, 100))
def test_threads_under_hundreds_of_schedules(evict: str, first: int) -> None:
    """A thousand by `scripts/sweep tests`."""
    assert outcomes(evict, first, 100)["evicted"] > 20
