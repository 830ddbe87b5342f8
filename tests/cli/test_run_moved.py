"""Tests of `rekindle run --swap ... --evict anything`: a model larger than the memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.helpers import own_cache
from tests.pytorch.bits import differing, everything

SCRIPT = str(Path(__file__).parent / "scripts" / "gpt.py")


def output(cache: Path, *command: str) -> list[str]:
    """Run Python with `command`, and return the words that it prints."""
    environment = {**os.environ, "REKINDLE_CACHE": str(own_cache(cache))}
    run = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_gpt_of_four_budgets_trains_and_saves_unmodified(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", ("--swap-directory", str(tmp_path))
    digest, state, _ = output(cache, SCRIPT, str(tmp_path / "plain"))
    budget = int(state) // 4
    options = ("--budget", str(budget), "--swap", "1GiB", *folder, "--evict", "anything", "-q")
    command = ("-m", "rekindle", "run", *options, SCRIPT, str(tmp_path / "moved"))
    moved, _, grown = output(cache, *command)
    assert moved == digest
    assert int(grown) <= 1.08 * budget + 32 * 2**20
    wanted, got = (torch.load(tmp_path / name) for name in ("plain", "moved"))
    assert differing(everything(got), everything(wanted)) == []
