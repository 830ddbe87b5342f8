"""How a rank of a test begins and ends."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist


def join(rank: int, ranks: int, folder: str, wait: timedelta = timedelta(seconds=60)) -> None:
    """Join the process group of a test, which meets by a file in `folder`.

    A port would have to be chosen before the ranks start, and on a busy machine another process
    may take it meanwhile.
    """
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=ranks, timeout=wait)


def leave() -> NoReturn:
    """Ends this process, with exit code 0, after its process group.

    Not as an interpreter ends: gloo's thread lets go of a collective's tensors when it comes to it,
    and where it asks for the GIL of an interpreter that is ending, the process aborts ("terminate
    called without an active exception"); of plain PyTorch's jobs of four ranks one in ten did.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
