"""Tests of the operators that reach the core with typed instead of boxed arguments.

The first call of such an operator boxes its arguments, because it may have to run again. So each
program calls its operators several times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from tests.pretend_fake.build import ALONE
from tests.pytorch.bits import differing
from tests.pytorch.harsh import everything, harshest

CALLS = 4

#: One call each, given two matrices of 6 rows and 6 columns that require gradients.
CALL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log_softmax": lambda x, y: F.log_softmax(x, -1) * y,
    "softmax": lambda x, y: F.softmax(x, 0) * y,
    "add": lambda x, y: torch.add(x.exp(), y, alpha=3),
    "add numbers": lambda x, y: (x.exp() + 2) + 0.5 * y,
    "add in place": lambda x, y: (2 * x).add_(y, alpha=0.5).tanh(),
    "addmm": lambda x, y: torch.addmm(x.tanh(), y, x, beta=0.5, alpha=2),
    "bmm": lambda x, y: torch.bmm(x.tanh()[None], y[None])[0],
    "copy": lambda x, y: torch.empty_like(x).copy_(x.exp() * y),
    "copy to another dtype": lambda x, y: x.exp().to(torch.float64).float() * y,
    "div": lambda x, y: x.exp() / (y.exp() + 1) / 3,
    "div in place, by dropout": lambda x, y: F.dropout(x * y, 0.3),
    "gelu": lambda x, y: F.gelu(x * y) + F.gelu(y, approximate="tanh"),
    "mean": lambda x, y: x.exp().mean() * y,
    "mean of rows": lambda x, y: x.exp().mean((1,), keepdim=True) * y,
    "mm": lambda x, y: x.tanh() @ y,
    "mul": lambda x, y: x.exp() * y.exp() * 2,
    "mul in place": lambda x, y: (x + y).mul_(3.0).tanh(),
    "neg": lambda x, y: -x.exp() * y,
    "pow": lambda x, y: x.exp().pow(3) + y.exp().pow(-0.5),
    "relu": lambda x, y: F.relu(x * y) + F.relu(x + y, inplace=True),
    "rsqrt": lambda x, y: x.exp().rsqrt() * y,
    "sigmoid": lambda x, y: torch.sigmoid(x * y) + (x - y).sigmoid_(),
    "silu": lambda x, y: F.silu(x * y),
    "sub": lambda x, y: torch.sub(x.exp(), y.exp(), alpha=2),
    "sum": lambda x, y: x.exp().sum() * y + y.exp().sum(dtype=torch.float64).float(),
    "sum of columns": lambda x, y: x.exp().sum([0]) * y.tanh(),
    "tanh": lambda x, y: torch.tanh(x * y) + (x + y).tanh_(),
}


def training(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], list[Tensor]]:
    """Return a step that calls `call` several times and runs the backward pass."""
    x, y = (torch.randn(6, 6, requires_grad=True) for _ in range(2))

    def step() -> list[Tensor]:
        made = [x]
        for _ in range(CALLS):
            made.append(call(made[-1], y))
        made[-1].square().mean().backward()
        return [*made, y]

    return step


@pytest.mark.parametrize("name", CALL)
def test_operators_with_typed_arguments_give_the_same_bits(name: str) -> None:
    torch.manual_seed(20)
    wanted = everything(training(CALL[name])())
    torch.manual_seed(20)
    step = training(CALL[name])
    with rekindle.budget.unlimited():
        result = step()
    assert differing(everything(result), wanted) == []


@pytest.mark.parametrize("name", CALL)
def test_typed_calls_are_recomputed_within_the_smallest_budget(name: str) -> None:
    def program() -> Callable[[], list[Tensor]]:
        step = training(CALL[name])

        def last() -> list[Tensor]:
            return [step()[0]]

        return last

    harshest(program)


class Names(TorchDispatchMode):
    """Collects the names of the operators that run, with their overloads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@ALONE
def test_programs_call_every_operator_with_typed_arguments() -> None:
    with rekindle.budget.unlimited():
        pass  # the core registers its kernels
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("Fake")
    with Names() as names:
        for call in CALL.values():
            training(call)()
    views = {
        "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    }  # fmt: skip
    kernels = {name.removeprefix("aten::") for name in registered}
    typed = {name for name in kernels if name.split(".")[0] not in views}
    assert typed
    assert typed - names.found == set()
