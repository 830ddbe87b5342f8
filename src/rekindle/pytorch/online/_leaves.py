"""Return saved leaf tensors from `ctx.saved_tensors` as the objects that were saved.

A custom `autograd.Function` may use attributes of a saved parameter: Megatron's fused accumulation
adds to `weight.main_grad` in `backward`. Under saved-tensor hooks, PyTorch makes a new tensor from
the unpacked one, without these attributes. The new tensor shares the gradient accumulator of the
saved leaf, and the accumulator refers to the leaf. So this file finds the leaf.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from rekindle.pytorch.tensors import geometry_of, privately

_C: Any = torch._C
_saved: Any = BackwardCFunction.saved_tensors  # type: ignore[attr-defined]

#: Guard that hides the calls of this file from function modes and tensor subclasses, because calls
#: of autograd are hidden from them too.
unwatched: Any = _C.DisableTorchFunction


@final
class Leaves:
    """A replacement of `ctx.saved_tensors`, active while at least one budget needs it."""

    def __init__(self) -> None:
        # It is reentrant because Python may report destroyed budgets in the middle of `activate`.
        self._lock = threading.RLock()
        self._owners = 0  # budgets that exist, or whose graphs do

    def activate(self) -> None:
        """Activate the replacement of `ctx.saved_tensors` for a budget that was just made."""
        with self._lock:
            self._owners += 1
            BackwardCFunction.saved_tensors = property(_with_leaves)  # type: ignore[attr-defined]

    def deactivate(self, alive: Callable[[], int]) -> None:
        """Restore PyTorch's original `ctx.saved_tensors` if no budget needs the replacement.

        Args:
            alive: Returns the number of budgets that exist, or whose graphs do.
        """
        with self._lock:
            before, self._owners = self._owners, alive()
            if before and not self._owners:
                del BackwardCFunction.saved_tensors  # type: ignore[attr-defined]


leaves = Leaves()


def _with_leaves(context: Any) -> tuple[Any, ...]:
    """Return the saved tensors of `context`, with each leaf as the object that was saved."""
    found = _saved.__get__(context)
    if any(each is not None and each.requires_grad and each.is_leaf for each in found):
        return tuple([each if each is None else _leaf(each) for each in found])
    return found


def _leaf(tensor: Tensor) -> Tensor:
    """Return the saved leaf if `tensor` is a copy of it made by autograd, else `tensor`."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return tensor
    # a tensor of a `torch.func` transform has no storage
    if _C._functorch.is_functorch_wrapped_tensor(tensor):
        return tensor
    with unwatched(), privately(), torch.enable_grad():
        graph: Any = tensor.view_as(tensor).grad_fn
    accumulator = graph.next_functions[0][0]
    # For a view made under no_grad there is no accumulator: autograd computes no gradient for it.
    if accumulator is None:
        return tensor
    leaf = accumulator.variable
    same = leaf.untyped_storage()._cdata == tensor.untyped_storage()._cdata and geometry_of(
        leaf
    ) is geometry_of(tensor)
    return leaf if same else tensor
