"""The table that finds the engine's storages, where addresses are used again."""

from __future__ import annotations

import torch

from rekindle._types import OpId, StorageId
from rekindle.engine import Call, Storage
from rekindle.pytorch.tensors._memory import Memory, Table


def _storage() -> Storage:
    storage = Call(OpId(0), "made", 0, ()).makes(StorageId(0), 4).storage
    storage.payload = Memory()
    return storage


def test_a_storage_that_died_lives_no_more_before_anybody_acts_on_it() -> None:
    table, storage, tensor = Table(), _storage(), torch.ones(1)
    address = tensor.untyped_storage()._cdata
    table.settle(storage, tensor.untyped_storage(), address)
    assert table.watch_at(address) is not None
    del tensor
    assert table.watches[address].storage is storage  # the death is queued, not acted on
    assert table.watch_at(address) is None
    assert len(table.deaths) == 1


def test_who_takes_the_place_of_a_dead_one_keeps_it() -> None:
    table, old, new, tensor = Table(), _storage(), _storage(), torch.ones(1)
    home = tensor.untyped_storage()
    table.settle(old, home, home._cdata)
    table.settle(new, home, home._cdata)
    table.vacate(old)
    assert table.watches[home._cdata].storage is new
