"""Check the invariants of an engine, for tests, between two events of a program."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from rekindle._types import Bytes
from rekindle.engine._graph import Storage
from rekindle.engine._host import HostMemory


class Checkable(Protocol):
    """The attributes of an engine that `check` reads."""

    memory: Bytes
    peak: Bytes
    unlisted: Bytes
    budget: Bytes | float
    host: HostMemory | None
    discarded: list[Storage]
    checkpoints: dict[Storage, None]

    @property
    def storages(self) -> list[Storage]: ...

    def is_candidate(self, storage: Storage) -> bool: ...


def check(engine: Checkable) -> None:
    """Assert every invariant of `engine`.

    Raises:
        AssertionError: An invariant does not hold.
    """
    storages = dict.fromkeys(engine.storages)
    resident = sum(storage.nbytes for storage in storages if storage.resident)
    assert engine.memory == resident + engine.unlisted, "memory is miscounted"
    assert engine.memory <= engine.budget, f"{engine.memory} bytes over {engine.budget}"
    copied = {storage for storage in storages if storage.on_host}
    host, ahead = engine.host, Counter[Storage]()
    if host is not None:
        ahead = Counter([*host.saving, *host.coming])
        assert {*host.copies} == copied | {*engine.discarded}, "host copies are miscounted"
        assert host.nbytes == sum(storage.nbytes for storage in host.copies)
        assert host.lacks(0) <= 0, "the host's limit is passed"
    else:
        assert not copied, "storages have host copies, but swapping is off"
    assert all(each.resident for each in engine.checkpoints), "a checkpoint is not in memory"
    for storage in storages:
        assert storage.locks == ahead[storage], f"{storage} is still locked"
        assert (storage.order >= 0) == engine.is_candidate(storage), f"{storage} is misclassified"
        assert storage.references >= 0, f"{storage}"
        for value in storage.values:
            assert storage.resident or not value.defined, f"{storage}: evicted, value defined"
        needed = storage.resident or storage.consumers or not storage.dead
        assert needed, f"{storage} leaks"
        if storage.replayable:
            for parent in storage.parents():
                assert parent in storages, f"{storage} needs {parent}, which is gone"
