"""Tests of the search for adjacent blocks of device memory to evict, so that a request fits.

The search in C++ must find the same blocks as the one in Python (`simulator`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.pytorch.native import core, why_not
from rekindle.simulator.allocator import Block, Pool, cheapest_window

#: A block: bytes, True if in use, and the cost of its eviction (None: pinned).
Row = tuple[int, bool, int | None]
ROWS = st.lists(
    st.tuples(st.integers(1, 9), st.booleans(), st.one_of(st.none(), st.integers(0, 20))),
    max_size=12,
)


def _twin(rows: Sequence[Row], nbytes: int) -> tuple[float, list[int]] | None:
    blocks, losses = [], {}
    for (size, used, loss), address in zip(rows, _addresses(rows), strict=True):
        block = Block(Pool(small=False), address, size)
        block.used = used
        blocks.append(block)
        losses[address] = loss
    found = cheapest_window(blocks, nbytes, lambda block: losses[block.address])
    return None if found is None else (found[0], [block.address for block in found[1]])


def _addresses(rows: Sequence[Row]) -> list[int]:
    return [1000 + sum(size for size, *_ in rows[:number]) for number in range(len(rows))]


@given(ROWS, st.integers(1, 30))
def test_native_search_finds_same_adjacent_blocks_as_simulator(
    rows: list[Row], nbytes: int
) -> None:
    module: Any = core()
    if module is None:
        pytest.skip(f"no native core: {why_not()}")
    addresses = _addresses(rows)
    blocks = [(at, *row) for at, row in zip(addresses, rows, strict=True)]
    found = module.window(blocks, nbytes)
    if found is not None:
        loss, first, last = found
        found = loss, [addresses[i] for i in range(first, last + 1) if rows[i][1]]
    assert found == _twin(rows, nbytes)


def test_requested_bytes_are_parsed_from_cuda_oom_message() -> None:
    module: Any = core()
    if module is None:
        pytest.skip(f"no native core: {why_not()}")
    said = "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 4.00 GiB"
    assert module.bytes_asked_for(said.format("512 bytes")) == 512
    # the text has two digits, so the number is rounded up
    assert module.bytes_asked_for(said.format("2.00 MiB")) == 2_102_395
    assert module.bytes_asked_for("cuBLAS has no more") == 0
