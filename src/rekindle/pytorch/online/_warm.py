"""Track the optimizers of this process that have state, because the state counts toward a budget.

If the program enters a budget for each step, operators read the state only in `step()`, after all
activations were made and freed. So the state must be counted earlier: with the first parameter that
an operator reads, the runtime counts the state of the optimizer which owns that parameter.
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

from rekindle.pytorch.online._handed_out import not_traced
from rekindle.pytorch.tensors import homes_of, living_objects, tensors_of

#: Optimizers that may have state: those that existed before the first budget (when this Python
#: module is imported), and those that have made a step or loaded a state since.
_warm: WeakSet[torch.optim.Optimizer] = WeakSet(living_objects(torch.optim.Optimizer))


@not_traced
def _remember(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add `optimizer`, which made a step, to the optimizers that have state."""
    _warm.add(optimizer)


hooks.register_optimizer_step_post_hook(_remember)

_optimizers: Any = torch.optim.Optimizer
_load = _optimizers.load_state_dict


@functools.wraps(_load)
def _load_and_remember(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """Call the original `load_state_dict`, and add `optimizer` to those that have state."""
    _load(optimizer, *args, **kwargs)
    _warm.add(optimizer)


# PyTorch has no hook that covers `load_state_dict` of all optimizers, so replace the method.
_optimizers.load_state_dict = _load_and_remember


@final
class WarmOptimizers:
    """The optimizers that had state when the first parameters were seen, by their parameters."""

    def __init__(self) -> None:
        #: The optimizer of each parameter, by the address of the parameter's storage. Filled on
        #: first use, because that takes a microsecond for each parameter of the process.
        self._of_storage: dict[int, weakref.ref[torch.optim.Optimizer]] | None = None

    def owner_of(self, storage: int) -> torch.optim.Optimizer | None:
        """Return the optimizer of a parameter, or None.

        Args:
            storage: The address of the parameter's `StorageImpl`.
        """
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


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Iterate over the strided tensors of the optimizer's state."""
    for tensor in tensors_of(list(optimizer.state.values())):
        if tensor.layout is torch.strided:
            yield tensor
