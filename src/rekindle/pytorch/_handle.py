"""What autograd holds in the place of a tensor."""

from __future__ import annotations

from typing import final

from torch import Tensor

from rekindle.engine import Storage
from rekindle.pytorch._geometry import Geometry
from rekindle.pytorch._memory import Obituaries


@final
class Handle:
    """One reference of autograd to a value: how to find it, and what it must look like.

    It knows no memory itself. Its death is queued in `released`, not acted on: it may come in any
    thread, amid anything.
    """

    __slots__ = ("geometry", "released", "storage", "version", "witness")

    def __init__(
        self, released: Obituaries[Storage], storage: Storage, geometry: Geometry, version: int
    ) -> None:
        self.released = released
        self.storage = storage
        self.geometry = geometry
        self.version = version  #: of the program's tensor when it was saved; negative: none
        #: Has that tensor's version counter, where the storage does not know which one it is.
        self.witness: Tensor | None = None

    def current(self) -> Storage:
        """The storage that holds the value now."""
        storage = self.storage
        while storage.payload.successor is not None:
            storage = storage.payload.successor
        return storage

    def __del__(self) -> None:
        self.released.announce(self.storage)
