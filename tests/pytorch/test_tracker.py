"""Tests of the tracker against sums by hand. A float32 vector of 1,000 is 4,000 bytes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pytorch.tracker import Measured, Tracker, measure


@pytest.fixture
def x() -> torch.Tensor:
    """Made before any tracker: it counts from the first operator that is given it."""
    return torch.ones(1000)


def test_tracker_counts_living_bytes_and_peak(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        assert (tracker.alive, tracker.peak) == (0, 0)
        y = x + 1
        assert (tracker.alive, tracker.peak) == (8_000, 8_000)
        z = y * 2
        assert (tracker.alive, tracker.peak) == (12_000, 12_000)
        del y
        assert (tracker.alive, tracker.peak) == (8_000, 12_000)
        z = z.sum()  # 4 bytes while z is there, then alone with x
        assert (tracker.alive, tracker.peak) == (4_004, 12_000)
    tracker.check()


def test_tracker_counts_frees_after_its_context(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        y = x + 1
    del y
    assert tracker.alive == 4_000


def test_views_and_writes_are_the_same_memory(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        part = x[:10].view(2, 5).t()
        x.add_(1)
        torch.mul(x, 2, out=x)
        assert (tracker.alive, tracker.peak) == (4_000, 4_000)
        del x, part
    # The fixture still holds x.
    assert tracker.alive == 4_000


def test_a_view_keeps_the_whole_storage() -> None:
    with Tracker() as tracker:
        part = torch.ones(1000)[:1]
        assert tracker.alive == 4_000
        part = part.clone()
        assert (tracker.alive, tracker.peak) == (4, 4_004)


def test_tracker_counts_storage_bytes_by_dtype(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        made = [x.to(torch.bfloat16), x > 0, x.to(torch.int64), x.expand(1000, 1000)]
        assert tracker.alive == 4_000 + 2_000 + 1_000 + 8_000
        del made


def test_follows_a_storage_that_is_resized() -> None:
    with Tracker() as tracker:
        y = torch.ones(10)
        y.resize_(1000)
        assert tracker.alive == 4_000
        z = torch.empty(0)
        torch.add(y, 1, out=z)
        assert tracker.alive == 8_000
        y.untyped_storage().resize_(0)  # not an operator: seen at the next one
        y.detach()
        assert tracker.alive == 4_000
        tracker.check()


def test_a_new_storage_at_an_old_address_counts(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        for _ in range(100):
            y = x + 1
            assert tracker.alive == 8_000
            del y
            assert tracker.alive == 4_000
    assert tracker.peak == 8_000


def test_lists_of_tensors_are_seen(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        rows = [x + 1, x + 2]
        torch._foreach_add_(rows, [x, x])
        doubled = torch._foreach_mul(rows, 2)
        assert (tracker.alive, len(doubled)) == (20_000, 2)
        torch.cat(rows)  # not kept
        assert (tracker.alive, tracker.peak) == (20_000, 28_000)


def test_memory_that_only_autograd_holds_counts(x: torch.Tensor) -> None:
    x.requires_grad_()
    with Tracker() as tracker:
        loss = (x * 2).exp().sum()  # exp saves its result; mul by a number saves nothing
        assert tracker.alive == 4_000 + 4_000 + 4
        assert tracker.peak == 12_000  # x, 2 * x, exp; 2 * x is gone at the sum
        loss.backward()
        assert tracker.alive == 4_000 + 4 + 4_000  # x, the loss, the gradient
        tracker.check()


def test_sees_through_a_mode_inside(x: torch.Tensor) -> None:
    class Twice(TorchDispatchMode):
        """Runs each operator twice and keeps both results for the moment."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            first = func(*args, **(kwargs or {}))
            second = func(*args, **(kwargs or {}))
            assert first is not second
            return second

    with Tracker() as tracker, Twice():
        y = x + 1
    assert (tracker.alive, tracker.peak) == (8_000, 12_000)
    del y


def test_shapes_without_memory_do_not_count() -> None:
    with Tracker() as tracker:
        torch.empty(1000, device="meta") + 1
    assert tracker.peak == 0


def test_an_error_in_an_operator_leaves_the_count_right(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        with pytest.raises(RuntimeError):
            x @ torch.ones(3)
        assert tracker.alive == 4_000
        tracker.check()


def test_measures_a_training_run() -> None:
    weight = torch.ones(1000, requires_grad=True)
    batch = torch.ones(1000)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            ((weight * batch).exp() + 1).exp().sum().backward()
            optimizer.step()

    measured = measure(steps)
    # Weight, gradient, momentum, batch.
    assert measured.constants == 16_000
    # The second step, on top of weight, momentum and batch: at the start of its backward pass both
    # results of exp are alive, the loss and its gradient (a number each), and the first product.
    assert measured.peak == 12_000 + 2 * 4_000 + 2 * 4 + 4_000
    assert measured.activations == 8_008


def test_returned_memory_counts_as_constant() -> None:
    measured = measure(lambda: torch.ones(1000) + 1)
    assert measured == Measured(peak=8_000, constants=4_000)
    assert measured.budget(1.0) == 8_000
    assert measured.budget(0.3) == 5_200
    assert measured.activations == 4_000
