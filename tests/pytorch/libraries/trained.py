"""Train a model of another library in plain PyTorch, and within parts of its memory peak."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tests.differ.judge import Program
from tests.differ.modes import Mode, Setting, by_name
from tests.pytorch.bits import everything

#: Trains and returns the values to compare.
Train = Callable[[], Sequence[Tensor]]
MODES = by_name(
    Mode("unlimited", amount="unlimited", fixed=False),
    *(Mode(f"{share} of the peak", amount=share, fixed=False) for share in (0.7, 0.45)),
)


@dataclass(frozen=True)
class Trained(Program):
    """A program that trains a model, without a dispatch mode around its budget."""

    name: str
    train: Train
    measured_below: ClassVar[bool] = False
    suggests = False  # a library may replace the error by its own, which suggests no larger budget
    suggestion: ClassVar[str] = "worth_trying"
    most_attempts: ClassVar[int] = 12

    def larger(self, amount: int, attempt: int) -> int:
        return int(amount * (1.02 if attempt < 6 else 1.2))

    def setting(self, mode: Mode | None, amount: int | None = 0, **how: Any) -> Setting:
        return Setting(mode, amount, tracked=False, **how)

    def run(self, setting: Setting) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - libraries draw from the global generator
        with setting.budget():
            found = [each.detach().clone() for each in self.train()]
        return {**everything(found), "error": ""}
