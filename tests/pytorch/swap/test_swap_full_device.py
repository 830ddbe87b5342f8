"""A device that has no memory for what comes back, or whose error is another one; on stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.online import Streams
from rekindle.pytorch.swap import _swapper
from rekindle.pytorch.swap._pinned_store import PinnedStore
from tests.pytorch.harsh import vector
from tests.pytorch.swap.test_swap import VECTOR, gradient, swapping

pytestmark = pytest.mark.python_core  # on a device the native core does not swap

Swapper = _swapper.Swapper
ILLEGAL = "CUDA error: an illegal memory access was encountered"


class _Reads:
    """Memory for what is read ahead, or was asked for, is refused with `error`."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, ahead: bool, error: Callable[[], Exception]
    ) -> None:
        self.refused = 0
        self.times = 10**9
        self._ahead, self._error, self._amid = ahead, error, False
        read, read_ahead = Swapper._read, Swapper._read_ahead

        def reading(swapper: Any, storage: Any) -> None:
            if self._amid == self._ahead and self.refused < self.times:
                self.refused += 1
                raise self._error()
            read(swapper, storage)

        def reading_ahead(swapper: Any) -> None:
            self._amid = True
            try:
                read_ahead(swapper)
            finally:
                self._amid = False

        patch.setattr(Swapper, "_read", reading)
        patch.setattr(Swapper, "_read_ahead", reading_ahead)


def _full() -> Exception:
    return torch.OutOfMemoryError("out of memory. Tried to allocate 4.00 KiB")


def test_what_comes_early_displaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    reads = _Reads(monkeypatch, ahead=True, error=_full)
    with swapping(tmp_path, 20 * VECTOR) as run:
        for _ in range(2):
            assert torch.equal(gradient(weight), wanted)
    assert reads.refused > 0
    assert run.report().swapped is not None


def test_what_was_asked_for_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory of what is on its way."""
    weight = vector(True)
    wanted = gradient(weight)
    reads = _Reads(monkeypatch, ahead=False, error=_full)
    reads.times = 1
    with swapping(tmp_path, 20 * VECTOR):
        assert torch.equal(gradient(weight), wanted)
    assert reads.refused == 1


@pytest.mark.parametrize("ahead", [True, False])
def test_another_error_is_not_taken_for_a_full_device(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = vector(True)
    reads = _Reads(monkeypatch, ahead=ahead, error=lambda: RuntimeError(ILLEGAL))
    with (
        pytest.raises(RuntimeError, match="illegal memory access"),
        swapping(tmp_path, 20 * VECTOR),
    ):
        gradient(weight)
    assert reads.refused == 1  # nobody tried again


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError(ILLEGAL), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_memory_that_cannot_be_pinned(
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
