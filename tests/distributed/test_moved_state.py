"""Tests of data-parallel training whose weights, gradients and optimizer state move to the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.distributed.ranks import join, leave
from tests.pytorch.bits import differing, everything

WIDTH, LAYERS, RANKS = 96, 10, 2
STATE = 16 * LAYERS * WIDTH * WIDTH  #: bytes of weights, gradients and state of Adam


def trained(rank: int) -> list[Tensor]:
    torch.manual_seed(4)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    # The memory of buckets belongs to collectives, and stays.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.randn(3, RANKS, 8, WIDTH)
    for batch in batches:
        optimizer.zero_grad()
        parallel(batch[rank]).square().mean().backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, RANKS, folder)
    wanted = trained(rank)
    budget = int(0.7 * STATE)
    options = {"swap": "1GiB", "swap_directory": folder}
    with rekindle.budget(budget, evict="anything", **options) as run:
        got = trained(rank)
    swapped = run.report().swapped
    assert swapped is not None
    assert run.peak <= budget
    assert swapped.out > STATE // 4
    assert differing(everything(got), everything(wanted)) == []
    leave()


@pytest.mark.slow
def test_two_ranks_with_moved_state_match_pytorch(tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path),), RANKS)
