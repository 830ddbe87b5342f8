"""Define the chain model of Rotor, and the operations of its schedules (see `rotor.py`).

A chain is a model of L stages in sequence, then the loss as stage L. For stage i (counted from 0):

    forward[i], backward[i]   times; backward[L] is the time of the loss
    value[i]                  size of x_i, the input of stage i, and also of its gradient y_i;
                              value[L] is the size of the output of the last stage
    tape[i]                   size of X_{i+1}: all that a taped forward saves, with its output
    forward_extra[i]          transient memory of the forward beyond input and result
    backward_extra[i]         transient memory of the backward beyond x_i, y_i, y_{i+1}, X_{i+1}

(The papers index tapes by the output: X_{i+1} = tape[i].) A taped forward saves everything that the
backward of its stage needs, as autograd does. Sizes are integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final


@final
class Kind(Enum):
    """Kind of an operation on a stage. Each value is the symbol of papers and published code."""

    DROP = "Fn"  #: forward of the stage; its input is freed
    KEEP = "CF"  #: forward of the stage; its input is kept as a checkpoint
    TAPE = "Fe"  #: forward of the stage that saves everything that its backward needs
    LOSS = "L"  #: forward and backward of the loss
    BACK = "B"  #: backward of the stage


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a schedule for a chain: what runs (`kind`), and the number of the stage."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return "L" if self.kind is Kind.LOSS else f"{self.kind.value}_{self.stage}"


@final
@dataclass(frozen=True)
class Chain:
    """A chain of stages, with the times and sizes that the module docstring defines.

    Raises:
        ValueError: Lengths or sizes are inconsistent.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    value: tuple[int, ...]
    tape: tuple[int, ...]
    forward_extra: tuple[int, ...]
    backward_extra: tuple[int, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward)
        wanted = {
            "backward": stages + 1,
            "value": stages + 1,
            "tape": stages,
            "forward_extra": stages,
            "backward_extra": stages + 1,
        }
        for name, length in wanted.items():
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, wanted {length}")
        for name in ("forward", *wanted):
            for stage, amount in enumerate(getattr(self, name)):
                if not amount >= 0:
                    raise ValueError(f"{name}[{stage}] is {amount}, wanted 0 or more")
        for stage, size in enumerate(self.tape):
            if size < self.value[stage + 1]:
                raise ValueError(
                    f"tape[{stage}] is {size} bytes, wanted at least the {self.value[stage + 1]} "
                    "bytes of the stage's output: the tape is all that the stage saves for its "
                    "backward, and contains the output"
                )

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def base(self) -> float:
        """The time of running the forward and backward of every stage once."""
        return sum(self.forward) + sum(self.backward)

    def in_units(self, unit: int, *, down: bool = False) -> Chain:
        """Convert the sizes of the chain from bytes to multiples of `unit`.

        Args:
            unit: The unit in bytes.
            down: Round sizes down. By default sizes are rounded up, so that a schedule that fits in
                units also fits in bytes.
        """

        def scaled(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(size // unit if down else -(-size // unit) for size in sizes)

        return Chain(
            self.forward,
            self.backward,
            scaled(self.value),
            scaled(self.tape),
            scaled(self.forward_extra),
            scaled(self.backward_extra),
        )

    def time(self, operations: tuple[Operation, ...]) -> float:
        """Return the sum of the times of `operations`, without a check that they are legal."""
        total = 0.0
        for operation in operations:
            if operation.kind in (Kind.BACK, Kind.LOSS):
                total += self.backward[operation.stage]
            else:
                total += self.forward[operation.stage]
        return total
