"""Run the schedule of a chain of stages with saved-tensor hooks.

All stages run with gradients enabled, in one ordinary autograd graph. If the schedule has
`Kind.TAPE` for a stage, autograd saves the stage's tensors as usual. For any other stage, autograd
saves empty `Holder`s, and the stage's activations are freed when its forward pass ends.

A `Frame` belongs to one forward and backward pass. When the backward pass unpacks a holder, the
frame performs the schedule up to the backward pass of the holder's stage. The frame runs earlier
stages again, without saving tensors, from the last kept input up to that stage. Then it runs the
stage itself and fills the stage's holders.

Autograd itself is unchanged: hooks, the order in which gradients are summed, `torch.autograd.grad`,
frozen parameters and tied parameters work as in plain PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rekindle._errors import Unsupported
from rekindle.planners._chain import Kind, Operation
from rekindle.pytorch.chains._again import Moment, Stage, detached
from rekindle.pytorch.tensors import tensors_of


@final
class Holder:
    """The object that autograd saves instead of a tensor; empty until its stage runs again."""

    __slots__ = ("__weakref__", "dtype", "frame", "shape", "stage", "tensor")

    def __init__(self, frame: Frame, stage: int, tensor: Tensor) -> None:
        self.frame = frame
        self.stage = stage
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.tensor: Tensor | None = None

    def get(self) -> Tensor:
        if self.tensor is None:
            self.frame.bring_back(self.stage)
        assert self.tensor is not None
        return self.tensor


@final
class Frame:
    """The state of one forward pass of a chain and its backward pass.

    The `Holder`s that autograd saves keep this object alive.
    """

    def __init__(self, stages: Sequence[Stage], operations: Sequence[Operation]) -> None:
        self.stages = stages
        loss = next(n for n, each in enumerate(operations) if each.kind is Kind.LOSS)
        self._first = operations[:loss]
        self._later = operations[loss + 1 :]
        # index in `_later` (the part of the schedule after the loss) of the next operation to
        # perform
        self._position = 0
        self._inputs: dict[int, Any] = {}
        self._versions: dict[int, list[int]] = {}
        self._moments: dict[int, Moment] = {}
        self._holders: dict[int, list[weakref.ref[Holder]]] = {}
        # stages that were recomputed in this backward pass, so their holders are filled
        self._back: set[int] = set()
        # index of the stage that can run next, and its input; None: no such input is in memory
        self._current: tuple[int, Any] | None = None

    def forward(self, x: Any) -> Any:
        self._keep(0, x)
        for operation in self._first:
            stage = self.stages[operation.stage]
            if operation.kind is Kind.KEEP:
                self._keep(operation.stage, x)
            moment = self._moments[operation.stage] = Moment(stage, x)
            if operation.kind is Kind.TAPE:
                x = stage(x)
            else:
                with saved_tensors_hooks(self._put_away(operation.stage), Holder.get):
                    x = stage(x)
            moment.after()
            self._check_unchanged(operation.stage)
        return x

    def _put_away(self, stage: int) -> Callable[[Tensor], Holder]:
        holders = self._holders[stage] = []

        def pack(tensor: Tensor) -> Holder:
            holder = Holder(self, stage, tensor)
            holders.append(weakref.ref(holder))
            return holder

        return pack

    def _keep(self, stage: int, x: Any) -> None:
        self._inputs[stage] = detached(x)
        self._versions[stage] = _versions(x)

    def _check_unchanged(self, stage: int) -> None:
        if stage in self._inputs and _versions(self._inputs[stage]) != self._versions[stage]:
            raise Unsupported(
                f"the input of stage {self.stages[stage].name} was modified in place, but the "
                "stage is recomputed from this input. Write inplace=False in the module that "
                "modifies it, or give that module a copy"
            )

    # -- backward ---------------------------------------------------------------------------------

    def bring_back(self, stage: int) -> None:
        """Recompute the stage with index `stage`, to fill its `Holder`s.

        If the rest of the schedule recomputes this stage, the schedule is followed.
        """
        self._forget_beyond(stage)
        if torch._C._current_graph_task_id() >= 0:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end)
        ahead = Operation(Kind.BACK, stage)
        with suppress(ValueError):
            end = self._later.index(ahead, self._position)
            steps, self._position = self._later[self._position : end], end + 1
            for operation in steps:
                if operation.kind is not Kind.BACK:
                    self._perform(operation.kind, operation.stage)
        # If `stage` is still missing, the schedule has passed it already: a second or a partial
        # backward pass over a retained graph needs it again. Then start from the nearest stage
        # input that is still in memory.
        if stage not in self._back:
            start = max(kept for kept in self._inputs if kept <= stage)
            for between in range(start, stage):
                self._perform(Kind.DROP, between)
            self._perform(Kind.TAPE, stage)
        self._current = None

    def _perform(self, kind: Kind, number: int) -> None:
        if self._current is not None and self._current[0] == number:
            x = self._current[1]
            if kind is Kind.KEEP:
                self._keep(number, x)
        else:
            self._check_unchanged(number)
            x = self._inputs[number]
        self._current = None
        stage = self.stages[number]
        if kind is Kind.TAPE:
            if number:
                self._inputs.pop(number, None)
            self._back.add(number)
        fill = _Fill(stage, self._holders[number] if kind is Kind.TAPE else None)
        with self._moments[number].restored(), saved_tensors_hooks(fill.pack, _never):
            output = stage(x)
        fill.check()
        self._current = number + 1, detached(output)

    def _forget_beyond(self, stage: int) -> None:
        """Free tensors of the stages after `stage`, because their backward passes have ended."""
        for later in [each for each in self._back if each > stage]:
            self._back.discard(later)
            self._empty(later)
        for later in [each for each in self._inputs if each > stage]:
            del self._inputs[later]

    def _end(self) -> None:
        """Empty all holders after the backward pass: a retained graph must not keep tensors."""
        for stage in self._back:
            self._empty(stage)
        self._back.clear()

    def _empty(self, stage: int) -> None:
        for reference in self._holders[stage]:
            holder = reference()
            if holder is not None:
                holder.tensor = None


@final
class _Fill:
    """Saved-tensor hook that puts the tensors of a second run of a stage into its holders.

    The hook also checks that both runs of the stage save as many tensors, of the same shapes and
    dtypes. If `holders` is None, the hook discards the saved tensors.
    """

    def __init__(self, stage: Stage, holders: list[weakref.ref[Holder]] | None) -> None:
        self._stage = stage
        self._holders = holders
        self._saved = 0

    def pack(self, tensor: Tensor) -> None:
        number, self._saved = self._saved, self._saved + 1
        if self._holders is None:
            return
        if number >= len(self._holders):
            raise self._differs(
                f"it saved {len(self._holders)} tensors the first time, and more when it was "
                "recomputed"
            )
        holder = self._holders[number]()
        if holder is None:
            return  # autograd has freed this holder together with its part of the graph
        if (tensor.shape, tensor.dtype) != (holder.shape, holder.dtype):
            then, now = [*holder.shape], [*tensor.shape]
            raise self._differs(
                f"saved tensor {number} was {holder.dtype} {then} the first time, and "
                f"{tensor.dtype} {now} when it was recomputed"
            )
        holder.tensor = tensor.detach()

    def check(self) -> None:
        if self._holders is not None and self._saved < len(self._holders):
            raise self._differs(
                f"it saved {len(self._holders)} tensors the first time, and {self._saved} when it "
                "was recomputed"
            )

    def _differs(self, how: str) -> Unsupported:
        return Unsupported(
            f"stage {self._stage.name} behaved differently when it was recomputed: {how}. A stage "
            "may depend only on its input, its parameters and buffers, and torch's random numbers"
        )


def _never(_: None) -> Tensor:
    raise AssertionError(
        "a tensor saved by the recomputation of a stage was unpacked, but no backward pass uses "
        "the graph of a recomputation"
    )


def _versions(x: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(x) if not tensor.is_inference()]
