"""Describe a measured chain of stages, and compute the memory of a schedule for the chain.

The chain model of Rotor (`_chain.py`) is coarser and overestimates memory. In that model a gradient
has the size of its value, all forwards of a stage need the same transient memory, and parameters do
not exist. This module uses the measured figures instead. `rekindle.sequential` measures the chain,
and `_dial.py` plans it.
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
    """Measured figures of one stage, in ns and bytes.

    Attributes:
        forward: Time of the forward.
        backward: Time of the backward.
        output: Bytes of the output.
        gradient: Bytes of the gradient of the output; 0 if the output needs none.
        tape: Bytes that a taped forward (one that saves for the backward) adds to the bytes of its
            input; includes the output.
        taped_extra: The most bytes in use while a taped forward runs, beyond its input and `tape`.
        dropped_extra: The most bytes in use while a forward that saves nothing runs, beyond input
            and output.
        backward_extra: The most bytes in use while the backward runs, beyond its inputs and
            results. It is negative if one gradient is freed before the other one is made.
        weights: Bytes of the gradients of this stage's parameters, without parameters that an
            earlier stage shares.
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
    """Measured figures of a chain of stages and its surroundings, in ns and bytes.

    Attributes:
        stages: The measured figures of each stage, in order.
        fixed: Bytes that stay all the time: parameters, buffers, existing gradients, and the bytes
            that the caller reserves.
        input: Bytes of the input x_0, which stays all the time.
        input_gradient: Bytes of the gradient of the input; 0 if it needs none.
        loss_ns: Time of the loss, forward and backward.
        loss_extra: The most bytes while the loss runs, in addition to the output and its gradient.
    """

    stages: tuple[Stage, ...]
    fixed: Bytes
    input: Bytes
    input_gradient: Bytes
    loss_ns: Nanoseconds
    loss_extra: Bytes

    @property
    def chain(self) -> Chain:
        """The same chain in Rotor's coarser model, as input of the dynamic program."""
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
        """The schedule that recomputes nothing."""
        last = len(self.stages)
        forward = (Operation(Kind.TAPE, stage) for stage in range(last))
        backward = (Operation(Kind.BACK, stage) for stage in reversed(range(last)))
        return (*forward, Operation(Kind.LOSS, last), *backward)

    def peak(self, operations: tuple[Operation, ...]) -> Bytes:
        """Return the most bytes in use during a schedule, including the `fixed` bytes."""
        return max(self.memory(operations), default=self.fixed)

    def memory(self, operations: tuple[Operation, ...]) -> Iterator[Bytes]:
        """Yield the most bytes in use during each operation of a schedule.

        The output of the chain stays in memory to the end, because the caller holds it. Gradients
        of parameters stay as well.
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
    """Schedule for a measured chain. `peak` is in bytes and includes parameters."""

    operations: tuple[Operation, ...]
    peak: Bytes
    time: float
    base: float
    """The time of running the forward and backward of every stage once."""

    @property
    def overhead(self) -> float:
        return self.time / self.base - 1 if self.base else 0.0
