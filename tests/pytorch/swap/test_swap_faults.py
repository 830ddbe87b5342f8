"""Tests of swapping to a disk that is full, fails, or loses part of its file.

There is one warning. Gradients keep their bits, and memory stays within the budget, because values
are recomputed instead. A value that cannot be recomputed stays in memory if it cannot be written.
It is lost only if it cannot be read back.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.policies import Swap
from rekindle.pytorch.swap import _host_memory
from rekindle.pytorch.swap._bandwidth import WATCHED, Pace
from rekindle.pytorch.swap._store import Bandwidth, Store
from tests.helpers import sampled
from tests.pytorch.harsh import WIDTH, vector
from tests.pytorch.swap.test_swap import ONLY, VECTOR, check, gradient, hoard, store_of, swapped
from tests.pytorch.swap.test_swap import swapping as _swapping
from tests.pytorch.tracker import Tracker

Call = Callable[..., Any]
TIGHT = 20 * VECTOR  # a budget that suffices without swapping


def swapping(tmp_path: Path, budget: int = TIGHT, **options: Any) -> rekindle.budget:
    return _swapping(tmp_path, budget, **options)


def failing(call: Call, error: int, *, after: int = 0, times: int = 10**9) -> Call:
    """Return `call`, made to fail `times` times after `after` calls that succeed."""
    calls = iter(range(10**9))

    def instead(*arguments: Any) -> Any:
        if after <= next(calls) < after + times:
            raise OSError(error, os.strerror(error))
        return call(*arguments)

    return instead


@contextmanager
def warned(part: str) -> Iterator[None]:
    """Assert that exactly one warning about swapping is raised."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in found]
    assert len(messages) == 1, messages
    assert messages[0].startswith("swapping: ")
    assert part in messages[0]


@pytest.mark.parametrize("after", [0, 1, 7, 20])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_full_disk_during_swap_matches_pytorch(
    error: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, error, after=after))
    with warned(os.strerror(error)), Tracker() as tracker, swapping(tmp_path) as run:
        for _ in range(3):
            assert torch.equal(gradient(weight), wanted)
    assert tracker.peak <= TIGHT
    assert run.recomputations > 0
    check(run)


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_disk_that_becomes_slower_corrects_measured_bandwidth(
    call: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured bandwidth is corrected, a given one is not."""
    quick = 10**12

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return plain(*arguments)

    weight = vector(True)
    wanted = gradient(weight)
    plain = getattr(os, call)
    monkeypatch.setattr(_host_memory, "bandwidth_of", lambda *_: Bandwidth(quick, quick))
    with Tracker() as tracker:
        swap = Swap(out_bytes_per_s=quick, in_bytes_per_s=quick) if given else "1GiB"
        with swapping(tmp_path, swap=swap) as run:
            assert torch.equal(gradient(weight), wanted)
            assert run.recomputations == 0
            monkeypatch.setattr(os, call, slow)
            out = [swapped(run).out]
            for _ in range(WATCHED + 2):
                assert torch.equal(gradient(weight), wanted)
                out.append(swapped(run).out)
    each = [after - before for before, after in pairwise(out)]
    if given:
        assert run.recomputations == 0
        assert each == [out[0]] * len(each)
    else:
        assert run.recomputations > 0
        assert each[WATCHED:] == [0, 0]  # no swap after WATCHED slow steps
    assert tracker.peak <= TIGHT
    check(run)


def test_measured_bandwidth_falls_after_four_slow_transfers() -> None:
    latency = Store.latency_ns
    pace = Pace(1_000_000_000, latency)
    usual, slow = (1_000_000, latency + 1_000_000), (1_000_000, latency + 97_000_000)
    assert [pace.slower(*each) for each in (usual, usual, usual, slow)] == [None] * 3 + [40_000_000]
    # the bandwidth is lowered by at most a factor of four
    assert [pace.slower(*slow) for _ in range(4)] == [None] * 4
    small = (1_000, latency)  # slow for its bytes, because of the latency
    assert [pace.slower(*small) for _ in range(4)] == [None] * 4


def test_swap_write_that_fails_late_matches_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is evicted, recomputed, and evicted again before its write to the file fails."""

    def slow(*arguments: Any) -> int:
        time.sleep(0.02)
        raise OSError(errno.EIO, "too late")

    weight = vector(True)
    wanted = gradient(weight)
    monkeypatch.setattr(os, "pwrite", slow)
    with warned("too late"), Tracker() as tracker, swapping(tmp_path) as run:
        assert torch.equal(gradient(weight), wanted)
    assert tracker.peak <= TIGHT
    check(run)


def test_value_whose_swap_write_fails_is_kept_if_source_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the write, the program overwrites the input from which the value is recomputed."""

    def step(weight: Tensor) -> Tensor:
        data = torch.ones(WIDTH)
        x = data.sin() * weight  # saves the sine, which can be recomputed from `data`
        y = deeply(x)
        with torch.no_grad():
            data.add_(1)
        return torch.autograd.grad((y * x).sum(), weight)[0]

    gate = threading.Event()

    def stuck(*arguments: Any) -> int:
        gate.wait(0.2)
        raise OSError(errno.EIO, "too late")

    weight = vector(True)
    wanted = step(weight)
    monkeypatch.setattr(os, "pwrite", stuck)
    with warned("too late"), Tracker() as tracker, swapping(tmp_path, 40 * VECTOR) as run:
        for _ in range(3):
            assert torch.equal(step(weight), wanted)
    assert tracker.peak <= 40 * VECTOR
    assert run.evictions > 0
    check(run)


@pytest.mark.parametrize("after", [0, 5])
def test_swapped_value_that_cannot_be_read_is_recomputed(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EIO, after=after))
    with warned(os.strerror(errno.EIO)), Tracker() as tracker, swapping(tmp_path) as run:
        for _ in range(3):
            assert torch.equal(gradient(weight), wanted)
    assert tracker.peak <= TIGHT
    assert run.recomputations > 0
    check(run)


def test_swap_read_that_fails_sometimes_matches_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    read = failing(failing(os.preadv, errno.EIO, after=3, times=2), errno.EIO, after=9, times=1)
    monkeypatch.setattr(os, "preadv", read)
    with warned(os.strerror(errno.EIO)), swapping(tmp_path) as run:
        for _ in range(3):
            assert torch.equal(gradient(weight), wanted)
    assert run.recomputations > 0
    check(run)


def test_truncated_swap_file_matches_pytorch(tmp_path: Path) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    with warned("read"), swapping(tmp_path) as run:
        loss = torch.mul(deeply(weight), 1).sum()
        os.ftruncate(store_of(run)._file, 0)
        (got,) = torch.autograd.grad(loss, weight)
        assert torch.equal(got, wanted)
        assert torch.equal(gradient(weight), wanted)  # the file can grow further
    check(run)


def deeply(weight: Tensor) -> Tensor:
    x = weight
    for _ in range(20):
        x = (x.sin() * x).exp() * 0.5
    return x


# -- values without a recipe -----------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5, 7])
def test_value_without_recipe_is_kept_if_swap_write_fails(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No value is lost, but the budget may be too small then, as it would be without swapping."""
    weight = vector(True)
    (wanted,) = torch.autograd.grad(hoard(weight), weight)
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC, after=after))
    tracker, context = Tracker(), swapping(tmp_path, 10 * VECTOR)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(rekindle.OutOfBudget) as caught, tracker, context as run:
            hoard(weight)
    assert tracker.peak <= 10 * VECTOR
    assert caught.value.smallest_budget > 10 * VECTOR
    reported = [
        *(str(warning.message) for warning in found),
        *getattr(caught.value, "__notes__", []),
    ]
    # If a copy that was made early failed, there is a warning. Otherwise the error has a note.
    assert len(reported) == 1
    assert "could not be written" in reported[0]
    check(run)
    (wanted,) = torch.autograd.grad(hoard(weight) + deeply(weight).sum(), weight)
    with warned("No space left"), Tracker() as tracker, swapping(tmp_path, 40 * VECTOR) as run:
        (got,) = torch.autograd.grad(hoard(weight) + deeply(weight).sum(), weight)
    assert torch.equal(got, wanted)
    assert tracker.peak <= 40 * VECTOR
    check(run)


def test_values_without_recipe_are_written_to_swap_once(tmp_path: Path) -> None:
    """Nothing can write a value that only autograd holds, so its first copy stays valid."""
    weight = vector(True)
    with swapping(tmp_path, 10 * VECTOR) as run:
        torch.autograd.grad(hoard(weight), weight)
    assert swapped(run).out <= 20 * VECTOR


def test_lost_value_without_recipe_raises_swap_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step raises an error, the weights are unchanged, and the next step works."""
    weight = vector(True)
    before = weight.detach().clone()
    (wanted,) = torch.autograd.grad(hoard(weight), weight)
    read = os.preadv
    with swapping(tmp_path) as run:
        loss = hoard(weight)
        monkeypatch.setattr(os, "preadv", failing(read, errno.EIO))
        with pytest.raises(
            rekindle.SwapFailed, match=r"aten::sin could not be read back: .* cannot be recomputed"
        ):
            torch.autograd.grad(loss, weight)
        del loss
        monkeypatch.setattr(os, "preadv", read)
        assert torch.equal(weight, before)
        (got,) = torch.autograd.grad(hoard(weight), weight)
    assert torch.equal(got, wanted)
    check(run)


# -- writes and reads during other work ------------------------------------------------------------


@pytest.fixture
def sluggish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a slow disk: each copy is still in progress when the program continues."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda *call: (time.sleep(0.003), write(*call))[1])
    monkeypatch.setattr(os, "preadv", lambda *call: (time.sleep(0.003), read(*call))[1])


@pytest.mark.usefixtures("sluggish")
@pytest.mark.parametrize("vectors", [9, 14, 20])
def test_evicted_memory_counts_until_its_swap_write_ends(vectors: int, tmp_path: Path) -> None:
    weight = vector(True)
    wanted = gradient(weight)
    with Tracker() as tracker, swapping(tmp_path, vectors * VECTOR) as run:
        for _ in range(2):
            assert torch.equal(gradient(weight), wanted)
    assert tracker.peak <= vectors * VECTOR
    assert run.peak <= vectors * VECTOR
    assert swapped(run).waiting_ns > 0
    check(run)


@pytest.mark.usefixtures("sluggish")
def test_deleted_value_counts_until_its_swap_write_ends(tmp_path: Path) -> None:
    """The value is copied early, and the program deletes it before the copy has ended."""
    weight = vector(True)
    swap = Swap(out_bytes_per_s=10**12, in_bytes_per_s=10**12)
    with Tracker() as tracker, swapping(tmp_path, swap=swap) as run:
        for _ in range(4):
            gradient(weight, 12)
            loss = deeply(weight).sum()
            del loss
            # allocate at once, before a byte of the copy was written
            rows = [weight.detach() * 2 for _ in range(15)]
            del rows
    assert tracker.peak <= TIGHT
    assert swapped(run).out > 0
    check(run)


class Scribbler(torch.autograd.Function):
    """A function whose backward pass overwrites its saved tensor after the last use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradients[0] * y.mul_(2)


@pytest.mark.usefixtures("sluggish")
def test_value_is_not_overwritten_while_it_is_written_to_disk(tmp_path: Path) -> None:
    def slope(weight: Tensor) -> Tensor:
        x = weight
        for _ in range(12):
            x = Scribbler.apply(x).exp() * 0.1
        return torch.autograd.grad(x.sum(), weight)[0]

    weight = vector(True)
    wanted = slope(weight)
    with swapping(tmp_path) as run:
        for _ in range(2):
            assert torch.equal(slope(weight), wanted)
    assert swapped(run).out > 0
    check(run)


@pytest.mark.usefixtures("sluggish")
@pytest.mark.parametrize("nth", range(0, 90, 9))
def test_step_after_exception_during_swap_matches_pytorch(nth: int, tmp_path: Path) -> None:
    """An operator raises while copies are in progress. The next steps give the same bits.

    The memory of these copies is freed.
    """

    class Bang(Exception):
        pass

    class Failing(Tracker):
        left = nth

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.left -= 1
            if self.left == 0:
                raise Bang
            return super().__torch_dispatch__(func, types, args, kwargs)

    weight = vector(True)
    wanted = gradient(weight)
    with Failing() as tracker, swapping(tmp_path, 24 * VECTOR) as run:
        with suppress(Bang):
            gradient(weight)
        assert torch.equal(gradient(weight), wanted)
    assert tracker.peak <= 24 * VECTOR
    check(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(12), 4))
def test_random_swap_faults_match_pytorch_within_budget(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes and reads fail at random, while values are both swapped and recomputed."""
    generator = torch.Generator().manual_seed(seed)
    write, read = os.pwrite, os.preadv

    def perhaps(call: Call) -> Call:
        def instead(*arguments: Any) -> Any:
            if torch.rand((), generator=generator) < 0.1:
                raise OSError(errno.EIO, "perhaps")
            return call(*arguments)

        return instead

    weight = vector(True)
    wanted = gradient(weight)
    monkeypatch.setattr(os, "pwrite", perhaps(write))
    monkeypatch.setattr(os, "preadv", perhaps(read))
    swap = ONLY if seed % 2 else Swap(out_bytes_per_s=10**9, in_bytes_per_s=10**9)
    with warnings.catch_warnings(), Tracker() as tracker:
        warnings.simplefilter("ignore")
        with swapping(tmp_path, swap=swap) as run:
            for _ in range(20):
                assert torch.equal(gradient(weight), wanted)
    assert tracker.peak <= TIGHT
    check(run)


assert WIDTH * 4 == VECTOR
