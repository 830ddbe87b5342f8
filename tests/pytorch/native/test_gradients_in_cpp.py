"""Test that a tensor in use by a C++ function is not mistaken for a gradient that nobody else uses.

Rekindle may write the result of a backward operator over its gradient, if it has as few references
as a gradient in an autograd node. The tensor of this function has as few.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle.native import _build
from tests.cpp import compiled
from tests.pytorch.in_place import taken_over

SOURCE = Path(__file__).with_name("gradients.cpp")


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("library") / "gradients.so"
    compiled(made, [SOURCE], "-shared", *_build._torch().links)
    torch.ops.load_library(str(made))
    return torch.ops.rekindle_test_gradients.curve


@pytest.mark.slow
@pytest.mark.parametrize("outer", [F.gelu, lambda x: x * x.detach(), lambda x: x * 3.0])
def test_tensor_saved_by_cpp_function_is_not_written_over(curve: Any, outer: Any) -> None:
    """Checkpointing runs the C++ function within a node whose own gradient may be written over."""

    def train() -> list[Tensor | None]:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y: Any = checkpoint(lambda x: outer(curve(x)), x, use_reentrant=False)
        torch.exp(y).backward(torch.ones_like(x))
        return [y, x.grad]

    wanted = train()
    with rekindle.budget("1GiB") as run:
        got = train()
    for mine, its in zip(got, wanted, strict=True):
        assert mine is not None
        assert its is not None
        assert torch.equal(mine, its)
    assert taken_over(run) <= 1  # only the node itself may write over its gradient
