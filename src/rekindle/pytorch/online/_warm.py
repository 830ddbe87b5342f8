"""Optimizers that made a step in this process, or were given a state: it counts.

Where a budget is entered anew for each step, no operator shows the state before `step()` does, when
activations have come and gone. Who owns a parameter that is seen has its state in memory as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet, WeakValueDictionary

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


def warm_optimizers() -> WeakValueDictionary[int, Any]:
    """Those that have a state, by the addresses of the storages of their parameters."""
    found: WeakValueDictionary[int, Any] = WeakValueDictionary()
    for optimizer in list(_warm):
        if optimizer.state:
            for group in optimizer.param_groups:
                for home in homes_of(group["params"]):
                    found[home._cdata] = optimizer
    return found


def state_of(optimizer: Any) -> Iterator[Tensor]:
    """The tensors of its state that have memory of their own."""
    for tensor in tensors_of(list(optimizer.state.values())):
        if tensor.layout is torch.strided:
            yield tensor
