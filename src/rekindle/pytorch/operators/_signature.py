"""Signatures of operator calls, shared by calls that differ only in tensor contents.

A signature holds the arguments, with a `Geometry` (shape, strides, offset, dtype) in place of each
tensor. They suffice to predict the sizes of the results before the operator runs. Arguments that
change from call to call (floats, generators) are not part of the signature: they are called
`extras`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rekindle._types import Bytes
from rekindle.pytorch.devices import rounded
from rekindle.pytorch.operators._operators import Operator
from rekindle.pytorch.tensors import (
    COMPLEX,
    MOST_KEPT,
    Geometry,
    geometries,
    geometry_of,
    new_geometry,
    parts_of,
    requiring_grad,
)

_CPU = torch.device("cpu")
PLAIN_TENSORS = (Tensor, Parameter)
STRIDED = torch.strided


@final
class _Mark:
    """A unique object that stands for an argument in the key of a signature."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


EXTRA = _Mark("extra")
# Marks for True and False: True == 1 in Python, but operators distinguish True from 1.
TRUE, FALSE = _Mark("true"), _Mark("false")
_HASHABLE = (
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@final
class Invocation:
    """One operator call: its tensors, its other varying arguments, and its signature's key."""

    __slots__ = ("extras", "key", "opaque", "operator", "tensors")

    def __init__(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operator = operator
        self.tensors: list[Tensor] = []  #: tensors among the arguments of the call, in order
        #: arguments that are not part of the signature's key: floats, generators
        self.extras: list[Any] = []
        self.opaque = False  #: True if an argument is a tensor without a geometry (sparse, nested)
        parts: list[Any] = [operator, len(args)]
        self._take(args, parts)
        for name, arg in kwargs.items():
            parts.append(name)
            self._take((arg,), parts)
        if self.extras:
            if self.opaque:
                parts[1] = (len(args), *map(_size_of_opaque, self.extras))
            # Without a tensor argument, as in arange(0.0, 1.0, 0.1), floats determine the size of
            # the result.
            elif not self.tensors:
                parts[1] = (len(args), *(extra for extra in self.extras if type(extra) is float))
        self.key = tuple(parts)

    def _take(self, args: Sequence[Any], parts: list[Any]) -> None:
        """Append the representation of each of `args` to `parts`, the key that is being made."""
        find = geometries.get
        sees_requires_grad = self.operator.sees_requires_grad
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                if arg.layout is not STRIDED:
                    self._take_opaque(arg, parts)
                    continue
                # The same as `geometry_of`, but inlined, because tensors are the most frequent
                # arguments.
                try:
                    key = (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype)
                except RuntimeError:  # a nested tensor has memory but no shape
                    self.tensors.append(arg)
                    self._take_opaque(arg, parts)
                    continue
                self.tensors.append(arg)
                if key[3] in COMPLEX or arg.is_neg():
                    geometry = geometry_of(arg)
                else:
                    geometry = find(key) or new_geometry(key)
                if sees_requires_grad and arg.requires_grad:
                    geometry = requiring_grad(geometry) if torch.is_grad_enabled() else geometry
                parts.append(geometry)
            elif kind is int or arg is None:
                parts.append(arg)
            elif kind is bool:
                parts.append(TRUE if arg else FALSE)
            elif kind is list or kind is tuple or kind is torch.Size:
                items: list[Any] = []
                self._take(arg, items)
                parts.append(tuple(items))
            elif kind in _HASHABLE or (kind is float and self.operator.scaled):
                parts.append(arg)
            elif is_plain(kind) and arg.layout is STRIDED:
                self.tensors.append(arg)
                geometry = geometry_of(arg)
                if sees_requires_grad and arg.requires_grad and torch.is_grad_enabled():
                    geometry = requiring_grad(geometry)
                parts.append(geometry)
            elif isinstance(arg, Tensor):
                self._take_opaque(arg, parts)
            else:
                self.extras.append(arg)
                parts.append(EXTRA)

    def _take_opaque(self, arg: Tensor, parts: list[Any]) -> None:
        """Add an argument that is a tensor without plain memory (sparse, nested, subclass)."""
        self.opaque = True
        self.tensors += parts_of(arg)
        self.extras.append(arg)
        parts.append(EXTRA)


@final
class Signature:
    """The arguments that similar operator calls share, and the bytes that such a call allocates."""

    __slots__ = ("_device", "key", "needed", "operator")

    def __init__(
        self, operator: Operator, key: tuple[Any, ...], device: torch.device = _CPU
    ) -> None:
        self.operator = operator
        self.key = key
        # `rounded` needs the device, because each device's allocator rounds sizes differently.
        self._device = device
        #: Total bytes of the storages that an operator call makes, or an upper bound. Negative:
        #: unknown.
        self.needed: Bytes = -1

    def predict(self, extras: Sequence[Any]) -> Bytes:
        """Predict the bytes that a call allocates for its results, by the operator's meta kernel.

        Args:
            extras: The extras of the call.
        """
        if self.needed < 0:
            self.needed = self._predicted_bytes(extras)
        return self.needed

    def rounded(self, nbytes: Bytes) -> Bytes:
        """Return `nbytes` rounded up to the bytes that the device's allocator uses."""
        return rounded(nbytes, self._device)

    def arguments(
        self, tensors: Iterator[Tensor | None], extras: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Rebuild the arguments of one operator call from this signature.

        Args:
            tensors: The tensor arguments, in order. None is passed on as None.
            extras: The extras of the call.

        Returns:
            The positional and the keyword arguments.
        """
        rest = iter(extras)
        count: int = self.key[1] if type(self.key[1]) is int else self.key[1][0]
        args = [_put_back(part, tensors, rest) for part in self.key[2 : 2 + count]]
        named = self.key[2 + count :]
        kwargs = {named[i]: _put_back(named[i + 1], tensors, rest) for i in range(0, len(named), 2)}
        return args, kwargs

    def geometries(self) -> Iterator[Geometry]:
        """Iterate over the geometries (shape, strides, offset, dtype) of the tensor arguments."""
        return _geometries_in(self.key[2:])

    def _predicted_bytes(self, extras: Sequence[Any]) -> Bytes:
        """Return the bytes of an operator's results, by running the operator on meta tensors.

        In two cases this number is an estimate. First, sizes may depend on contents (`nonzero`), or
        the operator has no meta kernel. The estimate is then 8-byte coordinates of all elements of
        the largest argument, an upper bound for `nonzero`. Second, no meta tensor can stand for a
        sparse or nested argument. The estimate is then the padded size of the largest argument.
        """
        operator = self.operator
        if not operator.returns_tensors:
            return 0
        if operator.writes and operator.returns_written and not operator.resizes:
            return 0
        opaque = [extra for extra in extras if isinstance(extra, Tensor)]
        if opaque:
            plain = (g.size.numel() * g.dtype.itemsize for g in self.geometries())
            nested = (_padded_bytes(tensor) for tensor in opaque if tensor.is_nested)
            return max((*plain, *nested), default=0)
        try:
            return self._bytes_on_meta(extras)
        # If the arguments are wrong, predict nothing: the operator itself raises later.
        except Exception:
            counts = (g.size.numel() * max(len(g.size), 1) for g in self.geometries())
            return 8 * max(counts, default=0) * operator.results

    def _bytes_on_meta(self, extras: Sequence[Any]) -> Bytes:
        """Run the operator on meta tensors, and return the bytes of the storages that it makes."""
        metas = [_meta(geometry) for geometry in self.geometries()]
        homes = [meta.untyped_storage() for meta in metas]
        known = {home._cdata: self.rounded(home.nbytes()) for home in homes}
        drawn = [None if type(extra) is torch.Generator else extra for extra in extras]
        args, kwargs = self.arguments(iter(metas), drawn)
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        result = self.operator.predicting(*args, **kwargs)
        results = tensors_in(result)
        total = 0
        for tensor in results:
            # The storage of this result is new, or it is that of an `out=` tensor and was enlarged.
            if tensor.layout is torch.strided:
                home = tensor.untyped_storage()
                size = self.rounded(home.nbytes())
                total += max(0, size - known.get(home._cdata, 0))
                known[home._cdata] = size
        if self.operator.reduced_in_place:
            elements = torch.broadcast_shapes(*(meta.shape for meta in metas)).numel()
            total = max(total, self.rounded(elements * results[0].itemsize))
        return total


# The recursive functions below are no closures, because a recursive closure is a reference cycle.
# It would keep tensors in memory until the next garbage collection.


def _size_of_opaque(extra: Any) -> object:
    """Return the shape or bytes of a sparse or nested tensor, for a signature's key."""
    if type(extra) is not Tensor:
        return None
    return extra.nbytes if extra.is_nested else extra.shape


def _put_back(part: Any, tensors: Iterator[Tensor | None], extras: Iterator[Any]) -> Any:
    """Return the argument that `part` of a signature's key stands for."""
    if type(part) is Geometry:
        return next(tensors)
    if part is EXTRA:
        return next(extras)
    if part is TRUE:
        return True
    if part is FALSE:
        return False
    if type(part) is tuple:
        return [_put_back(item, tensors, extras) for item in part]
    return part


def _geometries_in(parts: Any) -> Iterator[Geometry]:
    """Iterate over the tensors' geometries in `parts`, a signature's key or a part of it."""
    for part in parts:
        if type(part) is Geometry:
            yield part
        elif type(part) is tuple:
            yield from _geometries_in(part)


#: The device of the budget, and True if the operator runs on this device. Costs of operators and
#: their counted bytes depend on both. None: the budget is for the CPU.
Place = tuple[torch.device, bool] | None

#: Signatures by default dtype and by `Place`. The default dtype affects the sizes of results, for
#: example when integers are divided.
_signatures: dict[tuple[torch.dtype, Place], dict[tuple[Any, ...], Signature]] = {}


def signature_of(operator: Operator, key: tuple[Any, ...], place: Place = None) -> Signature:
    """Return the signature for `key`. Equal keys share one object while it is in the cache."""
    here = torch.get_default_dtype(), place
    signatures = _signatures.get(here)
    if signatures is None:
        signatures = _signatures[here] = {}
    found = signatures.get(key)
    if found is None:
        if len(signatures) > MOST_KEPT:
            signatures.clear()
        device = place[0] if place is not None and place[1] else _CPU
        found = signatures[key] = Signature(operator, key, device)
    return found


def tensors_in(result: Any) -> list[Tensor]:
    """Return the tensors in `result`, which an operator returned, in order."""
    if type(result) is Tensor:
        return [result]
    if type(result) is tuple or type(result) is list:
        return [tensor for item in result for tensor in tensors_in(item)]
    return [result] if isinstance(result, Tensor) else []


@functools.lru_cache(MOST_KEPT)
def is_plain(kind: type) -> bool:
    """Return True if operators treat tensors of this type like plain tensors.

    A subclass is plain unless it has its own `__torch_dispatch__`. A lazy parameter is not plain,
    because it has no memory yet.
    """
    return (
        issubclass(kind, Tensor)
        and not issubclass(kind, (UninitializedParameter, UninitializedBuffer))
        and not _has_dispatch(kind)
    )


def _has_dispatch(kind: type) -> bool:
    """Return True if the tensor class `kind` has its own `__torch_dispatch__`."""
    plain: Any = getattr(Tensor, "__torch_dispatch__")  # noqa: B009 - the stubs deny it
    return getattr(kind, "__torch_dispatch__", plain) not in (
        plain,
        torch._C._disabled_torch_dispatch_impl,
    )


def _padded_bytes(nested: Tensor) -> Bytes:
    """Return the bytes that the nested tensor `nested` would take as a padded tensor."""
    sizes = nested._nested_tensor_size()
    return nested.dtype.itemsize * len(sizes) * int(sizes.amax(0).prod()) if sizes.numel() else 0


def _meta(geometry: Geometry) -> Tensor:
    """Return a meta tensor with the shape, strides, offset and dtype of `geometry`."""
    reach = sum((n - 1) * s for n, s in zip(geometry.size, geometry.stride, strict=True))
    length = geometry.offset + reach + 1 if geometry.size.numel() else 0
    flat = torch.empty(length, dtype=geometry.dtype, device="meta")
    return geometry.marked(flat.as_strided(geometry.size, geometry.stride, geometry.offset))


def written_by(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """Iterate over the tensors that a call writes.

    Running statistics are included, although no schema mentions these writes (R6, hidden writes).
    """
    if operator.statistics:
        written = (args[position] for position in operator.written_statistics(tuple(args)))
        yield from (target for target in written if target is not None)
        return
    for position, name in operator.written:
        yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))
