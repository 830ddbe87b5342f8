"""How a tensor lies in its storage: what it takes to find it there again."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from rekindle.pytorch.tensors._private import privately

#: Geometries kept, and signatures: programs with ever new shapes or integers must not grow without
#: end.
MOST_KEPT = 20_000


@final
class Geometry:
    """How a tensor lies in its storage."""

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
        self.negative = negative  #: what is in memory has the other sign, as under `conj().imag`
        self.conjugate = conjugate  #: what is in memory is the conjugate
        self.requires_grad = requires_grad
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        count = size.numel()
        #: Bytes of the storage from its start if the tensor covers them without gaps, else -1.
        self.span = dtype.itemsize * count if offset == 0 and reach == count else -1

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor of this geometry in `storage`; no dispatch mode sees how it is made."""
        with privately():
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]
            tensor = self.marked(tensor)
            return tensor.requires_grad_() if self.requires_grad else tensor

    def marked(self, tensor: Tensor) -> Tensor:
        """`tensor` with the marks that change what its memory means."""
        if self.conjugate:
            tensor = torch.ops.aten._conj(tensor)
        return torch.ops.aten._neg_view(tensor) if self.negative else tensor


#: Types of which a tensor may be a conjugate.
COMPLEX = {torch.complex32, torch.complex64, torch.complex128}

geometries: dict[Any, Geometry] = {}


def geometry_of(tensor: Tensor) -> Geometry:
    """The geometry of `tensor`; equal geometries are one object."""
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
