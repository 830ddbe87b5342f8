"""Describe how a tensor lies in its storage (shape, strides, offset, dtype, flags).

A `Geometry` and a storage suffice to make an equal tensor.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from rekindle.pytorch.tensors._private import privately

#: Most geometries, and most call signatures, to cache. Without a limit, these caches would grow
#: forever in programs with ever new shapes or integer arguments.
MOST_KEPT = 20_000


@final
class Geometry:
    """The layout of a tensor in its storage: everything but the storage itself.

    Attributes:
        size: The shape of the tensor.
        stride: The strides, in elements.
        offset: The offset in the storage, in elements.
        dtype: The dtype of the tensor.
        negative: True for a tensor with the negative bit, such as `x.conj().imag`.
        conjugate: True for a tensor with the conjugate bit.
        requires_grad: True if the tensor requires a gradient.
        span: Bytes of the tensor if it fills the storage from byte 0 without gaps, else -1.
    """

    __slots__ = (
        "conjugate",
        "dtype",
        "negative",
        "offset",
        "requires_grad",
        "size",
        "span",
        "stride",
    )

    def __init__(
        self,
        size: Any,
        stride: Any,
        offset: Any,
        dtype: torch.dtype,
        negative: bool = False,
        conjugate: bool = False,
        requires_grad: bool = False,
    ) -> None:
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.negative = negative
        self.conjugate = conjugate
        self.requires_grad = requires_grad
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        count = size.numel()
        self.span = dtype.itemsize * count if offset == 0 and reach == count else -1

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor of this geometry in `storage`, hidden from dispatch modes."""
        with privately():
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]
            tensor = self.marked(tensor)
            return tensor.requires_grad_() if self.requires_grad else tensor

    def marked(self, tensor: Tensor) -> Tensor:
        """Return a view of `tensor` that has the conjugate and negative bits of this geometry."""
        if self.conjugate:
            tensor = torch.ops.aten._conj(tensor)
        return torch.ops.aten._neg_view(tensor) if self.negative else tensor


#: The complex dtypes, whose tensors may have the conjugate bit.
COMPLEX = {torch.complex32, torch.complex64, torch.complex128}

geometries: dict[Any, Geometry] = {}


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the geometry of `tensor`. Tensors with equal geometries share one object."""
    key: tuple[Any, ...] = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    if key[3] in COMPLEX or tensor.is_neg():
        key = (*key, tensor.is_neg(), tensor.is_conj())
    return geometries.get(key) or new_geometry(key)


def new_geometry(key: tuple[Any, ...]) -> Geometry:
    if len(geometries) > MOST_KEPT:
        geometries.clear()
    found = geometries[key] = Geometry(*key)
    return found


def requiring_grad(plain: Geometry) -> Geometry:
    place = (plain.size, plain.stride, plain.offset, plain.dtype)
    key = (*place, plain.negative, plain.conjugate, True)
    return geometries.get(key) or new_geometry(key)
