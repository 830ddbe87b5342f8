"""Tests of the list of bytes of an `empty` tensor that no operator has written yet.

The native core keeps a compact list. The tests compare it with one flag for each byte: 1 if the
byte is unwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rekindle.pytorch.native import core

Write = tuple[Tensor, Tensor | None]


def unwritten(base: Tensor, writes: list[Write]) -> list[int] | None:
    """Return a flag for each byte of `base`: 1 if the core counts it as unwritten.

    Return None if the core's list would be too long.
    """
    module: Any = core()
    found = module.unwritten_bytes(base.nbytes, writes)
    return None if found is None else list(found)


def flags(base: Tensor) -> Tensor:
    """Return flags of the bytes of `base` as a tensor of the same shape, all set."""
    return torch.ones(base.shape, dtype=base.dtype)


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...], steps: bool) -> tuple[slice, ...]:
    found = []
    for size in shape:
        first = draw(st.integers(0, size))
        end = draw(st.integers(first, size))
        step = draw(st.sampled_from([1, 1, 2, 3])) if steps else 1
        found.append(draw(st.sampled_from([slice(None), slice(first, end, step)])))
    return tuple(found)


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.uint8, torch.int16, torch.int32])


def _bytes_of(value: Tensor) -> list[int]:
    return value.view(-1).view(torch.uint8).tolist()


def _number(set_: bool, dtype: torch.dtype) -> int:
    """Return a number of type `dtype` whose bytes are all 1, or 0 if `set_` is False."""
    return int.from_bytes([1] * dtype.itemsize, "little") if set_ else 0


@given(st.data())
def test_unwritten_bytes_after_writes_of_slices_are_exact(data: st.DataObject) -> None:
    shape, dtype = data.draw(SHAPES), data.draw(DTYPES)
    order = data.draw(st.permutations(range(len(shape))))
    base = torch.full(shape, _number(True, dtype), dtype=dtype)
    expected = base.clone()
    writes: list[Write] = []
    for _ in range(data.draw(st.integers(0, 6))):
        part = data.draw(slices(shape, steps=False))
        writes.append((base[part].permute(order), None))
        expected[part] = 0
        found = unwritten(base, writes)
        if found is None:
            return
        assert found == _bytes_of(expected)


@given(st.data())
def test_unwritten_byte_is_never_counted_as_written(data: st.DataObject) -> None:
    """The core may count a written byte as unwritten, but not the other way round.

    The writes use views with steps, other shapes and dtypes, and copies within the storage.
    """
    shape, dtype = data.draw(SHAPES), data.draw(DTYPES)
    base = torch.full(shape, _number(True, dtype), dtype=dtype)
    expected = base.clone()
    writes: list[Write] = []
    for _ in range(data.draw(st.integers(0, 6))):
        one, other = base, expected
        if data.draw(st.booleans()):
            one, other = one.view(-1), other.view(-1)
        if data.draw(st.booleans()):
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        part = data.draw(slices(tuple(one.shape), steps=True))
        if data.draw(st.booleans()):
            length = [each.stop for each in part]
            source = tuple(
                slice(size - (each.stop - each.start), size, each.step)
                if each.start is not None and each.step == 1
                else each
                for each, size in zip(part, one.shape, strict=True)
            )
            if part != source and None not in length and _disjoint(one, part, source):
                try:
                    found = unwritten(base, [*writes, (one[part], one[source])])
                except RuntimeError:
                    continue  # Rekindle cannot list unwritten bytes after this copy
                writes.append((one[part], one[source]))
                other[part] = other[source].clone()
        else:
            writes.append((one[part], None))
            other[part] = 0
        found = unwritten(base, writes)
        if found is None:
            return
        assert all(here >= there for here, there in zip(found, _bytes_of(expected), strict=True))


def _disjoint(one: Tensor, part: tuple[slice, ...], source: tuple[slice, ...]) -> bool:
    seen = torch.zeros(one.shape, dtype=torch.bool)
    seen[part] = True
    return not bool(seen[source].any())


def test_copies_within_storage_move_unwritten_bytes() -> None:
    """Circular padding copies parts of its result, and reads corners that are not written yet."""
    base = torch.empty(10, 12, dtype=torch.uint8)
    writes: list[Write] = [
        (base[2:-2, 3:-3], None),
        (base[:, :3], base[:, 6:9]),
        (base[:, -3:], base[:, 3:6]),
    ]
    found = unwritten(base, writes)
    assert found is not None
    assert torch.tensor(found).view(10, 12).sum(1).tolist() == [12, 12, *[0] * 6, 12, 12]
    writes += [(base[:2], base[6:8]), (base[-2:], base[2:4])]
    assert unwritten(base, writes) == [0] * base.nbytes


def test_unwritten_bytes_after_strided_writes_are_exact() -> None:
    base = torch.empty(5, 3)
    writes: list[Write] = [(base[::2], None), (base[1::2, :2], None), (base[1::2, 2:], None)]
    assert unwritten(base, writes) == [0] * base.nbytes
    assert unwritten(base, writes[:2]) == ([0] * 20 + [1] * 4) * 2 + [0] * 12


def test_writes_of_overlapping_views_leave_bytes_unwritten() -> None:
    base = torch.empty(6, 6, dtype=torch.uint8)
    writes: list[Write] = [(base.unfold(0, 3, 1), None), (base.as_strided((4, 4), (3, 2)), None)]
    assert unwritten(base, writes) == [1] * 36


def test_list_of_too_many_unwritten_pieces_is_given_up() -> None:
    base = torch.empty(1000, dtype=torch.uint8)
    assert unwritten(base, [(base[i], None) for i in range(0, 120, 2)]) is not None
    assert unwritten(base, [(base[i], None) for i in range(0, 140, 2)]) is None
