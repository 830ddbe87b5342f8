"""The autograd nodes whose backward operator may write its result over the incoming gradient.

`Twins` checks that the operator's in-place variant gives equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle import Run
from rekindle.pytorch.native import Driver
from rekindle.pytorch.operators import IN_PLACE, InPlace
from tests.pytorch.bits import differing

#: For each autograd node: a function that makes this node and returns a tensor of the same size.
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "CeluBackward0": F.celu,
    "DivBackward0": lambda x: x / 3.0,
    "EluBackward0": F.elu,
    "GeluBackward0": F.gelu,
    "HardshrinkBackward0": F.hardshrink,
    "HardsigmoidBackward0": F.hardsigmoid,
    "HardtanhBackward0": F.hardtanh,
    "LeakyReluBackward0": F.leaky_relu,
    "LogSoftmaxBackward0": lambda x: F.log_softmax(x, -1),
    "LogitBackward0": lambda x: torch.logit(x, 0.01),
    "MulBackward0": lambda x: x * 3.0,
    "ReluBackward0": torch.relu,
    "SafeSoftmaxBackward0": lambda x: torch._safe_softmax(x, -1),
    "SigmoidBackward0": torch.sigmoid,
    "SiluBackward0": F.silu,
    "SoftmaxBackward0": lambda x: F.softmax(x, -1),
    "SoftplusBackward0": F.softplus,
    "SoftshrinkBackward0": F.softshrink,
    "TanhBackward0": torch.tanh,
    "ThresholdBackward0": lambda x: F.threshold(x, 0.1, 20.0),
}
NODES = [(entry, node) for entry in IN_PLACE for node in entry.nodes]


def taken_over(run: Run) -> int:
    """Return how many calls wrote their result over a gradient."""
    return run._driver.core.in_place(run._driver.handle)[0]


def fewest_references(run: Run) -> int | None:
    """Return the fewest references to a gradient that was overwritten by a result, or None."""
    return run._driver.core.in_place(run._driver.handle)[1]


@contextmanager
def without() -> Iterator[None]:
    """While the context is open, make new budgets allocate new memory for every result."""
    make = Driver.__init__

    def made(driver: Driver, *args: Any) -> None:
        make(driver, *args)
        driver.core.disable_for_tests(driver.handle, "in_place")

    Driver.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        Driver.__init__ = make  # type: ignore[method-assign]


@final
class Twins(TorchDispatchMode):
    """A mode that also calls the in-place variant of an operator on a copy of the gradient.

    It compares the bits of both results.
    """

    def __init__(self, entry: InPlace) -> None:
        super().__init__()
        packet = getattr(torch.ops.aten, entry.name.removeprefix("aten::"))
        self._functional = getattr(packet, entry.overload or "default")
        self._twin = getattr(packet, entry.twin)
        self.called, self.wrong = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        gradient = args[0] if args else None
        if (
            func is self._functional
            and isinstance(gradient, Tensor)
            and gradient.dtype == result.dtype
            and gradient.shape == result.shape
            and gradient.is_contiguous()
        ):
            over = gradient.clone()
            written = self._twin._schema.arguments[-1].name
            self._twin(over, *args[1:], **kwargs, **{written: over})
            self.called += 1
            if differing({"": over}, {"": result}):
                self.wrong.append(f"{result.dtype} {tuple(result.shape)}")
        return result
