"""`rekindle.capture(step)`: one whole eager step, written down as a trace."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rekindle.pytorch._budget import budget
from rekindle.trace import Trace


def capture(step: Callable[[], object], *, device: str | torch.device | None = None) -> Trace:
    """Runs `step()` once and returns what it did: every operator, what it read and made, when the
    program and autograd let go of it.

    step: anything: forward, backward, optimizer, any control flow. It runs as it would without
        this; what it returns is dropped. A second step meets gradients and optimizer state that a
        first one only makes: capture that one for a picture of training.
    device: the device whose memory is meant; default: CUDA if it is in use, else the CPU.

    Sizes are in bytes, costs in ns as measured here. `rekindle.trace.formats.save` puts it into a
    file, `rekindle.simulate` replays it within a budget.
    """
    with budget(None, device=device, record=True) as run:
        step()
        return run.trace
