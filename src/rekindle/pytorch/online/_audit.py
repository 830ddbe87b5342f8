"""Compares what recomputation gives with what was there the first time."""

from __future__ import annotations

from typing import final

from rekindle._types import StorageId
from rekindle.engine import Call
from rekindle.pytorch.online._places import Site
from rekindle.pytorch.online._users_line import users_line
from rekindle.pytorch.operators import Fingerprint, fingerprint_of_memory
from rekindle.pytorch.tensors import UNWRITTEN, Memory


@final
class Audit:
    """Watches one driver. Costs a pass over every result, the first time and each time again."""

    def __init__(self) -> None:
        self._different: dict[Site, None] = {}
        self._first: dict[StorageId, tuple[Site, Fingerprint]] = {}

    @property
    def different(self) -> tuple[Site, ...]:
        """The operators that gave something else when they ran again, in order, each once."""
        return tuple(self._different)

    def made(self, call: Call) -> None:
        """`call` ran for the first time; what it made is in memory."""
        if not call.replayable:
            return
        site = Site(call.name, users_line())
        for storage in call.made:
            memory: Memory = storage.payload
            if not memory.flags & UNWRITTEN:  # what `empty` gives differs each time
                self._first[storage.id] = site, fingerprint_of_memory(memory.home())

    def made_again(self, call: Call) -> None:
        """`call` was recomputed; what is asked for is in memory."""
        for storage in call.made:
            memory: Memory = storage.payload
            if storage.id in self._first and memory.watch is not None:
                site, first = self._first[storage.id]
                if fingerprint_of_memory(memory.home()) != first:
                    self._different.setdefault(site)
