"""Tests of a process that forks while other threads use the core: the child does not hang."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import WHOLE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "count", [80, pytest.param(5_000 if WHOLE else 200, marks=pytest.mark.slow)]
)
def test_child_forked_while_threads_compute_exits_normally(count: int) -> None:
    command = [sys.executable, "-m", "tests.pytorch.native.forks", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1_200)
    assert done.returncode == 0, done.stdout + done.stderr
