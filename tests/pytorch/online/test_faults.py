"""Tests of an error at every operator in turn, on first runs and on recomputations.

After each error the weights are unchanged, no mode or hook is left, memory is as before, and
training continues with the same bits.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import rekindle
from tests.differ.judge import smallest
from tests.pytorch.harsh import WIDTH, differing, everything
from tests.pytorch.tracker import Tracker

TIGHT = 14 * 4 * WIDTH


class Fault(Exception):
    pass


class Failing(Tracker):
    """A dispatch mode that raises before (or after) the `nth` operator that is executed."""

    def __init__(self, nth: int, error: type[BaseException], *, after: bool) -> None:
        super().__init__()
        self.nth, self.error, self.after = nth, error, after
        self.operators = 0
        self.in_backward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        now = self.operators == self.nth
        if now:
            self.in_backward = torch._C._current_graph_task_id() != -1
        if now and not self.after:
            raise self.error
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if now:
            raise self.error
        return result


def _network() -> nn.Module:
    torch.manual_seed(20)
    layer = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Tanh()
    )
    return nn.Sequential(*[layer() for _ in range(4)])


def _gradients(network: nn.Module, batch: Tensor) -> dict[str, Any]:
    torch.manual_seed(3)
    loss = network(batch).square().mean()
    loss.backward()
    return everything((loss.detach(), network))


ERRORS = (Fault, KeyboardInterrupt, MemoryError)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_step_after_failure_of_any_operator_matches_pytorch(after: bool) -> None:
    """One operator at a time fails: in the forward pass, the backward pass or a recomputation.

    The test fails if an error leaves a storage locked or memory counted that was freed.
    """
    batch = torch.rand(100, 8)
    wanted = _gradients(_network(), batch)
    budget = _harsh_enough(batch)
    for nth in count(1):
        network = _network()
        before = everything(network.state_dict())
        state = {name: value.clone() for name, value in network.state_dict().items()}
        error = ERRORS[nth % len(ERRORS)]
        with Failing(nth, error, after=after) as tracker, rekindle.budget(budget) as run:
            try:  # not `pytest.raises`, which would keep the frames and so the graph alive
                _gradients(network, batch)
            except error:
                pass
            # All operators have failed once. Their number depends on measured costs.
            else:
                assert nth > 200
                break
            assert _weights(everything(network.state_dict())) == _weights(before)
            run._driver.engine.check()
            # After a mode raised in the backward pass, PyTorch itself keeps the graph, also
            # without a budget. Training continues, but the same budget is then too small.
            if not tracker.in_backward:
                network.load_state_dict(state)  # running statistics may have changed
                network.zero_grad()
                stays = [*network.state_dict().values(), *state.values(), batch]
                tracker.count(stays)
                known = {tensor.untyped_storage()._cdata for tensor in stays}
                assert tracker.alive == sum(tracker._seen[key].size for key in known), "a leak"
                got = _gradients(network, batch)
                run._driver.engine.check()
        if tracker.in_backward:
            network.load_state_dict(state)
            network.zero_grad()
            with rekindle.budget(budget):
                got = _gradients(network, batch)
        assert differing(got, wanted) == []
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _weights(state: dict[str, Any]) -> list[list[float]]:
    return [value.tolist() for name, value in state.items() if "weight" in name or "bias" in name]


def _harsh_enough(batch: Tensor) -> int:
    """Return a tight budget that forces many recomputations."""

    def attempt(budget: int) -> int:
        with rekindle.budget(budget) as run:
            _gradients(_network(), batch)
        return run.recomputations

    again, budget, _ = smallest(attempt, 30_000)
    assert again > 5
    return budget + 2_000  # for the copy of the weights from which the test continues


class OutOfMemoryAfter(Tracker):
    """A dispatch mode that raises a simulated device OOM after the operator `name` has written."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.failed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name == self.name and not self.failed:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory (a stand-in)")
        return result


def test_failed_operator_that_wrote_part_of_list_is_not_retried() -> None:
    """A second run of the operator would add again to tensors that the first run changed."""
    weights = [torch.ones(3), torch.ones(4)]
    with (
        OutOfMemoryAfter("aten::_foreach_add_") as device,
        rekindle.budget(100 * TIGHT),
        pytest.raises(torch.OutOfMemoryError, match="a stand-in"),
    ):
        torch._foreach_add_(weights, 1.0)
    assert device.failed
    assert all(bool((weight == 2).all()) for weight in weights)
