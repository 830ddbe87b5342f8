"""Tests that backward operators give the same bits if they write their result over the gradient.

`IN_PLACE` lists these operators. Inputs are those of PyTorch's own tests, in all floating-point
types that support gradients on a CPU. Complex gradients are left out, because quotients differ.
More inputs have gradients that are infinite, NaN or negative zero, and a size that is no multiple
of the processor's vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from rekindle.pytorch.operators import IN_PLACE, InPlace
from tests.pytorch.in_place import Twins

# The import of `op_db` forbids all later tests to set flags such as `cudnn.benchmark`.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

#: For each operator of `IN_PLACE`: the function (name in `op_db`) whose backward pass calls it.
FORWARD = {
    "_softmax_backward_data": "softmax",
    "_log_softmax_backward_data": "log_softmax",
    "div": "div",
    "elu_backward": "nn.functional.elu",
    "gelu_backward": "nn.functional.gelu",
    "hardshrink_backward": "nn.functional.hardshrink",
    "hardsigmoid_backward": "nn.functional.hardsigmoid",
    "hardtanh_backward": "nn.functional.hardtanh",
    "leaky_relu_backward": "nn.functional.leaky_relu",
    "logit_backward": "logit",
    "mul": "mul",
    "sigmoid_backward": "sigmoid",
    "silu_backward": "nn.functional.silu",
    "softplus_backward": "nn.functional.softplus",
    "softshrink_backward": "nn.functional.softshrink",
    "tanh_backward": "tanh",
    "threshold_backward": "nn.functional.threshold",
}
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e30)
LARGE = (3, 1021, 37)


def _info(entry: InPlace) -> OpInfo:
    name = FORWARD[entry.name.removeprefix("aten::")]
    plain = ("", "no_rounding_mode")
    return next(op for op in op_db if op.name == name and op.variant_test_name in plain)


Call = tuple[Tensor, tuple[Any, ...], dict[str, Any]]


def _calls(op: OpInfo, dtype: torch.dtype) -> Iterator[Call]:
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        yield sample.input, sample.args, sample.kwargs
    first = next(iter(op.sample_inputs("cpu", dtype, requires_grad=True)))
    large = torch.rand(LARGE, dtype=torch.float32).to(dtype).requires_grad_()
    others = tuple(large.detach() if isinstance(each, Tensor) else each for each in first.args)
    yield large, others, first.kwargs


def _with_special_values(like: Tensor) -> Tensor:
    gradient = torch.randn(like.shape, dtype=torch.float32).to(like.dtype)
    flat = gradient.view(-1)[: len(SPECIAL)]
    flat.copy_(torch.tensor(SPECIAL[: flat.numel()]).to(like.dtype))
    return gradient


@pytest.mark.slow
@pytest.mark.parametrize("entry", IN_PLACE, ids=lambda entry: entry.name)
def test_in_place_variant_of_backward_operator_matches_pytorch(entry: InPlace) -> None:
    op = _info(entry)
    torch.manual_seed(0)
    floating = [each for each in op.supported_backward_dtypes("cpu") if each.is_floating_point]
    assert len(floating) >= 3
    for dtype in floating:
        called = 0
        for argument, args, kwargs in _calls(op, dtype):
            y = op.op(argument, *args, **kwargs)
            if not y.requires_grad:
                continue
            with Twins(entry) as twins:
                y.backward(_with_special_values(y), retain_graph=True)
                y.backward(torch.randn(y.shape).to(y.dtype))
            assert twins.wrong == []
            called += twins.called
        assert called > 0, f"{dtype}: none of the calls was the operator's"
