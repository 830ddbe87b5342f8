"""Tests of the choice of checkpoints for long recomputations.

A checkpoint is an intermediate value that stays in memory during the recomputation of others.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle._types import OpId, StorageId
from rekindle.engine import Call, Storage
from rekindle.engine._checkpoints import choose_checkpoints
from tests.strategies import examples


def _chain(sizes: list[int]) -> list[Call]:
    """Return a chain of operator calls: each reads only the result of the call before."""
    calls: list[Call] = []
    for number, size in enumerate(sizes):
        inputs = [calls[-1].outputs[0]] if calls else []
        call = Call(OpId(number), "next", 1, inputs)
        call.makes(StorageId(number), size)
        calls.append(call)
    return calls


def _never(_: Storage) -> bool:
    return False


def test_no_checkpoint_is_chosen_if_all_results_fit() -> None:
    assert choose_checkpoints(_chain([2] * 10), 40, _never) == {}
    assert choose_checkpoints(_chain([2] * 10), 39, _never) != {}


def test_no_checkpoint_is_chosen_if_no_memory_is_free() -> None:
    assert choose_checkpoints(_chain([2] * 10), -1, _never) == {}


def test_checkpoint_is_placed_where_fewest_bytes_are_alive() -> None:
    calls = _chain([5, 5, 5, 1, 5, 5, 5, 1, 5, 5, 5])
    kept = choose_checkpoints(calls, 40, _never)
    assert [call.id for call in kept] == [3, 7]
    assert [[storage.id for storage in storages] for storages in kept.values()] == [[3], [7]]


def test_checkpoint_includes_input_that_a_later_call_reads() -> None:
    early = Call(OpId(0), "early", 1, [])
    both = early.makes(StorageId(0), 3)
    calls = _chain([4] * 8)
    for call in calls:
        call.id = OpId(call.id + 1)
    last = Call(OpId(9), "last", 1, [calls[-1].outputs[0], both])
    last.makes(StorageId(9), 4)
    kept = choose_checkpoints([*calls, last], 40, lambda storage: storage is both.storage)
    assert kept
    assert all(both.storage in storages for storages in kept.values())


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=60), free=st.integers(-300, 300))
@examples(100)
def test_checkpoints_take_at_most_half_of_free_memory(sizes: list[int], free: int) -> None:
    kept = choose_checkpoints(_chain(sizes), free, _never)
    assert sum(each.nbytes for storages in kept.values() for each in storages) <= max(0, free // 2)
