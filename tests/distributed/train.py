"""Train on two ranks, of which the second runs out of budget: `torchrun ... train.py OUT KIND`."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rekindle

ENOUGH, TOO_LITTLE = 64 << 20, 700_000


def main() -> None:
    out, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    meeting = os.environ.get("MEETING", "env://")  # torchrun chooses a port that is free
    dist.init_process_group("gloo", meeting, timeout=timedelta(minutes=5))
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))))
    try:
        with rekindle.distributed.guard(grace_s=2.0):
            for step in range(100):
                amount = TOO_LITTLE if rank == 1 and step == 2 else ENOUGH
                with rekindle.budget(amount):
                    rows = 4096 if amount == TOO_LITTLE else 64
                    if kind == "stuck" and rank == 0 and step == 2:
                        time.sleep(300)  # simulates a collective that does not return
                    model(torch.randn(rows, 64)).square().mean().backward()
    finally:
        (out / f"left-{rank}").write_text(str(time.time()))
        if kind == "slow exit":
            time.sleep(300)  # exit handlers of process groups may hang as well


if __name__ == "__main__":
    main()
