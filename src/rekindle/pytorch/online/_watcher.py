"""Who is told of a program's steps while they run, and may act on what comes next."""

from __future__ import annotations

from typing import Protocol

from rekindle.engine import Call, Storage
from rekindle.pytorch.operators import Invocation


class Watcher(Protocol):
    """What the runtime tells somebody who knows the program's steps; hung on `Driver.watcher`."""

    def meets(self, invocation: Invocation) -> None:
        """The program is about to run an operator."""
        ...

    def made(self, call: Call) -> None:
        """The program ran an operator, or showed something that it had already."""
        ...

    def wanting(self, storage: Storage) -> None:
        """The program asks for `storage`, which is gone."""
        ...

    def step(self) -> None:
        """A step is over, and another one begins."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...
