"""Runs steps of training and leaves the program as it was: nothing that they learn stays.

A dispatch mode copies what an operator is about to write if it was there before, the first time
only; so a step costs the memory of what it changes, not of all there is.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch._auto import living_objects, living_tensors
from rekindle.pytorch._operators import operator
from rekindle.pytorch._signature import written_by


@final
class Undo(TorchDispatchMode):
    """While it is entered operators run as ever; `restore()` then puts everything back.

    Back come: the content of every tensor (parameters, buffers, running statistics, optimizer
    state), `.grad`, optimizers' state and settings, random generators of torch and of `random`. Not
    what the program keeps elsewhere: an iterator over batches has moved on.
    """

    def __init__(self) -> None:
        super().__init__()
        tensors = living_tensors()
        homes = [tensor.untyped_storage() for tensor in tensors]
        self._before = {home._cdata: weakref.ref(home) for home in homes}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        leaves = [t for t in tensors if t.is_leaf and t.requires_grad]
        self._gradients = [(weakref.ref(leaf), leaf.grad) for leaf in leaves]
        self._before |= {
            grad.untyped_storage()._cdata: weakref.ref(grad.untyped_storage())
            for _, grad in self._gradients
            if grad is not None and grad.layout is torch.strided
        }
        self._optimizers = [_Settings(thing) for thing in living_objects(Optimizer)]
        self._random = random.getstate()
        self._generators = [(generator, generator.get_state()) for generator in _generators()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = operator(func)
        if facts.writes:
            for target in written_by(facts, args, kwargs):
                self._save(target)
        return func(*args, **kwargs)

    def _save(self, target: Tensor) -> None:
        if target.layout is not torch.strided:
            return
        home = target.untyped_storage()
        before = self._before.get(home._cdata)
        if before is not None and before() is home and home._cdata not in self._copies:
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                self._copies[home._cdata] = (home, home.clone())

    def restore(self) -> None:
        """Everything is as it was when this was made."""
        for home, copy in self._copies.values():
            if home.nbytes() != copy.nbytes():
                home.resize_(copy.nbytes())
            home.copy_(copy)
        for reference, grad in self._gradients:
            leaf = reference()
            if leaf is not None and leaf.grad is not grad:
                leaf.grad = grad
        for settings in self._optimizers:
            settings.restore()
        for generator, state in self._generators:
            generator.set_state(state)
        random.setstate(self._random)


@final
class _Settings:
    """An optimizer's state and options; the tensors in it are copied when they are written."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {key: _shallow(value) for key, value in optimizer.state.items()}
        self._groups = [_options(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.update(options)


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _generators() -> Iterator[torch.Generator]:
    """The default ones of all devices in use."""
    yield torch.default_generator
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield from torch.cuda.default_generators
