"""What goes where the device has no room in one piece: from what its allocator tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rekindle._types import OpId, StorageId
from rekindle.engine import Call, Engine, Storage
from rekindle.policies import MSPS
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.devices._cuda import Piece
from rekindle.pytorch.online._neighbors import cheapest_neighbors

CPU = torch.device("cpu")
BLOCK = 1024


def _made(engine: Engine, number: int, cost: int) -> Storage:
    """In a block of its own, right behind the one before."""
    call = Call(OpId(number), "make", cost, ())
    storage = call.makes(StorageId(number), BLOCK).storage
    for _ in engine.call(call):
        pass
    home = SimpleNamespace(data_ptr=lambda: BLOCK * number, device=CPU)
    storage.payload = SimpleNamespace(watch=lambda: home)
    return storage


def test_the_cheapest_neighbors_go_and_nothing_where_no_place_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(None, MSPS())
    stores = [_made(engine, number, cost) for number, cost in enumerate((10, 90, 20, 30))]
    used = [Piece(BLOCK * number, BLOCK, used=number != 5) for number in range(6)]  # 4: unknown
    other = [Piece(BLOCK * number, BLOCK, used=number == 9) for number in (8, 9, 10)]
    layout = [used, other]
    monkeypatch.setattr(accelerator, "segments", lambda device: layout)
    assert cheapest_neighbors(engine, CPU, BLOCK) == []  # there is a free one already
    assert cheapest_neighbors(engine, CPU, 2 * BLOCK) == stores[2:]
    assert cheapest_neighbors(engine, CPU, 4 * BLOCK) == stores
    assert cheapest_neighbors(engine, CPU, 5 * BLOCK) == []
    for _ in engine.pin(stores[2].values[0]):
        pass
    assert cheapest_neighbors(engine, CPU, 2 * BLOCK) == stores[:2]
    assert cheapest_neighbors(engine, torch.device("meta"), 2 * BLOCK) == []
