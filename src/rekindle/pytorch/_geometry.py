"""How a tensor lies in its storage: what it takes to find it there again."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

#: Geometries kept, and signatures: programs with ever new shapes or integers must not grow without
#: end.
MOST_KEPT = 20_000


@final
class Geometry:
    """How a tensor lies in its storage."""

    __slots__ = ("dtype", "offset", "requires_grad", "size", "span", "stride")

    def __init__(self, size: Any, stride: Any, offset: Any, dtype: torch.dtype) -> None:
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.requires_grad = False
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        count = size.numel()
        #: Bytes of the storage from its start if the tensor covers them without gaps, else -1.
        self.span = dtype.itemsize * count if offset == 0 and reach == count else -1

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor of this geometry in `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload]
        return tensor.requires_grad_() if self.requires_grad else tensor


geometries: dict[Any, Geometry] = {}


def geometry_of(tensor: Tensor) -> Geometry:
    """The geometry of `tensor`; equal geometries are one object."""
    key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return geometries.get(key) or new_geometry(key)


def new_geometry(key: tuple[Any, ...]) -> Geometry:
    if len(geometries) > MOST_KEPT:
        geometries.clear()
    found = geometries[key] = Geometry(*key[:4])
    found.requires_grad = len(key) > 4
    return found


def requiring_grad(plain: Geometry) -> Geometry:
    key = (plain.size, plain.stride, plain.offset, plain.dtype, True)
    return geometries.get(key) or new_geometry(key)
