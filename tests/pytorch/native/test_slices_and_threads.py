"""Tests of operators that run in slices while another thread writes what they read."""

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
from tests.pytorch.planted import replaced

pytestmark = pytest.mark.skipif(native_core() is None, reason="no native core")

ROWS, WIDTH, WORDS = 4096, 64, 1024
MIB = 1 << 20


class Interrupted:
    """A kernel for `sin` during which another thread runs `work`, but only once.

    The thread starts and ends with the context, which is entered within a budget.
    """

    def __init__(self) -> None:
        self.work: Callable[[], object] | None = None
        self.failure: BaseException | None = None
        self.ran = False
        self._due = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Interrupted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.work = None
        self._due.set()
        self._thread.join()

    def __call__(self, x: Tensor) -> Tensor:
        made = torch.sin(x, out=torch.empty_like(x))
        if self.work is not None and not self._due.is_set():
            self._due.set()
            self._over.wait()
        return made

    def _run(self) -> None:
        self._due.wait()
        try:
            if self.work is not None:
                self.ran = True
                self.work()
        except BaseException as error:
            self.failure = error
        self._over.set()


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(WORDS, WIDTH, generator=generator),
        torch.randint(WORDS, (ROWS,), generator=generator),
    )


@pytest.mark.parametrize("evict", ["auto", "anything"])
@pytest.mark.parametrize("mib", [6.0, 17.5, 18.0, 18.5, 19.0, 20.0, 22.0])
def test_write_to_weight_while_slices_read_it_changes_no_bit(mib: float, evict: str) -> None:
    inputs, weight, words = drawn()
    expected = functional.cross_entropy(inputs.sin() @ weight.t(), words)
    before = weight.clone()
    sin = Interrupted()
    with threads_set(1), replaced("sin", sin):
        try:
            with (
                rekindle.budget(
                    int(mib * MIB), evict=evict, split="equal", learn=False, cache=False
                ) as run,
                sin,
            ):
                x = inputs.sin()
                scores = x @ weight.t()
                del x
                torch.ones(int((mib - 1.8) * MIB / 4))  # evicts `x`, which the loss reads again
                sin.work = lambda: weight.mul_(0.5)
                loss = functional.cross_entropy(scores, words)
        except rekindle.OutOfBudget as error:
            # scores that have no room cannot outlive the weight
            assert "had no room in the budget" in str(error)
            assert mib < 18.5
        else:
            assert torch.equal(loss, expected)
            assert run.peak <= mib * MIB
    assert sin.ran
    if sin.failure is not None:
        assert isinstance(sin.failure, rekindle.OutOfBudget)
        assert torch.equal(weight, before)
    else:
        assert torch.equal(weight, before * 0.5)
