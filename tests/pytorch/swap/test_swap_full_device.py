"""Tests of swapping if memory for reads is refused or cannot be pinned.

A file stands in for the device's store. The tests show which request is tried again.
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
    """Counts those of the program."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Reads:
    """Reads are refused with `error`: of each value the first one, as `refuses` says by number."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        operators: _Operators,
        error: Callable[[], Exception],
        refuses: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.refused: dict[int, int] = {}  # by value: operators that had run
        #: Values asked for again at once, and those asked for only when more operators had run.
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


def test_a_refused_read_is_retried_or_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that was asked for is read again at once, one that was to come early when it is."""
    weight = vector(True)
    wanted = gradient(weight)
    with _Operators() as operators, swapping(tmp_path, 20 * VECTOR) as run:
        reads = _Reads(monkeypatch, operators, lambda: torch.OutOfMemoryError(FULL))
        for _ in range(2):
            assert torch.equal(gradient(weight), wanted)
        check(run)
    assert reads.at_once
    assert reads.later
    assert len(reads.refused) == len({*reads.at_once, *reads.later})
    assert run.recomputations == 0
    assert swapped(run).back > 0


@pytest.mark.parametrize("nth", range(6))
def test_another_error_is_not_taken_for_a_full_device(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a value that was asked for, and of one that was to come early (as the test above sees)."""
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
        assert reads == nth + 1  # no second try
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
def test_failed_pinning_recomputes_or_raises(
    error: Exception, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(nbytes: int) -> torch.Tensor:
        raise error

    monkeypatch.setattr(accelerator, "pinned", refused)
    monkeypatch.setattr(accelerator, "new_stream", lambda device: None)
    cpu = torch.device("cpu")
    store = PinnedStore(1 << 20, cpu, Streams(cpu))
    home = torch.ones(1000).untyped_storage()
    if full:
        assert store.write(home) is None  # it is computed again
        return
    with pytest.raises(RuntimeError, match="CUDA error"):
        store.write(home)
