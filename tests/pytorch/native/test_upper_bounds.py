"""Tests of the upper bounds of results, which replace meta kernels while a budget has much room.

`cores.counting`, which every test of this folder uses, fails if results exceed their bound.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_methods_invocations import op_db

import rekindle
from tests.helpers import WHOLE
from tests.pytorch import cores
from tests.strategies import examples

SIZES = st.integers(1, 4)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]

#: Operators of PyTorch's tests, without those that need CUDA.
OPERATORS = [op for op in op_db if not op.name.startswith("jiterator")]


def trained(*results: object) -> None:
    """Run the backward pass of those results that have one."""
    sums = [
        result.abs().sum()
        for result in results
        if isinstance(result, torch.Tensor) and result.requires_grad
    ]
    if sums:
        torch.autograd.backward(sums)


@pytest.fixture
def first_calls() -> Iterator[None]:
    cores.forget_signatures()
    yield
    cores.forget_signatures()


def test_first_step_within_ample_budget_imports_no_compiler() -> None:
    """PyTorch's meta kernels import `torch._dynamo`, which takes as long as importing PyTorch."""
    program = (
        "import sys, torch, rekindle\n"
        "import torch.nn as nn\n"
        "model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),\n"
        "                      nn.Linear(288, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))\n"
        "images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])\n"
        "with rekindle.budget('1GiB'):\n"
        "    nn.functional.cross_entropy(model(images), labels).backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@examples(100)
@given(st.lists(SIZES, max_size=4), st.lists(SIZES, max_size=4))
def test_bound_of_broadcast_operands_holds(left: list[int], right: list[int]) -> None:
    cores.forget_signatures()
    for one, other in zip(reversed(left), reversed(right), strict=False):
        if one != other and 1 not in (one, other):
            return
    with rekindle.budget("1GiB", learn=False):
        trained(torch.randn(left, requires_grad=True) * torch.randn(right) > 0)
        trained(torch.randn(left, requires_grad=True) * torch.randn(right))


@examples(100)
@given(
    st.lists(st.integers(3, 9), min_size=1, max_size=3),
    st.tuples(*[st.integers(1, 3)] * 5),
    st.booleans(),
)
def test_bound_of_convolution_holds(
    sizes: list[int], numbers: tuple[int, int, int, int, int], grouped: bool
) -> None:
    kernel, stride, padding, dilation, channels = numbers
    if any(dilation * (kernel - 1) + 1 > size + 2 * padding for size in sizes):
        return
    cores.forget_signatures()
    groups = channels if grouped else 1
    images = torch.randn(2, channels, *sizes, requires_grad=True)
    weight = torch.randn(4 * channels, channels // groups, *[kernel] * len(sizes))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(sizes) - 1]
    with rekindle.budget("1GiB", learn=False):
        trained(convolve(images, weight, None, stride, padding, dilation, groups))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8 if WHOLE else 2))
@pytest.mark.usefixtures("first_calls")
def test_bound_of_each_operator_holds(part: int) -> None:
    """CI tries a quarter of the operators in float32, and `scripts/sweep tests` all."""
    for op in OPERATORS[part::8]:
        for dtype in DTYPES if WHOLE else DTYPES[:1]:
            if dtype in op.dtypes:
                run_samples(op, dtype)


def run_samples(op: object, dtype: torch.dtype) -> None:
    """Run forward and backward pass of a few samples, of which some are wrong on purpose."""
    grad = dtype.is_floating_point and op.supports_autograd  # type: ignore[attr-defined]
    try:
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad))[:6]  # type: ignore[attr-defined]
    except RuntimeError:
        return  # PyTorch has no sample of this dtype after all
    with rekindle.budget("64GiB", learn=False):
        for sample in samples:
            try:
                found = op(sample.input, *sample.args, **sample.kwargs)  # type: ignore[operator]
                trained(*(found if isinstance(found, (list, tuple)) else [found]))
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue
