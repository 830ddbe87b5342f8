"""Run the schedule of a chain of stages as nested checkpoints of `torch.utils.checkpoint`.

A schedule of Rotor is recursive. It splits the chain into parts: a stage whose tensors autograd
saves, or a segment of stages that keeps its input only. Once the backward pass has reached a
segment, the segment runs again, split into parts in the same way. So a segment is a checkpoint that
contains checkpoints, and PyTorch's own checkpoints do the rest: hooks, retained graphs, second
derivatives, random numbers and autocast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, final

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from rekindle._errors import Unsupported
from rekindle.planners._chain import Kind, Operation
from rekindle.pytorch.chains._again import Moment, Stage
from rekindle.pytorch.tensors import tensors_of

#: A stage that runs once, or the parts of a segment that runs again.
Part: TypeAlias = "int | tuple[Part, ...]"


def nested(operations: Iterable[Operation], stages: int) -> tuple[Part, ...]:
    """Return the parts of a chain of `stages` stages, as a schedule of Rotor splits it."""
    return _split(iter([each for each in operations if each.kind is not Kind.LOSS]), stages - 1)


def _split(operations: Iterator[Operation], last: int) -> tuple[Part, ...]:
    """Read one run of stages up to the stage `last`, and how each segment of it runs again."""
    ends: list[tuple[int, bool]] = []  # for each part: its last stage, and whether it is saved
    for each in operations:
        saved = each.kind is Kind.TAPE
        if ends and not ends[-1][1] and each.kind is Kind.DROP:
            ends.pop()  # the segment goes on
        ends.append((each.stage, saved))
        if each.stage == last:
            break
    parts: list[Part] = []
    for end, saved in reversed(ends):
        parts.append(end if saved else _split(operations, end))
        if saved:
            next(operations)  # the backward pass of the stage
    return tuple(reversed(parts))


@final
class Pass:
    """One forward pass of a chain, and the second runs of its stages in the backward pass.

    The autograd graph of the forward pass keeps this object alive.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._moments: dict[int, Moment] = {}

    def run(self, parts: Iterable[Part], x: Any) -> Any:
        """Run `parts` of the chain on `x`, each segment as a checkpoint."""
        for part in parts:
            if isinstance(part, int):
                x = self._run_stage(part, x)
            else:
                x = self._run_segment(part, x)
        return x

    def _run_stage(self, number: int, x: Any) -> Any:
        stage = self._stages[number]
        if number in self._moments:
            with self._moments[number].restored():
                return stage(x)
        moment = self._moments[number] = Moment(stage)
        x = stage(x)
        moment.after()
        return x

    def _run_segment(self, parts: tuple[Part, ...], x: Any) -> Any:
        # A checkpoint keeps the tensors among its arguments, but not those in a tuple.
        leaves, structure = tree_flatten(x)

        def segment(*leaves: Any) -> Any:
            before = _versions(leaves)
            output = self.run(parts, tree_unflatten(leaves, structure))
            if before != _versions(leaves):
                raise Unsupported(
                    f"the input of stage {self._first(parts).name} was modified in place, but the "
                    "stage is recomputed from this input. Write inplace=False in the module that "
                    "modifies it, or give that module a copy"
                )
            return output

        return checkpoint(segment, *leaves, use_reentrant=False)

    def _first(self, parts: tuple[Part, ...]) -> Stage:
        first = parts[0]
        return self._stages[first] if isinstance(first, int) else self._first(first)


def _versions(leaves: Iterable[Any]) -> list[int]:
    return [tensor._version for tensor in tensors_of(leaves) if not tensor.is_inference()]
