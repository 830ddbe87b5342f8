"""What the tests of planned models share: a tracker that compiled code may run below, a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.pytorch.harsh import Watch
from tests.pytorch.models import Phase

PLENTY = 1 << 40


class Onlooker(Watch):
    """A tracker that torch.compile takes no notice of."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class WithLoss(nn.Module):
    """A model with its loss inside."""

    def __init__(self, model: nn.Module, losses: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.losses = losses

    def forward(self, *batch: Tensor) -> Tensor:
        return self.losses(self.model, batch)

    @staticmethod
    def of(model: nn.Module, phase: Phase) -> WithLoss:
        return WithLoss(model, phase.losses)


def half_way(least: int, most: int) -> int:
    return (least + most) // 2
