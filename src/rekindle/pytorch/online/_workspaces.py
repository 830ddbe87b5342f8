"""What operators have in use inside themselves beside what they make, and give back.

A convolution's scratch, the workspaces of cuBLAS and cuDNN, what a composite operator computes on
its way: no dispatcher shows them, only the allocator. It is the same at every call of a signature,
so the first calls tell, and room is made for it before all others. Before the first call of all
there is a guess, and room as far as it can be had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, final

import torch

from rekindle._types import Bytes
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.operators import Operator, Signature


class Used(NamedTuple):
    """What an allocator says of one call."""

    inside: Bytes  #: the most in use while it ran, beside what is there after it
    kept: Bytes  #: what is there after it beside what was there before


class Meter(Protocol):
    """Asks an allocator what was in use while an operator ran.

    in_single: numbers in half precision are computed with in single, as CPUs do, so that a copy of
        them may be larger.
    """

    in_single: bool

    def begin(self) -> Any:
        """It runs now. Returns what `end` is to be given; None: nobody can tell just now."""
        ...

    def end(self, begun: Any) -> Used:
        """It ran."""
        ...

    def suspects(self, operator: Operator) -> bool:
        """Whether one like it may take anything, as far as its name tells."""
        ...


@final
class OnDevice:
    """Bounds it by counts that the device's allocator keeps anyway, and that nobody has to reset.

    What was in use at any time is no more than what came back while the operator ran, which is
    exact if it used nothing twice; and no more than the peak of all times less what is there now.
    """

    in_single = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> Any:
        return accelerator.given_out(self._device)

    def end(self, begun: Any) -> Used:
        now = accelerator.given_out(self._device)
        inside = min(now.returned - begun.returned, now.peak - now.current)
        return Used(max(0, inside), now.current - begun.current)

    def suspects(self, operator: Operator) -> bool:
        return True


#: So many signatures of a kind tell what to expect of the next one.
_ENOUGH: Final = 4
#: Bytes. Less than that is a number that was made a tensor, or what the allocator rounds.
_NOTICED: Final = 1024
_PRODUCTS: Final = ("mm", "matmul")
_HALF: Final = (torch.float16, torch.bfloat16)


@final
@dataclass(slots=True)
class _Kind:
    """What is known of operators of one kind: all products have a workspace like each other's."""

    seen: int = 0  #: signatures of which a call was seen
    most: Bytes = 0
    copies: bool = False  #: one of them took about as much as it reads and makes


@final
class Workspaces:
    """Learns them, and guesses what a signature takes of which no call was seen."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._kinds: defaultdict[str, _Kind] = defaultdict(_Kind)

    def watch(self, signature: Signature, run: Callable[[], Any]) -> Any:
        """What `run`, a call of `signature`, returns; what it had in use is learned."""
        begun = self.meter.begin()
        try:
            result = run()
        finally:
            used = None if begun is None else self.meter.end(begun)
        if used is None:
            return result
        made = max(0, signature.needed)
        # What a library took for all its calls to come another of its operators may take anew, in
        # autograd's thread. That counts from now on as given out to no operator.
        once = max(0, used.kept - made)
        # Of what it read nobody else may have had some, which went before it ended.
        inside = used.inside - max(0, made - used.kept)
        inside = inside if inside >= _NOTICED else 0
        kind = self._kinds[_kind_of(signature.operator)]
        kind.seen += not signature.watched
        kind.most = max(kind.most, inside + once)
        kind.copies = kind.copies or 0 < _touched(signature) <= 2 * inside
        signature.took(inside)
        return result

    def guess(self, signature: Signature) -> Bytes:
        """What its first call may take: as much as any operator of its kind did, or a copy of what
        it reads and makes, if that is what operators of its kind do or not enough were seen."""
        if not self.meter.suspects(signature.operator):
            return 0
        kind = self._kinds[_kind_of(signature.operator)]
        if kind.copies or kind.seen < _ENOUGH:
            return max(kind.most, self._copy_of(signature))
        return kind.most

    def _copy_of(self, signature: Signature) -> Bytes:
        wider = self.meter.in_single and any(each.dtype in _HALF for each in signature.geometries())
        return _touched(signature) * (2 if wider else 1)


def _kind_of(operator: Operator) -> str:
    name = operator.name.rstrip("_")
    return "product" if name.endswith(_PRODUCTS) else name


def _touched(signature: Signature) -> Bytes:
    """Bytes of what it reads and makes."""
    reads = sum(each.size.numel() * each.dtype.itemsize for each in signature.geometries())
    return reads + max(0, signature.needed)
