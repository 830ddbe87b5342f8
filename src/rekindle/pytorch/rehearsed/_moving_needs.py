"""Find the smallest budget of a step whose weights, gradients and state may move to the host.

With `evict="anything"` and `swap=`, every tensor may leave the memory, except those that stay. So
an operator needs room for its operands, its results, its workspace, and for what stays. The rules
are those of the runtime:

- Values that autograd unpacked stay while their backward node runs (`HeldEviction`).
- Small tensors stay, and those whose elements may be read as numbers (`HeldEviction`).
- An operator on lists of tensors runs over parts of the lists (native/dispatch/several_calls.cpp).
- A step of an optimizer makes room for all that its largest parameter needs (`optimizers/`).
"""

from __future__ import annotations

import weakref
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle._types import Bytes
from rekindle.pytorch.operators import (
    ROUTING,
    BackwardNode,
    Operator,
    may_take_over,
    operator,
    tensors_in,
)
from rekindle.pytorch.rehearsed._tracer import Take
from rekindle.pytorch.tensors import Meter

#: Tensors of fewer bytes stay in memory, as in native/memory/held/held_eviction.cpp.
LEAST_MOVED: Final[Bytes] = 4 << 10

#: Factor on the bytes that are needed at once. The runtime may keep a few more small tensors.
_SPARE: Final = 1.05

#: How the names of operators begin that work on each tensor of their lists alone.
ON_LISTS: Final = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


@final
class MovingNeeds(TorchDispatchMode):
    """Dispatch mode that finds the most bytes that must be in memory at once, on fake tensors."""

    def __init__(self, take: Take) -> None:
        """Make a mode that has seen no operator.

        Args:
            take: Returns the cost and the workspace of an operator.
        """
        super().__init__()
        self._take = take
        self._most: Bytes = 0
        # The storages that are alive and were seen, by address.
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._staying: dict[int, Bytes] = {}  # the bytes of those that stay
        self._node: Any = None  # the backward node that runs
        self._unpacked: list[Tensor] = []  # values that autograd unpacked for this node
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> MovingNeeds:
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)
        self._node, self._unpacked = None, []

    @property
    def budget(self) -> Bytes:
        """The smallest budget (bytes) that suffices for what ran so far."""
        return int(_SPARE * self._most)

    def meet(self, tensor: Tensor) -> None:
        """Note a tensor that no operator made inside this mode."""
        self._note(tensor, stays=_is_small(tensor) or _holds_integers(tensor))

    def stepped(self, optimizer: Optimizer) -> None:
        """Count the step of `optimizer`, which has just run, and still has all gradients."""
        if type(optimizer).__module__.startswith("torch.optim."):
            self._most = max(self._most, sum(self._staying.values()) + _largest_need(optimizer))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = operator(func)
        if not facts.makes_or_writes:
            return func(*args, **kwargs)
        read = tensors_in([*args, *kwargs.values()])
        for tensor in read:
            self.meet(tensor)
        result = func(*args, **kwargs)
        made = tensors_in(result)
        sizes = [each.untyped_storage().nbytes() for each in made if self._is_new(each)]
        # A value with a recipe is recomputed, so that it need not stay.
        has_recipe = torch.is_grad_enabled() and not facts.opaque
        for tensor in made:
            is_number = _holds_integers(tensor) and (not has_recipe or facts.name in ROUTING)
            self._note(tensor, stays=is_number or (not has_recipe and _is_small(tensor)))
        _, workspace = self._take(facts, args, kwargs, sum(sizes))
        if may_take_over(func, args, result, _node_that_runs):
            made = []  # the result is written over the first argument
        for part in _parts_of(facts, args, kwargs, made):
            self._needs(part, workspace)
        return result

    def _needs(self, tensors: list[Tensor], workspace: Bytes) -> None:
        """Count what must be in memory while an operator works on `tensors`."""
        self._look_at_node()
        homes = dict(self._staying)
        for tensor in (*tensors, *self._unpacked):
            if _has_memory(tensor):
                homes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        self._most = max(self._most, sum(homes.values()) + workspace)

    def _is_new(self, tensor: Tensor) -> bool:
        return _has_memory(tensor) and tensor.untyped_storage()._cdata not in self._known

    def _note(self, tensor: Tensor, *, stays: bool) -> None:
        """Note the storage of `tensor`, if it is new. stays: it cannot leave the memory."""
        if self._is_new(tensor):
            home = tensor.untyped_storage()
            address = home._cdata
            self._known[address] = weakref.ref(home, lambda _: self._freed(address))
            if stays:
                self._staying[address] = home.nbytes()

    def _freed(self, address: int) -> None:
        del self._known[address]
        self._staying.pop(address, None)

    @staticmethod
    def _pack(tensor: Tensor) -> Tensor:
        # A node that saved its own output would refer to itself, and never be freed.
        return tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()

    def _unpack(self, tensor: Tensor) -> Tensor:
        self._look_at_node()
        self._unpacked.append(tensor)
        return tensor

    def _look_at_node(self) -> None:
        """Forget what an earlier backward node unpacked, if another one runs now."""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is not self._node:
            self._node, self._unpacked = node, []


def _parts_of(
    facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]
) -> list[list[Tensor]]:
    """Return the operands and results of a call; for an operator on lists, those of each item."""
    given = (*args, *kwargs.values(), made)
    if not (facts.name.startswith(ON_LISTS) and args and isinstance(args[0], list)):
        return [tensors_in(list(given))]
    lists = [each for each in given if isinstance(each, list) and len(each) == len(args[0])]
    return [tensors_in(list(item)) for item in zip(*lists, strict=True)]


def _largest_need(optimizer: Optimizer) -> Bytes:
    """Return the most bytes that a step has in use for the parameter with the most elements.

    The function makes such a step, of this parameter alone.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if not parameters:
        return 0
    largest = max(parameters, key=Tensor.numel)
    others = [(each, each.grad) for each in parameters if each is not largest]
    with Meter() as meter:
        meter.count([largest, largest.grad, *optimizer.state.get(largest, {}).values()])
        for parameter, _ in others:
            parameter.grad = None
        optimizer.step()
    for parameter, gradient in others:
        parameter.grad = gradient
    return meter.peak


def _node_that_runs() -> BackwardNode | None:
    """Return the autograd node that runs on this thread."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None:
        return None
    needs = [each is not None for each, _ in node.next_functions]
    only_first = needs[:1] == [True] and not any(needs[1:])
    return BackwardNode(node.name(), node._sequence_nr(), only_first, None)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def _is_small(tensor: Tensor) -> bool:
    return _has_memory(tensor) and tensor.untyped_storage().nbytes() < LEAST_MOVED


def _holds_integers(tensor: Tensor) -> bool:
    """Return True if composite functions may read elements of `tensor`, as lengths or indices."""
    return tensor.dtype in (torch.int32, torch.int64)
