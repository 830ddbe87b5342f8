"""Tell the cost and the workspace of operators that run on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.operators import (
    Invocation,
    Operator,
    Signature,
    is_roomy_on_host,
    signature_of,
    tensors_in,
)

Sizes = tuple[tuple[int, ...], ...]
Measured = Iterable[tuple[str, Sizes, Nanoseconds, Bytes]]
"""Operators that ran: name, sizes of the tensors, cost (ns), workspace (bytes)."""

_HALF: Final = (torch.float16, torch.bfloat16)


@final
class Costs:
    """The costs and workspaces that operators have on one device."""

    def __init__(self, measured: Measured, device: torch.device) -> None:
        self._device = device
        self._place = (device, True) if is_accelerator(device) else None
        self._known: dict[tuple[str, Sizes], tuple[Nanoseconds, Bytes]] = {}
        for name, sizes, cost, workspace in measured:
            before = self._known.get((name, sizes), (0, 0))
            self._known[name, sizes] = max(before[0], cost), max(before[1], workspace)

    def of(
        self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], made: Bytes
    ) -> tuple[Nanoseconds, Bytes]:
        """Return cost (ns) and workspace (bytes) of an operator call.

        Both were measured if an operator of this name ran before on tensors of these sizes.
        Otherwise they are estimated from the bytes of the tensors.

        Args:
            facts: The operator that is called.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.
            made: Bytes of the storages that the call makes.
        """
        tensors = tensors_in([*args, *kwargs.values()])
        found = self._known.get((facts.name, tuple(tuple(each.size()) for each in tensors)))
        if found is not None:
            return found
        with _disable_current_modes():
            shapes, named = tree_map_only(Tensor, _shape_of, (args, kwargs))
        signature = signature_of(facts, Invocation(facts, shapes, named).key, self._place)
        return 1_000 + made // 10, _guessed_workspace(signature, self._device)


def _shape_of(fake: Tensor) -> Tensor:
    """Return a meta tensor with shape, strides and dtype of `fake`, to look up a signature."""
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")


def _guessed_workspace(signature: Signature, device: torch.device) -> Bytes:
    """Estimate the workspace of an operator that never ran, from the bytes of its tensors.

    The estimate is the bytes of all inputs and results. On a CPU it is 0 for operators known to
    need no workspace. It is doubled for half precision, which CPUs compute in single precision. For
    the backward of an LSTM layer it is halved. The function `one_copy` in native/ops/workspaces.cpp
    computes the same and gives the reasons.
    """
    on_host = not is_accelerator(device)
    if on_host and not is_roomy_on_host(signature.operator.name):
        return 0
    reads = sum(each.size.numel() * each.dtype.itemsize for each in signature.geometries())
    wider = on_host and any(each.dtype in _HALF for each in signature.geometries())
    copy = (reads + max(0, signature.needed)) * (2 if wider else 1)
    return copy // 2 if signature.operator.name == "aten::mkldnn_rnn_layer_backward" else copy
