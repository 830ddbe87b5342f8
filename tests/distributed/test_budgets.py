"""Tests of budgets under `torchrun`: each rank has its own budget.

The budget "auto" gives each rank an equal share of the free memory of the machine or device.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_guard import launched
from tests.standin.process import compiled

pytestmark = pytest.mark.slow
RANKS = 4


def found(folder: Path, *extension: str) -> list[dict[str, Any]]:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "tests.distributed.budgets", str(folder), *extension]
    code, output = launched(command, {})
    assert code == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def check(ranks: list[dict[str, Any]]) -> None:
    """Check that no rank exceeds its own budget, and that weights equal those without a budget."""
    assert len({rank["own"] for rank in ranks}) == RANKS
    for rank in ranks:
        assert rank["equal"]
        assert rank["peak"] <= rank["own"]
        assert rank["evictions"] > 0
    assert len({rank["common"] for rank in ranks}) == 1


def test_auto_budget_of_each_rank_is_share_of_machine(tmp_path: Path) -> None:
    ranks = found(tmp_path)
    check(ranks)
    for rank in ranks:  # free memory changes from moment to moment
        assert rank["auto"] < 0.4 * rank["alone"]


def test_auto_budget_is_half_if_two_ranks_share_a_device(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None or torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("the stand-in device needs g++ and a PyTorch without devices")
    ranks = found(tmp_path, str(compiled(compiler)))
    check(ranks)
    for rank in ranks:
        assert 0.49 * rank["alone"] < rank["auto"] < 0.51 * rank["alone"]
        assert 0.49 * rank["alone"] < rank["common"] < 0.51 * rank["alone"]
