"""Join and leave the process group of a distributed test."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist


def join(rank: int, ranks: int, folder: str, wait: timedelta = timedelta(seconds=60)) -> None:
    """Join the process group of a test by a rendezvous file in `folder`.

    A TCP port would have to be chosen before the ranks start, and another process may take that
    port meanwhile.
    """
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=ranks, timeout=wait)


def leave() -> NoReturn:
    """Destroy the process group and end this process with exit code 0.

    The interpreter must not finalize. gloo's thread may free tensors of a collective later. If it
    then needs the GIL of an interpreter that is ending, the process aborts ("terminate called
    without an active exception"). In plain PyTorch, one in ten jobs of four ranks did.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
