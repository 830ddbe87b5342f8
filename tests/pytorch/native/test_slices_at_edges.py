"""Tests of operators in slices with rare arguments: the same bits or error, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.pytorch.bits import threads_set
from tests.pytorch.native.test_slices import kept_budget

pytestmark = pytest.mark.skipif(native_core() is None, reason="no native core")

MIB = 1 << 20


def columns_of_part(size: int) -> Callable[[], Tensor]:
    """Return a function that sums columns of GELU, which begins inside a storage."""
    part = torch.randn(size + 1, 1024)[1:]
    return lambda: functional.gelu(part).sum(0)


def every_second_column() -> Callable[[], Tensor]:
    x = torch.randn(2048, 2004)
    return lambda: (x * 1.5)[:, ::2].sum(0)


def strided_columns_within_batches() -> Callable[[], Tensor]:
    x = torch.randn(5, 512, 1002)
    return lambda: (x * 1.5)[:, :, ::2].sum(1)


def part_as_bytes() -> Callable[[], Tensor]:
    x = torch.randn(2048, 1024)
    return lambda: (x * 3).view(torch.uint8)[:256].sum(1)


def as_whole_numbers() -> Callable[[], Tensor]:
    x = torch.randn(2048, 2048).bfloat16()
    return lambda: (x * 3).view(torch.int32).sum(1)


def norm_of_lower_precision() -> Callable[[], Tensor]:
    x, w = torch.randn(4096, 64).bfloat16(), torch.randn(64, 1024).bfloat16()
    return lambda: torch.native_layer_norm(x @ w, (1024,), None, None, 1e-5)[1]


PROGRAMS = {
    "GELU with an offset": lambda: columns_of_part(4096),
    "every second column": every_second_column,
    "strided columns": strided_columns_within_batches,
    "part as bytes": part_as_bytes,
    "as whole numbers": as_whole_numbers,
    "layer norm in bfloat16": norm_of_lower_precision,
}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rare_operands_in_slices_have_equal_bits_or_no_room(name: str, threads: int) -> None:
    torch.manual_seed(0)
    fitted = 0
    with threads_set(threads):
        program = PROGRAMS[name]()
        expected = program()
        for budget in range(10 * MIB, 50 * MIB, 4 * MIB):
            try:
                with kept_budget(budget):
                    found = program()
            except rekindle.OutOfBudget:
                continue
            fitted += 1
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), budget
    assert fitted


def test_factor_of_interpolation_is_that_of_the_call() -> None:
    """Two factors give results of equal sizes, so both calls have one signature."""
    x = torch.randn(1, 1, 90, 20_000)

    def program(factor: float) -> Tensor:
        return functional.interpolate(x, scale_factor=(factor, 2.0)).sum(3)

    expected = [program(factor) for factor in (2.0, 2.01)]
    for budget in range(16 * MIB, 48 * MIB, 8 * MIB):
        try:
            with kept_budget(budget):
                found = [program(factor) for factor in (2.0, 2.01)]
        except rekindle.OutOfBudget:
            continue
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("bad", [-100, -1, 6000])
def test_target_that_is_no_class_raises_as_in_pytorch(bad: int) -> None:
    """-100 is ignored by default, but not if the program ignores another target."""
    head, hidden = torch.randn(6000, 64), torch.randn(768, 64)
    targets = torch.randint(6000, (768,))
    targets[5] = bad

    def program() -> Tensor:
        return functional.cross_entropy(hidden @ head.t(), targets, ignore_index=0)

    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        program()
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"), kept_budget(14 * MIB):
        program()


def test_threads_read_one_value_without_room() -> None:
    """They compute slices of it at the same time, and share what they learn."""
    torch.manual_seed(0)
    x, w, rows = torch.randn(512, 32), torch.randn(32, 4096), torch.randn(16, 512)
    with threads_set(1):
        expected = (x @ w).log_softmax(1)
        sums, product = expected.sum(1), rows @ expected
        for _ in range(5):
            found: list[tuple[Tensor, Tensor]] = []
            with rekindle.budget(7 * MIB, learn=False):
                y = (x @ w).log_softmax(1)
                threads = [
                    threading.Thread(
                        target=lambda y=y, found=found: found.append((y.sum(1), rows @ y))
                    )
                    for _ in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                del y, threads
            assert len(found) == 4
            assert all(torch.equal(a, sums) and torch.equal(b, product) for a, b in found)
