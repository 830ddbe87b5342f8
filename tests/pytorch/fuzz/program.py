"""Represent a random program as lines of Python that can be run, printed and shortened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle import OutOfBudget
from tests.differ.judge import BELOW, Complaint, Plain
from tests.differ.judge import Program as Judged
from tests.differ.modes import Evict, Mode, Setting, by_name, evicting
from tests.pytorch.bits import differing, everything
from tests.pytorch.tracker import Tracker

#: Errors that PyTorch raises for a request that it does not support.
REFUSED = (RuntimeError, ValueError, IndexError, TypeError, NameError, AttributeError)
PRELUDE = "from tests.pytorch.fuzz.program import *"
NOTICED = "one of the variables needed for gradient computation has been modified by an inplace"

#: Reasons to accept other results than those of the plain run. All results must then be those of
#: one other run of PyTorch itself. With `BELOW`, that run is within a dispatch mode that does
#: nothing, which changes three things in PyTorch. Some derivatives (of `prod`, `cumprod`) have
#: other formulas, whose last bits differ. Foreach kernels do not bump version counters. A view that
#: is made in inference mode is not marked as a view.
#:
#: `detach_` removes the graph of a tensor that autograd saved, so plain PyTorch raises an error.
#: Saved-tensor hooks got the tensor while it still had the graph, so no error is raised.
DETACHED = "detach_() of what was saved is no error below hooks that do nothing"
#: The program gave a saved tensor other data by `set_` or `.data =`. Plain PyTorch then raises an
#: error, although the saved value was not written, or its backward pass reads the other data. The
#: expected results are those of a run with saved-tensor hooks that check no versions.
EXCHANGED = "set_ or .data = left what was saved unharmed, as hooks that do nothing show"
#: One operator made several views (`unbind`), autograd saved one, and the program wrote in place to
#: their base or to another view. Plain PyTorch raises when it reads the graph of the saved view.
#: Saved-tensor hooks do not read it, so a budget raises the error of the version check instead, at
#: the same line.
VIEWS = "a write to one of several views is noticed by its version"
#: With `split="equal"`, a variable may hold a value that was never in memory as a whole. If the
#: program then writes a tensor that the value needs, reading the value raises an error.
LOST = "a value without room was read after a write to a tensor that it needs"
LOST_ERRORS = ("cannot be computed any more", "evicted by rekindle.budget")


def modes(evict: Evict = "auto") -> dict[str, Mode]:
    """Return the modes in which each program runs."""
    chosen, of = evicting(evict), "" if evict == "auto" else f"{evict}, "
    tight: Literal["tight", "creeping"] = "creeping" if chosen != {"evict": evict} else "tight"
    return by_name(
        Mode(f"{of}everything evicted", chosen, "roomy", everything=True, fixed=False),
        Mode(f"{of}tight", chosen, tight, fixed=False),
    )


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
class Program(Judged):
    """A random program.

    `build` runs before the budget, `step` within it; its names are its results.
    """

    build: tuple[str, ...]
    step: tuple[str, ...]
    resizes = True
    may_vary = False

    @property
    def without(self) -> Iterator[Self]:
        size = max(1, len(self.step) // 2)
        while size:
            for start in range(len(self.step) - size, -1, -size):
                yield replace(self, step=self.step[:start] + self.step[start + size :])
            size //= 2

    def text(self, mode: Mode | None = None, amount: int | None = None) -> str:
        build = [PRELUDE, "", "torch.manual_seed(20)", *self.build]
        if amount is None:
            return "\n".join([*build, *self.step])
        lines = [line for whole in self.step for line in whole.split("\n")]
        return "\n".join([*build, f"with rekindle.budget({amount}):", *(f"    {s}" for s in lines)])

    def amount(self, plain: Plain, mode: Mode, tightness: float) -> int:
        return max(1, int(plain.peak * (1 - tightness)))

    def run(self, setting: Setting) -> dict[str, Any]:
        space = namespace()
        torch.manual_seed(20)
        for line in self.build:
            exec(line, space)
        with setting.whole(), setting.budget() as run:
            if run is not None:
                space["keep"] = run.keep
            error = run_lines(self.step, space)
        space["held"] = [each for each in space["held"] if not _is_spoilt(each)]
        results = {name: space[name] for name in sorted(space) if _is_result(name, space[name])}
        found = everything(results)
        found["error"] = error
        found["facts"] = [(name, *_facts(results, name)) for name in results]
        return found

    def known(self, found: Complaint) -> str:
        lost = "split" in found.mode and any(each in found.text for each in LOST_ERRORS)
        return LOST if lost else ""

    def excuse(self, plain: Plain, setting: Setting, got: dict[str, Any], names: list[str]) -> str:
        below = differing(got, plain.below)
        # A budget bumps version counters that a dispatch mode leaves unchanged, so the versions in
        # "facts" may equal those of the plain run.
        if not below or (below == ["facts"] and "facts" not in names):
            return BELOW
        reason, other = self._other(plain, got["error"])
        return reason if reason and not differing(got, other) else ""

    def _other(self, plain: Plain, error: str) -> tuple[str, dict[str, Any]]:
        """Return the reason and the run to compare with, if a run with a budget raised `error`."""
        if "detached in-place" in plain.error:
            return DETACHED, self.run(_Hooked(check=True))
        noticed = NOTICED in plain.error and NOTICED not in error
        exchanges = any(word in line for line in self.step for word in (".set_(", ".data = "))
        if (noticed or plain.error == error) and exchanges:
            return EXCHANGED, self.run(_Hooked(check=False))
        line = error.partition(": ")[0]
        for there in (plain.error, plain.below["error"]):
            same_line = there.partition(": ")[0] == line
            if NOTICED in error and "and its base or another" in there and same_line:
                return VIEWS, {**plain.below, "error": error}
        return "", {}


class _Hooked(Setting):
    """Plain PyTorch below a dispatch mode and saved-tensor hooks that change nothing.

    With `check`, the hooks compare versions as autograd does without hooks.
    """

    def __init__(self, *, check: bool) -> None:
        super().__init__(None)
        self._check = check

    @contextmanager
    def budget(self) -> Iterator[None]:
        with Tracker(), saved_tensors_hooks(self._pack, self._unpack):
            yield

    @staticmethod
    def _pack(tensor: Tensor) -> tuple[Tensor, int]:
        # the tensor itself would form a reference cycle
        return tensor.detach(), _version_of(tensor)

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if self._check and _version_of(tensor) != version:
            raise RuntimeError(NOTICED)
        return tensor


def _version_of(tensor: Tensor) -> int:
    """Return the version counter; negative for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


held: list[Any] = []  # the variables of a program, new in each run
log: list[Any] = []


def keep(tensor: Tensor) -> Tensor:
    """Return `tensor`. Within a budget, `run.keep` replaces this function."""
    return tensor


def namespace() -> dict[str, Any]:
    """Return the names that a program may use from the start."""
    public = {name: value for name, value in globals().items() if not name.startswith("_")}
    used = {"F": F, "checkpoint": checkpoint, "rekindle": rekindle}  # only by lines of programs
    return {**public, **used, "held": [], "log": []}


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


def _start(message: str) -> str:
    """Return the start of an error's text, which does not depend on where it was found."""
    return NOTICED if message.startswith(NOTICED) else message.split("\n")[0]


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
