"""Tests of several threads within one budget, which take turns in many random orders."""

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
def test_random_thread_interleavings_match_pytorch(evict: str) -> None:
    assert outcomes(evict, 0, 6)["evicted"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [254, 422, 609])
def test_operand_deleted_by_other_thread_matches_pytorch(seed: int) -> None:
    """With these seeds, another thread deletes a tensor just before a recomputation reads it."""
    assert outcomes("anything", seed, 1) == {"evicted": 1}


@pytest.mark.slow
@pytest.mark.parametrize("evict", MODES)
@pytest.mark.parametrize("first", range(100, 1_100 if WHOLE else 150, 50))
def test_hundreds_of_thread_interleavings_match_pytorch(evict: str, first: int) -> None:
    """For each mode, the test runs 50 interleavings, and `scripts/sweep tests` runs 1,000."""
    assert outcomes(evict, first, 50)["evicted"] > 10
