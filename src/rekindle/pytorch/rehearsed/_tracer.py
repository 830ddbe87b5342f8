"""Record a trace of a program that runs on fake tensors, as a budget does for a real program.

The trace counts a value as held by the program until the fake storages of this value are freed. So
autograd must not hold fake tensors: the saved-tensor hook gives autograd a handle that knows only a
shape. When the backward pass unpacks the handle, the hook makes another fake tensor of that shape.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rekindle._types import Bytes, Nanoseconds, OpId, ValueId
from rekindle.pytorch.operators import (
    BackwardNode,
    Operator,
    may_take_over,
    operator,
    tensors_in,
    written_by,
)
from rekindle.pytorch.rehearsed._fakes import Fakes
from rekindle.pytorch.tensors import Geometry, geometry_of
from rekindle.trace import Trace, TraceBuilder, taking_over

Take = Callable[[Operator, tuple[Any, ...], dict[str, Any], Bytes], tuple[Nanoseconds, Bytes]]
"""Returns cost (ns) and workspace (bytes) of a call. Last argument: bytes of its new storages."""


@final
class _Saved:
    """The handle that autograd holds in place of a saved tensor. It knows only a shape."""

    def __init__(self, tracer: Tracer, value: ValueId, geometry: Geometry) -> None:
        self.value, self.geometry = value, geometry
        weakref.finalize(self, tracer.trace.release, value).atexit = False


@final
class Tracer(TorchDispatchMode):
    """Dispatch mode that records the operators that run on fake tensors of one device."""

    def __init__(
        self,
        fakes: Fakes,
        take: Take,
        node: Callable[[], BackwardNode | None],
    ) -> None:
        """Make a tracer that has recorded nothing yet.

        Args:
            fakes: Makes the fake tensors.
            take: Returns the cost and the workspace of an operator.
            node: Returns the autograd node that runs on this thread.
        """
        super().__init__()
        self._node = node
        self._fakes, self._take = fakes, take
        self.trace = TraceBuilder("rehearsal", held=True)
        self._values: dict[int, ValueId] = {}  # address of a storage -> the value in it
        # value -> number of live storages that hold this value
        self._alive: Counter[ValueId] = Counter()
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lost: set[ValueId] = set()  # values that cannot be recomputed
        # operator -> its first input, if the result may be written over this input
        self._in_place: dict[OpId, ValueId] = {}
        self._within = ExitStack()

    def __enter__(self) -> Tracer:
        self._within.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._within.close()

    def build(self) -> Trace:
        """Return the trace so far. In the trace, values that are alive now are never freed."""
        return taking_over(self.trace.build(), self._in_place)

    def meet(self, tensor: Tensor) -> ValueId | None:
        """Return the value of `tensor` in the trace; None if it has no memory on this device.

        If no recorded operator made `tensor`, the trace gets a source: a value that it cannot
        recompute.
        """
        if not self._is_here(tensor):
            return None
        home = tensor.untyped_storage()
        value = self._values.get(home._cdata)
        if value is None:
            value = self.trace.source(home.nbytes())
            self._lost.add(value)
            self._settle(home, value)
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = operator(func)
        if not facts.makes_or_writes:
            return func(*args, **kwargs)
        read = [self.meet(each) for each in tensors_in([*args, *kwargs.values()])]
        result = func(*args, **kwargs)
        written = self._overwritten_by(facts, args, kwargs)
        made = self._made_in(result)
        sizes = [home.nbytes() for home in made]
        cost, workspace = self._take(facts, args, kwargs, sum(sizes))
        runs_again = torch.is_grad_enabled() and not facts.opaque
        values = self.trace.call(
            facts.name,
            cost,
            [value for value in read if value is not None],
            [*(self.trace.bytes_of(value) for value in written.values()), *sizes],
            overwrites=list(enumerate(written.values())),
            replayable=runs_again,
            is_backward=not torch.is_grad_enabled(),
            workspace=workspace,
        )
        if not runs_again:
            self._lost.update(values)
        if read and read[0] is not None and may_take_over(func, args, result, self._node):
            self._in_place[OpId(self.trace.operators - 1)] = read[0]
        for (address, old), new in zip(written.items(), values[: len(written)], strict=True):
            self._move(address, old, new)
        for home, value in zip(made, values[len(written) :], strict=True):
            self._settle(home, value)
        return result

    def _overwritten_by(
        self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, ValueId]:
        """Return the recomputable values that the call overwrites, by address of their storage.

        A value that cannot be recomputed, such as a weight, counts as the same value after the
        write.
        """
        if not facts.writes:
            return {}
        addresses = (each.untyped_storage()._cdata for each in written_by(facts, args, kwargs))
        found = {each: self._values[each] for each in addresses if each in self._values}
        return {address: value for address, value in found.items() if value not in self._lost}

    def _made_in(self, result: Any) -> list[torch.UntypedStorage]:
        """Return the storages in `result` that the operator made, each once."""
        tensors = [each for each in tensors_in(result) if self._is_here(each)]
        homes = {home._cdata: home for home in (each.untyped_storage() for each in tensors)}
        return [home for address, home in homes.items() if address not in self._values]

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.device == self._fakes.device

    # -- storages and the values in them --------------------------------------------------------

    def _settle(self, home: torch.UntypedStorage, value: ValueId) -> None:
        address = home._cdata
        self._values[address] = value
        self._alive[value] += 1
        self._deaths[address] = weakref.ref(home, lambda _: self._freed(address))

    def _freed(self, address: int) -> None:
        del self._deaths[address]
        value = self._values.pop(address)
        self._alive[value] -= 1
        if not self._alive[value]:
            self.trace.drop(value)

    def _move(self, address: int, old: ValueId, new: ValueId) -> None:
        """Record that the storage at `address` holds the value `new` instead of `old`."""
        self._values[address] = new
        self._alive[new] += 1
        self._alive[old] -= 1
        # If another storage still has the old value, because the backward pass unpacked it, the
        # trace must make the old value resident again.
        if self._alive[old]:
            self.trace.use(old)

    # -- saved tensors --------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        value = None if tensor.is_leaf and tensor.requires_grad else self.meet(tensor)
        if value is None:
            return tensor
        self.trace.retain(value)
        return _Saved(self, value, geometry_of(tensor))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with _disable_current_modes(), self._fakes.mode:
            fake = torch.empty_strided(
                saved.geometry.size,
                saved.geometry.stride,
                dtype=saved.geometry.dtype,
                device=self._fakes.device,
            )
        self.trace.use(saved.value)
        self._settle(fake.untyped_storage(), saved.value)
        return fake
