"""Leaves come back from `ctx.saved_tensors` as the very objects that were saved.

A custom `autograd.Function` may ask a saved parameter for more than its values: Megatron's fused
accumulation adds to `weight.main_grad` in `backward`. Under saved-tensor hooks PyTorch makes a new
tensor of what they unpack, without attributes. But it has the accumulator of gradients of the leaf
that was saved, and that knows the leaf.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from rekindle.pytorch.tensors import geometry_of, privately

_C: Any = torch._C
_saved: Any = BackwardCFunction.saved_tensors  # type: ignore[attr-defined]

#: Inside, neither function modes nor subclasses of tensors hear of what is called. Of an operator
#: they heard when the program called it, and of what autograd calls they hear nothing.
unwatched: Any = _C.DisableTorchFunction


@final
class Leaves:
    """While anybody wants it, leaves come back as themselves."""

    def __init__(self) -> None:
        self._owners = 0

    def come_back(self) -> None:
        """One more wants it."""
        self._owners += 1
        BackwardCFunction.saved_tensors = property(_with_leaves)  # type: ignore[attr-defined]

    def stay_away(self) -> None:
        """One wants it no more."""
        self._owners -= 1
        if not self._owners:
            del BackwardCFunction.saved_tensors  # type: ignore[attr-defined]


leaves = Leaves()


def _with_leaves(context: Any) -> tuple[Any, ...]:
    found = _saved.__get__(context)
    if any(each is not None and each.requires_grad and each.is_leaf for each in found):
        return tuple([each if each is None else _leaf(each) for each in found])
    return found


def _leaf(tensor: Tensor) -> Tensor:
    """The leaf that was saved and is unpacked as `tensor`; or that, if hooks made it another."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return tensor
    with unwatched(), privately(), torch.enable_grad():
        graph: Any = tensor.view_as(tensor).grad_fn
    accumulator = graph.next_functions[0][0]
    if accumulator is None:  # a view that was made without grad: nobody accumulates for it
        return tensor
    leaf = accumulator.variable
    same = leaf.untyped_storage()._cdata == tensor.untyped_storage()._cdata and geometry_of(
        leaf
    ) is geometry_of(tensor)
    return leaf if same else tensor
