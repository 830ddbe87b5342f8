"""Check convolutions whose kernels cuDNN chooses by measured times.

They are recomputed if a trial (a second run at the first call) gives equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import rekindle
from tests.on_device.blocks import training
from tests.on_device.machine import Line, Machine, check, switched
from tests.pytorch.networks import Residual

_SHARES = (0.5, 0.35, 0.25, 0.18)


def _residual(machine: Machine) -> Any:
    """Return twenty residual blocks of convolutions, and a training step."""
    width, size = machine.size(64, 8), machine.size(128, 16)
    blocks = (Residual(width, width, 1, drop=0.0) for _ in range(20))
    model = nn.Sequential(*blocks).to(machine.kind)
    images = torch.randn(machine.size(32, 4), width, size, size, device=machine.kind)
    return training(model, lambda: model(images).square().mean())


def chosen_kernels(machine: Machine) -> Iterator[Line]:
    """Train within several budgets, and check that the peak is within the budget.

    cuDNN chooses kernels by rules, and then by measured times (`torch.backends.cudnn.benchmark`).
    """
    for timed in (False, True):
        with switched(torch.backends.cudnn, "benchmark", timed):
            plain = machine.trained(_residual)
            for share in _SHARES:
                amount = plain.budget(share)
                try:
                    took = machine.trained(_residual, 3, amount)
                except rekindle.OutOfBudget as error:
                    yield {"chosen by time": timed, "share": share, "refused": str(error)[:600]}
                    continue
                yield check(
                    f"convolutions, kernels chosen by time: {timed}, {share:.0%}",
                    took.peak <= amount,
                    budget=amount,
                    peak=took.peak,
                    recomputations=took.run.recomputations,
                    report=[line for line in str(took.run.report()).splitlines() if "kept" in line],
                )
