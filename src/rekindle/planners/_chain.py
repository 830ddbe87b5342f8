"""The chain model of Rotor, and the operations that a schedule for it is made of.

L stages in sequence, then the loss as stage L. For stage i (counted from 0):

    forward[i], backward[i]   times; backward[L] is the time of the loss
    value[i]                  x_i, size of the input of stage i and of its gradient; [L]: output
    tape[i]                   X_{i+1}, all that a taped forward leaves, its output x_{i+1} included
    forward_extra[i]          transient memory of the forward beyond input and result
    backward_extra[i]         transient memory of the backward beyond x_i, y_i, y_{i+1}, X_{i+1}

(The papers index tapes by the output: X_{i+1} = tape[i].) Sizes are integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final


@final
class Kind(Enum):
    """What is done to a stage. The value is how papers and codes write it."""

    DROP = "Fn"  #: forward, the input is dropped
    KEEP = "CF"  #: forward, the input is kept as a checkpoint
    TAPE = "Fe"  #: forward with everything that the backward needs
    LOSS = "L"
    BACK = "B"


@final
@dataclass(frozen=True, slots=True)
class Operation:
    kind: Kind
    stage: int

    def __str__(self) -> str:
        return "L" if self.kind is Kind.LOSS else f"{self.kind.value}_{self.stage}"


@final
@dataclass(frozen=True)
class Chain:
    """A chain of stages. Raises ValueError where lengths or sizes make no sense."""

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
                    f"tape[{stage}] is {size}, but the output that it holds is "
                    f"{self.value[stage + 1]}"
                )

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def base(self) -> float:
        """The time of running everything once."""
        return sum(self.forward) + sum(self.backward)

    def in_units(self, unit: int, *, down: bool = False) -> Chain:
        """Sizes in multiples of `unit`, rounded up: what fits then fits in bytes too."""

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
        """The time of a sequence; whether it is legal and fits is not asked."""
        total = 0.0
        for operation in operations:
            if operation.kind in (Kind.BACK, Kind.LOSS):
                total += self.backward[operation.stage]
            else:
                total += self.forward[operation.stage]
        return total
