"""Restore the state of a program, so that a step can run again as if for the first time.

`Before` finds live tensors, modules and optimizers through the garbage collector, so callers do
not list them. It copies a storage to the CPU just before an operator first writes that storage, so
memory that a step only reads is not copied. `Before` also restores gradients of leaves, what
`tensor.data` was before an assignment, random number generators, and the attributes of modules,
optimizers, schedulers and scalers, with the dicts, lists and sets in these attributes. It does not
restore other objects and globals of the program, iterators, or files. `Undo` is the dispatch mode
in which a step runs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch.held import present
from rekindle.pytorch.native import core
from rekindle.pytorch.online import PutBack, keep_generators, put_back
from rekindle.pytorch.operators import operator, written_by
from rekindle.pytorch.tensors import homes_of, living_objects, privately, tensors_of, whole

_LAZY = (LazyModuleMixin, UninitializedParameter, UninitializedBuffer)
_WITH_ATTRIBUTES = (nn.Module, Optimizer, LRScheduler, GradScaler)


@final
class Before:
    """The state of the program when this object was made.

    `restore()` sets that state again, any number of times. The caller must call `about_to_run`
    before every operator of the program.

    Attributes:
        modules: The `nn.Module`s that were alive.
        optimizers: The optimizers that were alive.
        copies: All bytes of each storage that an operator has written since, and a copy of its old
            contents, by address. (Python code that refers to a storage would pin it in a budget.)
    """

    def __init__(self) -> None:
        gc.collect()  # Free unreachable objects first, so that they are not found as live ones.
        alive = living_objects(Tensor, *_WITH_ATTRIBUTES)
        tensors = [each for each in alive if isinstance(each, Tensor)]
        self.modules = [each for each in alive if isinstance(each, nn.Module)]
        self.optimizers = [each for each in alive if isinstance(each, Optimizer)]
        leaves = [each for each in tensors if each.is_leaf and each.requires_grad]
        self._gradients = [(weakref.ref(leaf), leaf.grad) for leaf in leaves]
        tensors += [grad for _, grad in self._gradients if grad is not None]
        #: References to the storages that existed, by address. They are weak, so that the step can
        #: free these storages.
        self._homes = {home._cdata: weakref.ref(home) for home in homes_of(tensors)}
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        seen: dict[int, PutBack] = {}
        self._put_back = [
            *(
                put_back(vars(owner), seen)
                for owner in alive
                if isinstance(owner, _WITH_ATTRIBUTES)
            ),
            *(_materialized_no_more(each) for each in alive if isinstance(each, _LAZY)),
            *keep_generators(),
        ]
        self._drawn: dict[int, tuple[torch.Generator, Tensor]] = {}
        # The tensors whose `data` the program has assigned since, by id, each with a tensor that
        # has the memory of before.
        self._replaced: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        _alive.add(self)
        if (native := core()) is not None:
            native.watch_set_data(_about_to_set_data)

    @property
    def leaves(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the leaves that are still alive, with the gradients that they had."""
        for reference, grad in self._gradients:
            leaf = reference()
            if leaf is not None:
                yield leaf, grad

    def about_to_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save the storages and generator states that the next operator will overwrite."""
        facts = operator(func)
        if facts.writes:
            for tensor in written_by(facts, args, kwargs):
                self._about_to_write(tensor)
        if facts.random:
            for value in (*args, *kwargs.values()):
                if type(value) is torch.Generator and id(value) not in self._drawn:
                    self._drawn[id(value)] = value, value.get_state()

    def about_to_set_data(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor`, because the program assigns `tensor.data`."""
        known = self._replaced.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return
        for home in homes_of([tensor]):
            existed = self._homes.get(home._cdata)
            if existed is not None and existed() is home:
                self._replaced[id(tensor)] = weakref.ref(tensor), tensor.data

    def save_state(self) -> None:
        """Save all that steps of the program usually write, so that they may run unseen.

        These are parameters, buffers, gradients, optimizer state, and what was written so far.
        """
        for module in self.modules:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._about_to_write(tensor)
        for leaf, grad in self.leaves:
            for tensor in (leaf, grad):
                if tensor is not None:
                    self._about_to_write(tensor)
        for optimizer in self.optimizers:
            for tensor in tensors_of(list(optimizer.state.values())):
                self._about_to_write(tensor)

    def _about_to_write(self, tensor: Tensor) -> None:
        for home in homes_of([tensor]):
            known = self._homes.get(home._cdata)
            if known is not None and known() is home and home._cdata not in self.copies:
                with present([tensor]), privately():
                    everything = whole(home)
                    self.copies[home._cdata] = everything, everything.cpu().clone()

    def restore(self) -> None:
        """Set the program to the state that it had when this object was made."""
        with privately(), torch.no_grad():
            for everything, copy in self.copies.values():
                home = everything.untyped_storage()
                if home.nbytes() != copy.numel():
                    home.resize_(copy.numel())
                whole(home).copy_(copy)
            for reference, data in self._replaced.values():
                tensor = reference()
                if tensor is not None:
                    tensor.data = data
            for leaf, grad in self.leaves:
                leaf.grad = grad
            for put_back in self._put_back:
                put_back()
        for generator, state in self._drawn.values():
            generator.set_state(state)


_alive: weakref.WeakSet[Before] = weakref.WeakSet()


def _about_to_set_data(tensor: Tensor) -> None:
    for before in [*_alive]:
        before.about_to_set_data(tensor)


def _materialized_no_more(lazy: Any) -> PutBack:
    """Return a function that makes a lazy parameter, buffer or module uninitialized again.

    The step that is undone initialized it at its first call.
    """
    kind = type(lazy)
    if not isinstance(lazy, Tensor):
        return lambda: setattr(lazy, "__class__", kind)
    nothing = lazy.data

    def put_back() -> None:
        if type(lazy) is not kind:
            lazy.data = nothing
            lazy.__class__ = kind

    return put_back


class Onlooker(TorchDispatchMode):
    """A dispatch mode that sees every operator, and lets `torch.compile` compile as without it."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@final
class Undo(Onlooker):
    """While entered, save storages before operators overwrite them; `restore()` writes them back.

    See `Before` for the state that it restores.
    """

    def __init__(self, before: Before | None = None) -> None:
        super().__init__()
        self._before = before or Before()
        self.restore = self._before.restore
        self.save_state = self._before.save_state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "_schema"):
            self._before.about_to_run(func, args, kwargs)
        return func(*args, **kwargs)
