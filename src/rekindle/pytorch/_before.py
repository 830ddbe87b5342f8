"""Puts everything back to where it was, so that a step can run again as if for the first time.

What is alive is found through the garbage collector, which knows every tensor, module and
optimizer that Python does: nobody has to list them. Memory is copied (to the CPU) just before an
operator writes it, so what a step only reads costs nothing. Beyond that go back: the gradients of
leaves, the attributes of modules, optimizers, schedulers and scalers with the dicts, lists and sets
in them, and random number generators. Not: other objects and globals of the program, iterators,
files.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rekindle.pytorch._fingerprint import whole
from rekindle.pytorch._signature import PLAIN_TENSORS

_WITH_ATTRIBUTES = (nn.Module, Optimizer, LRScheduler, GradScaler)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)

PutBack = Callable[[], Any]


@final
class Before:
    """The state of the program when this was made. `restore()` goes back to it, any number of
    times; in between, `about_to_write` and `about_to_draw` must hear of what happens."""

    def __init__(self) -> None:
        gc.collect()  # what is dead is not to be found
        alive = _alive((Tensor, *_WITH_ATTRIBUTES))
        tensors = [each for each in alive if isinstance(each, Tensor)]
        self.modules = [each for each in alive if isinstance(each, nn.Module)]
        self.optimizers = [each for each in alive if isinstance(each, Optimizer)]
        owners = [each for each in alive if isinstance(each, _WITH_ATTRIBUTES)]
        self.leaves = [(leaf, leaf.grad) for leaf in tensors if leaf.is_leaf and leaf.requires_grad]
        tensors += [grad for _, grad in self.leaves if grad is not None]
        #: Every storage by its identity. Kept, so that no other takes its place.
        self.homes = {home._cdata: home for home in _homes(tensors)}
        self.copies: dict[int, Tensor] = {}  #: of the storages that were written since
        seen: dict[int, PutBack] = {}
        self._attributes = [_put_back(vars(owner), seen) for owner in owners]
        self._generators = _generators()
        self._drawn: dict[int, tuple[torch.Generator, Tensor]] = {}

    def about_to_write(self, tensors: Iterable[Tensor]) -> None:
        """These are written next: what was there before all this is copied, once."""
        for home in _homes(tensors):
            key = home._cdata
            if key in self.homes and key not in self.copies:
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    self.copies[key] = whole(home).cpu().clone()

    def about_to_draw(self, generator: torch.Generator) -> None:
        """A generator of the program's own is used next."""
        if id(generator) not in self._drawn:
            self._drawn[id(generator)] = generator, generator.get_state()

    def restore(self) -> None:
        """Everything is as it was."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
            for key, copy in self.copies.items():
                home = self.homes[key]
                if home.nbytes() != copy.numel():
                    home.resize_(copy.numel())
                whole(home).copy_(copy)
            for leaf, grad in self.leaves:
                leaf.grad = grad
            for put_back in self._attributes:
                put_back()
        for generator, state in self._drawn.values():
            generator.set_state(state)
        for put_back in self._generators:
            put_back()


def _alive(kinds: tuple[type, ...]) -> list[Any]:
    """All objects of these kinds that Python knows. It asks types: `isinstance` would run code of
    objects that pretend to be others."""
    wanted: dict[type, bool] = {}
    found: list[Any] = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in wanted:
            wanted[kind] = issubclass(kind, kinds)
        if wanted[kind]:
            found.append(each)
    return found


def _homes(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return [
        tensor.untyped_storage()
        for tensor in tensors
        if type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
    ]


def _put_back(value: Any, seen: dict[int, PutBack]) -> PutBack:
    """Returns what gives `value` its content of now again, and that of the containers in it.

    The same objects are filled again: hooks' handles and C++ refer to them.
    """
    if type(value) not in _CONTAINERS:
        return lambda: value
    if id(value) in seen:
        return seen[id(value)]
    pending = True

    def refill() -> Any:
        nonlocal pending
        if pending:  # a container that holds itself is filled once
            pending = False
            content = [(key, item()) for key, item in items]
            value.clear()
            if isinstance(value, dict):
                value.update(content)
            elif isinstance(value, set):
                value.update(item for _, item in content)
            else:
                value.extend(item for _, item in content)
            pending = True
        return value

    seen[id(value)] = refill
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    items = [(key, _put_back(item, seen)) for key, item in pairs]
    return refill


def _generators() -> list[PutBack]:
    """What sets the generators of torch, Python and numpy to where they are now."""
    found: list[PutBack] = []

    def remember(get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        state = get()
        found.append(lambda: put(state))

    remember(torch.get_rng_state, torch.set_rng_state)
    remember(random.getstate, random.setstate)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        remember(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        remember(numpy_random.get_state, numpy_random.set_state)
    return found
