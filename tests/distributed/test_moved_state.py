"""Tests of data-parallel training whose weights, gradients and optimizer state move to the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.distributed.ranks import join, leave
from tests.pytorch.bits import differing, everything

WIDTH, LAYERS, RANKS = 96, 10, 2
STATE = 16 * LAYERS * WIDTH * WIDTH  #: bytes of weights, gradients and state of Adam


def distributed(model: nn.Sequential, sharded: bool) -> nn.Module:
    if not sharded:
        # The memory of buckets belongs to collectives, and stays.
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def trained(rank: int, sharded: bool) -> list[Tensor]:
    torch.manual_seed(4)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    parallel = distributed(model, sharded)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.randn(3, RANKS, 8, WIDTH)
    for batch in batches:
        optimizer.zero_grad()
        parallel(batch[rank]).square().mean().backward()
        optimizer.step()
    found = [each.detach() for each in model.parameters()]
    return [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in found]


def work(rank: int, folder: str, sharded: bool) -> None:
    torch.set_num_threads(1)
    join(rank, RANKS, folder)
    wanted = trained(rank, sharded)
    budget = int((0.35 if sharded else 0.7) * STATE)
    options = {"swap": "1GiB", "swap_directory": folder}
    with rekindle.budget(budget, evict="anything", **options) as run:
        got = trained(rank, sharded)
    swapped = run.report().swapped
    assert swapped is not None
    assert run.peak <= budget
    assert swapped.out > STATE // (8 if sharded else 4)
    assert differing(everything(got), everything(wanted)) == []
    leave()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_with_moved_state_match_pytorch(sharded: bool, tmp_path: Path) -> None:
    multiprocessing.spawn(work, (str(tmp_path), sharded), RANKS)
