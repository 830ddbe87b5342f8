"""How PyTorch itself runs a program: plainly, and with modes and hooks that do nothing.

The tracker of memory is a dispatch mode, and a program may have saved-tensor hooks. PyTorch itself
takes other paths below any of them, so a result from there is correct as well. Each reason below
names the run that is compared with then: as a whole, never a tensor with one run and a tensor with
another.
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

#: Some derivatives (of `prod`, `cumprod`) have other formulas, with other last bits, foreach
#: kernels count no versions, and views made in inference mode are none.
MODE = "as below a mode that does nothing, not as without one"
#: `detach_` takes the graph away from a saved tensor; hooks were told of the graph when it was.
DETACHED = "detach_() of what was saved is no error below hooks that do nothing"
#: Its counter moved with writes elsewhere. Hooks that make no check of versions show what is right.
#: Without hooks the backward pass reads, and writes, what the variable has been given since.
EXCHANGED = "set_ or .data = left what was saved unharmed, as hooks that do nothing show"
#: PyTorch finds it when it asks such a view for its graph, which hooks never do. At the same line.
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
        """Return the names in `got` that match no allowed run, and the reason of a match.

        The reason is empty if `got` matches the plain run.
        """
        names = differing(got, self.plain)
        if not names:
            return [], ""
        also_below = differing(got, self.below)
        # Versions a budget counts where no other mode does: they may be as in the plain run.
        if not also_below or (also_below == ["facts"] and "facts" not in names):
            return [], MODE
        reason, other = self._other(got["error"])
        return ([], reason) if reason and not differing(got, other) else (names, "")

    def _other(self, error: str) -> tuple[str, dict[str, Any]]:
        """The run that one with this `error` is to be like, where PyTorch's is another one."""
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
    """A mode and hooks that keep what they are given. `check`: as autograd does without hooks."""

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor.detach(), _version_of(tensor)  # itself it would be a cycle

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if check and _version_of(tensor) != version:
            raise RuntimeError(NOTICED)
        return tensor

    with Tracker(), saved_tensors_hooks(pack, unpack):
        yield


def alive(tracker: Tracker) -> int:
    """Return the bytes that a program left; it may make cycles that cannot be collected."""
    if tracker.alive:
        gc.collect()
    return tracker.alive


def _version_of(tensor: Tensor) -> int:
    """The version counter; negative for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version
