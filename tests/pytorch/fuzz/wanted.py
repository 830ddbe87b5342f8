"""Decide which results of a random program are right: those of PyTorch itself, in several ways.

PyTorch itself takes other code paths within a dispatch mode (such as a memory tracker) and with
saved-tensor hooks (which a budget uses), also if these do nothing. So results of such runs are
right as well. Each constant below is a reason to accept the results of such a run. All results must
then be those of the same run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.pytorch.bits import differing
from tests.pytorch.fuzz.program import NOTICED, Program, left_behind
from tests.pytorch.tracker import Tracker

#: An active dispatch mode, even one that does nothing, changes three things in PyTorch. Some
#: derivatives (of `prod`, `cumprod`) have other formulas, whose last bits differ. Foreach kernels
#: do not bump version counters. A view that is made in inference mode is not marked as a view.
MODE = "as below a mode that does nothing, not as without one"
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


class Wanted:
    """The results of PyTorch's own runs of `program`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.plain, _ = left_behind(program, nullcontext())
        tracker = Tracker()
        self.below, space = left_behind(program, tracker)
        self.peak = tracker.peak
        space.clear()
        self.memory_afterwards = alive(tracker)

    def differing(self, got: dict[str, Any]) -> tuple[list[str], str]:
        """Compare the results `got` with those of the runs of PyTorch itself.

        Returns:
            The names of results that differ from each of these runs, and the reason why `got` may
            equal another run than the plain one; "" if it equals the plain run.
        """
        names = differing(got, self.plain)
        if not names:
            return [], ""
        also_below = differing(got, self.below)
        # A budget bumps version counters that a dispatch mode leaves unchanged, so the versions in
        # "facts" may equal those of the plain run.
        if not also_below or (also_below == ["facts"] and "facts" not in names):
            return [], MODE
        reason, other = self._other(got["error"])
        return ([], reason) if reason and not differing(got, other) else (names, "")

    def _other(self, error: str) -> tuple[str, dict[str, Any]]:
        """Return the reason and the run to compare with, if a run with a budget raised `error`."""
        plain = self.plain["error"]
        if "detached in-place" in plain:
            return DETACHED, self._below_hooks(check=True)
        noticed = NOTICED in plain and NOTICED not in error
        if (noticed or plain == error) and self._exchanges():
            return EXCHANGED, self._below_hooks(check=False)
        line = error.partition(": ")[0]
        for there in (plain, self.below["error"]):
            same_line = there.partition(": ")[0] == line
            if NOTICED in error and "and its base or another" in there and same_line:
                return VIEWS, {**self.below, "error": error}
        return "", {}

    def _exchanges(self) -> bool:
        lines = self.program.step
        return any(word in line for line in lines for word in (".set_(", ".data = "))

    def _below_hooks(self, *, check: bool) -> dict[str, Any]:
        return left_behind(self.program, _doing_nothing(check=check))[0]


@contextmanager
def _doing_nothing(*, check: bool) -> Iterator[None]:
    """Enter a dispatch mode and saved-tensor hooks that change nothing.

    With `check`, the hooks compare versions as autograd does without hooks.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        # the tensor itself would form a reference cycle
        return tensor.detach(), _version_of(tensor)

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if check and _version_of(tensor) != version:
            raise RuntimeError(NOTICED)
        return tensor

    with Tracker(), saved_tensors_hooks(pack, unpack):
        yield


def alive(tracker: Tracker) -> int:
    """Return the bytes that a program left in memory, also those in uncollectable cycles."""
    if tracker.alive:
        gc.collect()
    return tracker.alive


def _version_of(tensor: Tensor) -> int:
    """Return the version counter; negative for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version
