"""Tests of the memory tracker against sums by hand; a float32 vector of 1,000 has 4,000 bytes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pytorch.tracker import Measured, Tracker, measure


@pytest.fixture
def x() -> torch.Tensor:
    """Return a tensor made before any tracker; it counts from the first operator that reads it."""
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
        z = z.sum()  # 4 bytes while z exists, then only x and the result
        assert (tracker.alive, tracker.peak) == (4_004, 12_000)
    tracker.check()


def test_tracker_counts_memory_freed_after_its_context(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        y = x + 1
    del y
    assert tracker.alive == 4_000


def test_tracker_counts_views_and_writes_once(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        part = x[:10].view(2, 5).t()
        x.add_(1)
        torch.mul(x, 2, out=x)
        assert (tracker.alive, tracker.peak) == (4_000, 4_000)
        del x, part
    # The fixture still holds x.
    assert tracker.alive == 4_000


def test_tracker_counts_whole_storage_of_view() -> None:
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


def test_tracker_follows_resized_storage() -> None:
    with Tracker() as tracker:
        y = torch.ones(10)
        y.resize_(1000)
        assert tracker.alive == 4_000
        z = torch.empty(0)
        torch.add(y, 1, out=z)
        assert tracker.alive == 8_000
        y.untyped_storage().resize_(0)  # no operator: noticed at the next one
        y.detach()
        assert tracker.alive == 4_000
        tracker.check()


def test_tracker_counts_new_storage_at_old_address(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        for _ in range(100):
            y = x + 1
            assert tracker.alive == 8_000
            del y
            assert tracker.alive == 4_000
    assert tracker.peak == 8_000


def test_tracker_counts_results_returned_in_lists(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        rows = [x + 1, x + 2]
        torch._foreach_add_(rows, [x, x])
        doubled = torch._foreach_mul(rows, 2)
        assert (tracker.alive, len(doubled)) == (20_000, 2)
        torch.cat(rows)  # the result is not kept
        assert (tracker.alive, tracker.peak) == (20_000, 28_000)


def test_tracker_counts_memory_that_only_autograd_holds(x: torch.Tensor) -> None:
    x.requires_grad_()
    with Tracker() as tracker:
        loss = (x * 2).exp().sum()  # exp saves its result; mul by a number saves no tensor
        assert tracker.alive == 4_000 + 4_000 + 4
        assert tracker.peak == 12_000  # x, 2 * x and exp; 2 * x is freed before the sum
        loss.backward()
        assert tracker.alive == 4_000 + 4 + 4_000  # x, the loss and the gradient
        tracker.check()


def test_tracker_sees_operators_that_inner_mode_runs(x: torch.Tensor) -> None:
    class Twice(TorchDispatchMode):
        """A mode that runs each operator twice and holds both results for a moment."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            first = func(*args, **(kwargs or {}))
            second = func(*args, **(kwargs or {}))
            assert first is not second
            return second

    with Tracker() as tracker, Twice():
        y = x + 1
    assert (tracker.alive, tracker.peak) == (8_000, 12_000)
    del y


def test_tracker_ignores_fake_and_meta_tensors() -> None:
    with Tracker() as tracker:
        torch.empty(1000, device="meta") + 1
    assert tracker.peak == 0


def test_tracker_count_is_right_after_operator_raised(x: torch.Tensor) -> None:
    with Tracker() as tracker:
        with pytest.raises(RuntimeError):
            x @ torch.ones(3)
        assert tracker.alive == 4_000
        tracker.check()


def test_tracker_peak_of_training_equals_sum_by_hand() -> None:
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
    # The peak is at the start of the second step's backward pass. Weight, momentum and batch then
    # exist, both results of exp, the loss and its gradient (a number each), and the first product.
    assert measured.peak == 12_000 + 2 * 4_000 + 2 * 4 + 4_000
    assert measured.activations == 8_008


def test_measure_counts_memory_of_returned_tensor_as_constant() -> None:
    measured = measure(lambda: torch.ones(1000) + 1)
    assert measured == Measured(peak=8_000, constants=4_000)
    assert measured.budget(1.0) == 8_000
    assert measured.budget(0.3) == 5_200
    assert measured.activations == 4_000
