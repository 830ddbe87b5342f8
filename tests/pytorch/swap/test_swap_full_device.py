"""Tests of swapping on a device without free memory, or if host memory cannot be page-locked.

They show which requests are tried again after an error. A file stands in for page-locked memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.swap import Copies
from rekindle.pytorch.swap._pinned_store import PinnedStore
from rekindle.pytorch.swap._streams import Streams
from tests.pytorch.harsh import vector
from tests.pytorch.swap.test_swap import VECTOR, check, gradient, swapped, swapping

ILLEGAL = "CUDA error: an illegal memory access was encountered"
FULL = "out of memory. Tried to allocate 4.00 KiB"


class _Operators(TorchDispatchMode):
    """A dispatch mode that counts the program's operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Reads:
    """Make the first swap-in of a value raise `error`, if `refuses` selects the value."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        operators: _Operators,
        error: Callable[[], Exception],
        refuses: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.refused: dict[int, int] = {}  # for each failed value: number of operators run so far
        #: Values whose swap-in was retried: in `at_once` before another operator had run, in
        #: `later` after that.
        self.at_once: list[int] = []
        self.later: list[int] = []
        read = Copies.read

        def reading(copies: Copies, value: int, home: torch.UntypedStorage) -> str:
            if value not in self.refused and refuses(len(self.refused)):
                self.refused[value] = operators.count
                raise error()
            if value in self.refused:
                again = self.refused[value] == operators.count
                (self.at_once if again else self.later).append(value)
            return read(copies, value, home)

        patch.setattr(Copies, "read", reading)


def test_swap_in_without_device_memory_is_retried_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt of each swap-in fails because the device has no free memory."""
    weight = vector(True)
    wanted = gradient(weight)
    with _Operators() as operators, swapping(tmp_path, 20 * VECTOR) as run:
        reads = _Reads(monkeypatch, operators, lambda: torch.OutOfMemoryError(FULL))
        for _ in range(2):
            assert torch.equal(gradient(weight), wanted)
        check(run)
    assert reads.at_once
    assert not reads.later
    assert len(reads.refused) == len({*reads.at_once})
    assert run.recomputations == 0
    assert swapped(run).back > 0


@pytest.mark.parametrize("nth", range(6))
def test_swap_in_error_other_than_oom_is_not_retried(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap-in number `nth` (from 0) fails: one that an operator waits for, or an early one."""
    weight = vector(True)
    wanted = gradient(weight)
    reads = 0
    read = Copies.read

    def reading(copies: Copies, value: int, home: torch.UntypedStorage) -> str:
        nonlocal reads
        reads += 1
        if reads == nth + 1:
            raise RuntimeError(ILLEGAL)
        return read(copies, value, home)

    monkeypatch.setattr(Copies, "read", reading)
    with swapping(tmp_path, 20 * VECTOR) as run:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            gradient(weight)
        assert reads == nth + 1  # no second attempt
        check(run)
        assert torch.equal(gradient(weight), wanted)
        check(run)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError(ILLEGAL), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_page_locking_error_other_than_oom_reaches_program(
    error: Exception, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If page-locked memory is full, the store takes no copy, and the program gets no error."""

    def refused(nbytes: int) -> torch.Tensor:
        raise error

    monkeypatch.setattr(accelerator, "pinned", refused)
    monkeypatch.setattr(accelerator, "new_stream", lambda device: None)
    cpu = torch.device("cpu")
    store = PinnedStore(1 << 20, cpu, Streams(cpu))
    home = torch.ones(1000).untyped_storage()
    if full:
        assert store.write(home) is None  # the value will be recomputed
        return
    with pytest.raises(RuntimeError, match="CUDA error"):
        store.write(home)
