"""Tests of `distributed.common_budget`: all ranks get one budget, the smallest of their amounts.

If that is too small for one rank, every rank raises `OutOfBudget`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import rekindle
from rekindle.pytorch.context._auto import available
from tests.distributed.ranks import join, leave

GIB = 2**30


def _asked(rank: int) -> dict[str, Any]:
    small = rekindle.estimate(nn.Linear(64, 64), torch.zeros(8, 64))
    large = rekindle.estimate(nn.Linear(4096, 4096 if rank else 64), torch.zeros(8, 4096))
    common = rekindle.distributed.common_budget
    found: dict[str, Any] = {
        "least": common(f"{4 - rank}GiB"),
        "auto": common(),
        "alone": available(torch.device("cpu"), 1),
        "small": common("1GiB", estimate=small),
    }
    try:
        common("100MiB", estimate=large)
    except rekindle.OutOfBudget as error:
        found["too little"] = str(error), error.smallest_budget
    return found


def _work(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    torch.save(_asked(rank), Path(folder) / f"{rank}.pt")
    leave()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_ranks_with_different_amounts_get_smaller_budget(tmp_path: Path) -> None:
    mp.start_processes(_work, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one["least"] == other["least"] == 3 * GIB
    assert one["small"] == other["small"] == GIB
    # each rank has half of the machine's memory
    assert one["auto"] == other["auto"] <= 0.6 * one["alone"]
    assert one["too little"] == other["too little"]
    message, smallest = one["too little"]
    assert message.startswith("rank 1 needs")
    assert smallest >= 2 * 4 * 4096 * 4096


def test_common_budget_without_process_group_is_own_amount() -> None:
    assert rekindle.distributed.common_budget("3GiB") == 3 * GIB
    with pytest.raises(rekindle.InvalidBudget):
        rekindle.distributed.common_budget("much")
    with pytest.raises(rekindle.InvalidBudget, match=r'write .*common_budget\("24GiB"\)'):
        rekindle.distributed.common_budget(24)


def test_available_memory_of_machine_is_divided_by_local_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    alone = available(cpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available(cpu) < 0.5 * alone
