"""A chain as it was measured, and the memory of a schedule for it, moment by moment.

The model of `_chain.py` rounds in favor of safety: a gradient has the size of its value, one
transient serves all forwards, parameters do not exist. The walk here knows better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.planners._chain import Chain, Kind, Operation


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """One stage as it was measured, in ns and bytes.

    output: what the next stage gets; gradient: of the output, 0 if it needs none.
    tape: what a forward for the backward leaves beside its input; its output is part of that.
    *_extra: the most beside that while it runs: a forward with tape, without, the backward; there
        less than nothing where one gradient is gone before the other is made.
    weights: gradients of parameters that no earlier stage has.
    """

    forward: Nanoseconds
    backward: Nanoseconds
    output: Bytes
    gradient: Bytes
    tape: Bytes
    taped_extra: Bytes
    dropped_extra: Bytes
    backward_extra: Bytes
    weights: Bytes


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """A chain of stages with what is around it.

    fixed: alive all the time: parameters, buffers, gradients that are there already, what the
        caller said. input: bytes of x_0, alive all the time. loss_extra: beside output and its
        gradient while the loss runs.
    """

    stages: tuple[Stage, ...]
    fixed: Bytes
    input: Bytes
    input_gradient: Bytes
    loss_ns: Nanoseconds
    loss_extra: Bytes

    @property
    def chain(self) -> Chain:
        stages = self.stages
        return Chain(
            tuple(float(stage.forward) for stage in stages),
            (*(float(stage.backward) for stage in stages), float(self.loss_ns)),
            (self.input, *(stage.output for stage in stages)),
            tuple(max(stage.tape, stage.output) for stage in stages),
            tuple(max(stage.taped_extra, stage.dropped_extra) for stage in stages),
            (*(max(0, stage.backward_extra) for stage in stages), self.loss_extra),
        )

    @property
    def keep_all(self) -> tuple[Operation, ...]:
        """Nothing is computed twice."""
        last = len(self.stages)
        forward = (Operation(Kind.TAPE, stage) for stage in range(last))
        backward = (Operation(Kind.BACK, stage) for stage in reversed(range(last)))
        return (*forward, Operation(Kind.LOSS, last), *backward)

    def peak(self, operations: tuple[Operation, ...]) -> Bytes:
        """The most memory at any moment of a schedule, `fixed` included."""
        return max(self.memory(operations), default=self.fixed)

    def memory(self, operations: tuple[Operation, ...]) -> Iterator[Bytes]:
        """The most memory during each operation.

        The output of the chain stays to the end: the caller has it. Gradients of parameters stay.
        """
        stages, last = self.stages, len(self.stages)
        values = (self.input, *(stage.output for stage in stages))
        gradients = (self.input_gradient, *(stage.gradient for stage in stages))
        kept, taped, current, gradient, weights = {0}, set[int](), 0, 0, 0
        for operation in operations:
            i = operation.stage
            alive = kept | {current} | taped | {stage + 1 for stage in taped}
            held = self.fixed + weights + gradient + sum(values[x] for x in alive)
            held += sum(max(0, stages[s].tape - stages[s].output) for s in taped)
            match operation.kind:
                case Kind.LOSS:
                    yield held + gradients[last] + self.loss_extra
                    gradient, current = gradients[last], 0
                    kept.add(last)
                case Kind.BACK:
                    held += stages[i].weights
                    yield held + gradients[i] + stages[i].backward_extra
                    weights += stages[i].weights
                    gradient, current = gradients[i], 0
                    taped.discard(i)
                    if i:
                        kept.discard(i)
                case Kind.TAPE:
                    yield held + max(stages[i].tape, values[i + 1]) + stages[i].taped_extra
                    taped.add(i)
                    current = i + 1
                case _:
                    if operation.kind is Kind.KEEP:
                        kept.add(i)
                    yield held + values[i + 1] + stages[i].dropped_extra
                    current = i + 1


@final
@dataclass(frozen=True, slots=True)
class ChainSchedule:
    """What to do with a measured chain. Times in ns, memory in bytes, all of the model."""

    operations: tuple[Operation, ...]
    peak: Bytes
    time: float
    base: float
    """The time of running everything once."""

    @property
    def overhead(self) -> float:
        return self.time / self.base - 1 if self.base else 0.0
