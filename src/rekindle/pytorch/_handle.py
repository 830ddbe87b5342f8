"""What autograd holds in the place of a tensor."""

from __future__ import annotations

from typing import final

from torch import Tensor

from rekindle.engine import Storage
from rekindle.pytorch._geometry import Geometry
from rekindle.pytorch._memory import Releases


@final
class Handle:
    """One reference of autograd to a value: how to find it, and what it must look like.

    It knows no memory itself. Its death is queued in `released`, not acted on: it may come in any
    thread, amid anything.
    """

    __slots__ = ("geometry", "probe", "released", "storage", "version")

    def __init__(
        self, released: Releases, storage: Storage, geometry: Geometry, version: int
    ) -> None:
        self.released = released
        self.storage = storage
        self.geometry = geometry
        self.version = version  #: of the program's tensor when it was saved; negative: none
        #: A tensor without memory that shares the version counter of what was saved, and that
        #: counter then: where it is not the one of the program's tensor.
        self.probe: tuple[Tensor, int] | None = None

    def current(self) -> Storage:
        """The storage that holds the value now."""
        storage = self.storage
        while storage.payload.successor is not None:
            storage = storage.payload.successor
        return storage

    def __del__(self) -> None:
        released = self.released
        released.append(self.storage)
        if released.late is not None:
            released.late()
