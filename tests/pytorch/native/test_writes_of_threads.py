"""Tests of threads that write in place what another thread is recomputing a value from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rekindle
from rekindle import Run
from rekindle.pytorch.native import core as native_core
from tests.pytorch.bits import threads_set
from tests.pytorch.planted import replaced

pytestmark = pytest.mark.skipif(native_core() is None, reason="no native core")

ROWS, WIDTH, WORDS = 4096, 64, 1024
N = 1 << 18
MIB = 1 << 20
core: Any = native_core()


class Other:
    """A thread of the program that does `work` once this thread lets it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.failure: BaseException | None = None
        self._work = work
        self._due = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def began(self) -> bool:
        return self._due.is_set()

    def let(self) -> None:
        """Let the thread do its work, and wait until it is done."""
        self._due.set()
        self._over.wait()

    def _run(self) -> None:
        self._due.wait()
        try:
            self._work()
        except BaseException as error:
            self.failure = error
        self._over.set()


class Sin:
    """A kernel for `sin` that lets another thread work before it reads or after it has written."""

    def __init__(self, *, first: bool) -> None:
        self.other: Other | None = None
        self._first = first

    def __call__(self, x: Tensor) -> Tensor:
        if self._first:
            self._let()
        made = torch.sin(x, out=torch.empty_like(x))
        self._let()
        return made

    def _let(self) -> None:
        if self.other is not None and not self.other.began:
            self.other.let()


@contextmanager
def opened(mib: float, evict: str, sin: Sin) -> Iterator[Run]:
    """Open a budget in which `sin` is the kernel of `sin`."""
    with (
        threads_set(1),
        replaced("sin", sin),
        rekindle.budget(
            int(mib * MIB), evict=evict, split="equal", learn=False, cache=False
        ) as run,
    ):
        yield run
    assert run.peak <= mib * MIB


def evict_all(mib: float) -> None:
    torch.ones(int(mib * MIB / 4))


@pytest.mark.parametrize("evict", ["auto", "anything"])
@pytest.mark.parametrize("first", [True, False])
def test_input_of_recomputation_that_is_written_meanwhile(first: bool, evict: str) -> None:
    weight = torch.rand(N)
    expected = weight.clone().sin() * 3
    sin = Sin(first=first)
    with opened(6, evict, sin):
        x = weight.clone()
        y = x.sin()
        evict_all(4.5)
        sin.other = Other(lambda: x.mul_(0.5))
        z = y * 3
        assert sin.other.began
    assert sin.other.failure is None
    assert torch.equal(z, expected)
    assert torch.equal(x, weight * 0.5)


@pytest.mark.parametrize("evict", ["auto", "anything"])
def test_recomputation_while_its_input_is_half_written(evict: str) -> None:
    weight = torch.rand(N)
    expected = weight.clone().sin() * 3
    half = threading.Event()
    read = threading.Event()

    def tanh_(x: Tensor) -> Tensor:
        torch.tanh(x[: N // 2], out=x[: N // 2])
        if not core.has_lock():  # else the recomputation has to wait for this operator
            half.set()
            read.wait()
        torch.tanh(x[N // 2 :], out=x[N // 2 :])
        return x

    with opened(6, evict, Sin(first=True)), replaced("tanh_", tanh_):
        x = weight.clone()
        y = x.sin()
        evict_all(4.5)
        x.view(-1)  # restores `x`
        thread = threading.Thread(target=lambda: (x.tanh_(), half.set()))
        thread.start()
        half.wait()
        z = y * 3
        read.set()
        thread.join()
    assert torch.equal(z, expected)
    assert torch.equal(x, weight.tanh())


@pytest.mark.parametrize("evict", ["auto", "anything"])
@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("mib", [6.0, 17.5, 18.0, 18.5, 19.0, 20.0, 22.0])
def test_weight_that_slices_read_is_written_meanwhile(
    mib: float, within: bool, source: bool, evict: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    before = torch.randn(WORDS, WIDTH, generator=generator)
    words = torch.randint(WORDS, (ROWS,), generator=generator)

    def scores_of(x: Tensor, weight: Tensor) -> Tensor:
        scores = x @ weight.t()
        return scores.sin() if within else scores

    expected = functional.cross_entropy(scores_of(inputs.sin(), before), words)
    outside = before.clone()
    sin = Sin(first=False)
    weight = outside
    other: Other | None = None
    try:
        with opened(mib, evict, sin):
            weight = outside if source else outside.clone()
            x = inputs.sin()
            scores = scores_of(x, weight)
            del x
            evict_all(mib - 1.8)
            other = sin.other = Other(lambda: weight.mul_(0.5))
            loss = functional.cross_entropy(scores, words)
            assert other.began
    except rekindle.OutOfBudget as error:
        refused = str(error)
    else:
        refused = ""
        assert torch.equal(loss, expected)
    # scores that have no room cannot outlive a weight without a recipe
    assert not refused or "had no room in the budget" in refused
    assert bool(refused) == (source and mib < 18.5)
    assert other is not None
    if other.failure is not None:
        assert isinstance(other.failure, rekindle.OutOfBudget)
        assert torch.equal(weight, before)
    else:
        assert torch.equal(weight, before * 0.5)
