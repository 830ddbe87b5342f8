"""Represent a random program as lines of Python that can be run, printed and shortened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rekindle import OutOfBudget
from tests.pytorch.harsh import everything

#: Errors that PyTorch raises for a request that it does not support.
REFUSED = (RuntimeError, ValueError, IndexError, TypeError, NameError, AttributeError)
PRELUDE = "from tests.pytorch.fuzz.program import *"


class Twice(torch.autograd.Function):
    """A function that saves its input, its result and another value, and unpacks each twice."""

    @staticmethod
    def forward(ctx, x):
        inner = x.sin()
        result = inner * x
        ctx.save_for_backward(x, inner, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, inner, result = ctx.saved_tensors
        again, _, _ = ctx.saved_tensors
        return gradient * (inner + again * x.cos()) + 0 * result


class Dirty(torch.autograd.Function):
    """A function that overwrites its input and saves the result."""

    @staticmethod
    def forward(ctx, x):
        x.sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * (1 - x)


class Several(torch.autograd.Function):
    """A function with several results: a view of its input, an integer, one kept on the context."""

    @staticmethod
    def forward(ctx, x):
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        ctx.factor = x.cos()
        return x * ctx.factor, order, x.exp()

    @staticmethod
    def backward(ctx, first, _, third):
        return first * ctx.factor + third


class Scribbles(torch.autograd.Function):
    """A function whose backward pass overwrites the tensor that the function saved."""

    @staticmethod
    def forward(ctx, x):
        result = x.square()
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, result = ctx.saved_tensors
        return gradient * x.mul_(2) + 0 * result


@dataclass(frozen=True)
class Program:
    """A random program.

    `build` runs before the budget, `step` within it; its names are its results.
    """

    build: tuple[str, ...]
    step: tuple[str, ...]

    def source(self, budget: int | None = None) -> str:
        """Return the program as a script."""
        build = [PRELUDE, "", "torch.manual_seed(20)", *self.build]
        if budget is None:
            return "\n".join([*build, *self.step])
        lines = [line for whole in self.step for line in whole.split("\n")]
        return "\n".join([*build, f"with rekindle.budget({budget}):", *(f"    {s}" for s in lines)])


held: list[Any] = []  # the variables of a program, new in each run
log: list[Any] = []


def keep(tensor: Tensor) -> Tensor:
    """Return `tensor`. Within a budget, `run.keep` replaces this function."""
    return tensor


def namespace() -> dict[str, Any]:
    """Return the names that a program may use from the start."""
    public = {name: value for name, value in globals().items() if not name.startswith("_")}
    return {**public, "held": [], "log": []}


def run_lines(lines: tuple[str, ...], space: dict[str, Any]) -> str:
    """Run the lines up to the first that raises an error of PyTorch; return its index and text."""
    for number, line in enumerate(lines, start=1):
        try:
            exec(line, space)
        except OutOfBudget:  # OutOfBudget is a RuntimeError, too
            raise
        except REFUSED as error:
            return f"line {number}: {type(error).__name__}: {_start(str(error))}"
    return ""


NOTICED = "one of the variables needed for gradient computation has been modified by an inplace"


def _start(message: str) -> str:
    """Return the start of an error's text, which does not depend on where it was found."""
    return NOTICED if message.startswith(NOTICED) else message.split("\n")[0]


def left_behind(
    program: Program,
    context: AbstractContextManager[Any],
    enter: Callable[[Any, dict[str, Any]], None] = lambda entered, space: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `program` within `context`; return copies of its results, and its variables.

    `enter` receives the object that `context` returned before the first line runs.
    """
    space = namespace()
    torch.manual_seed(20)
    for line in program.build:
        exec(line, space)
    with context as entered:
        enter(entered, space)
        error = run_lines(program.step, space)
    space["held"] = [each for each in space["held"] if not _is_spoilt(each)]
    results = {name: space[name] for name in sorted(space) if _is_result(name, space[name])}
    found = everything(results)
    found["error"] = error
    found["facts"] = [(name, *_facts(results, name)) for name in results]
    return found, space


def _is_spoilt(value: object) -> bool:
    """Return True for one of several views that an in-place write made unreadable."""
    try:
        return isinstance(value, Tensor) and value.is_leaf is None
    except RuntimeError:
        return True


def _is_result(name: str, value: object) -> bool:
    if isinstance(value, Tensor):
        return not _is_spoilt(value)
    return name in ("held", "log") or isinstance(value, nn.Module)


def _facts(results: dict[str, Any], name: str) -> tuple[object, ...]:
    """Return properties of a tensor other than its contents: version, device, aliases, graph."""
    tensor = results[name]
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        return ()
    home = tensor.untyped_storage()
    aliases = [
        other
        for other, value in results.items()
        if isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.untyped_storage()._cdata == home._cdata
    ]
    return (
        "inference" if tensor.is_inference() else tensor._version,
        tensor.stride(),
        tensor.storage_offset(),
        home.nbytes(),
        tensor.requires_grad,
        tensor.is_leaf,
        type(tensor.grad_fn).__name__,
        tensor._is_view(),
        aliases,
    )
