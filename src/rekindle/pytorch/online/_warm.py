"""Optimizers that made a step in this process, or were given a state: it counts.

Where a budget is entered anew for each step, no operator shows the state before `step()` does, when
activations have come and gone. Who owns a parameter that is seen has its state in memory as well.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, final
from weakref import WeakSet

import torch
import torch.optim.optimizer as hooks
from torch import Tensor

from rekindle.pytorch.tensors import homes_of, living_objects, tensors_of

#: Some made their steps before anybody looked, for this is imported with the first budget.
_warm: WeakSet[Any] = WeakSet(living_objects(torch.optim.Optimizer))


def _remember(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _warm.add(optimizer)


hooks.register_optimizer_step_post_hook(_remember)

_optimizers: Any = torch.optim.Optimizer
_load = _optimizers.load_state_dict


@functools.wraps(_load)
def _load_and_remember(optimizer: Any, *args: Any, **kwargs: Any) -> None:
    _load(optimizer, *args, **kwargs)
    _warm.add(optimizer)


_optimizers.load_state_dict = _load_and_remember  # there is no hook for all of them


@final
class WarmOptimizers:
    """Those that have a state when the first parameters are met, by their parameters."""

    def __init__(self) -> None:
        #: By the address of a parameter's storage. It takes a microsecond for each parameter of the
        #: process: a context in which nothing runs does without.
        self._of_storage: dict[int, weakref.ref[Any]] | None = None

    def owner_of(self, storage: int) -> Any | None:
        """Find the optimizer of the parameter whose storage is at this address."""
        if self._of_storage is None:
            self._of_storage = {}
            for optimizer in list(_warm):
                if optimizer.state:
                    reference = weakref.ref(optimizer)
                    for group in optimizer.param_groups:
                        for home in homes_of(group["params"]):
                            self._of_storage[home._cdata] = reference
        found = self._of_storage.get(storage)
        return None if found is None else found()


def state_of(optimizer: Any) -> Iterator[Tensor]:
    """The tensors of its state that have memory of their own."""
    for tensor in tensors_of(list(optimizer.state.values())):
        if tensor.layout is torch.strided:
            yield tensor
