"""Faults at every operator in turn, first runs and recomputations alike, and a device that is full.

After each: the weights are as they were, no mode or hook is left, the memory is back to what it
was, and training goes on to the same bits.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import rekindle
from tests.pytorch.harsh import WIDTH, deeper, differing, everything, vector
from tests.pytorch.tracker import Tracker

TIGHT = 14 * 4 * WIDTH


class Fault(Exception):
    pass


class Failing(Tracker):
    """Raises before (or after) the operator of number `nth` that reaches the machine."""

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
def test_every_operator_fails_once(after: bool) -> None:
    """Forward pass, backward pass and recomputations. Fails if a lock or a count is left over."""
    batch = torch.rand(100, 8)
    wanted = _gradients(_network(), batch)
    budget = _harsh_enough(batch)
    for nth in count(1):
        network = _network()
        before = everything(network.state_dict())
        state = {name: value.clone() for name, value in network.state_dict().items()}
        error = ERRORS[nth % len(ERRORS)]
        with Failing(nth, error, after=after) as tracker, rekindle.budget(budget) as run:
            try:  # not `pytest.raises`, which would keep the frames, and in them the graph
                _gradients(network, batch)
            except error:
                pass
            else:  # that was the last: how many there are depends on measured prices
                assert nth > 200
                break
            assert _weights(everything(network.state_dict())) == _weights(before)
            run._driver.engine.check()
            # After a mode raised in the backward pass PyTorch itself keeps the graph, plainly too:
            # training goes on, but with that beside it the same budget is too small.
            if not tracker.in_backward:
                network.load_state_dict(state)  # statistics may have moved
                network.zero_grad()
                stays = [*network.state_dict().values(), *state.values(), batch]
                tracker.see(stays)
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
    """A tight budget, in which much is recomputed."""
    budget = 30_000
    while True:
        try:
            with rekindle.budget(budget) as run:
                _gradients(_network(), batch)
        except rekindle.OutOfBudget as error:
            budget = error.smallest_budget + 2_000  # and the copy of the weights, to go on from
            continue
        assert run.recomputations > 5
        return budget


class Full(Tracker):
    """A device with room for `limit` bytes; beyond, operators raise as CUDA's allocator does."""

    def __init__(self, limit: int, library: str = "") -> None:
        """`library`: what the error says if it is not the allocator's."""
        super().__init__()
        self.limit = limit
        self.library = library
        self.refused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("aten::exp", "aten::mul") and self.alive + 4 * WIDTH > self.limit:
            self.refused += 1
            if self.library:
                raise RuntimeError(self.library)
            raise torch.OutOfMemoryError("CUDA out of memory (a stand-in)")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.python_core("the native one is for the CPU, whose allocator refuses nothing")
def test_what_the_device_refuses_is_tried_again_with_less_in_memory() -> None:
    """The budget is far too large for the device: more and more is evicted, and it works."""
    weight = vector(True)
    (plain,) = torch.autograd.grad(deeper(weight, 12).sum(), weight)
    with Full(TIGHT) as device, rekindle.budget(100 * TIGHT) as run:
        (gradient,) = torch.autograd.grad(deeper(weight, 12).sum(), weight)
    assert torch.equal(gradient, plain)
    assert device.refused > 0
    assert run.evictions > 0
    assert run.recomputations > 0
    run._driver.engine.check()


@pytest.mark.python_core("the native one is for the CPU, whose allocator refuses nothing")
def test_no_more_is_evicted_than_the_device_lacks() -> None:
    weight = vector(True)
    with Full(40 * weight.nbytes) as device, rekindle.budget(1000 * weight.nbytes) as run:
        loss = deeper(weight, 50).sum()
        held = run._driver.engine.memory
        loss.backward()
    assert device.refused > 0
    assert held > 20 * weight.nbytes


@pytest.mark.python_core("the native one is for the CPU, whose allocator refuses nothing")
@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"])
def test_a_library_that_has_no_memory_is_tried_again(text: str) -> None:
    weight = vector(True)
    (plain,) = torch.autograd.grad(deeper(weight, 12).sum(), weight)
    with Full(TIGHT, text) as device, rekindle.budget(100 * TIGHT):
        (gradient,) = torch.autograd.grad(deeper(weight, 12).sum(), weight)
    assert torch.equal(gradient, plain)
    assert device.refused > 0


@pytest.mark.python_core("the native one is for the CPU, whose allocator refuses nothing")
def test_a_device_that_is_too_small_says_who_holds_its_memory() -> None:
    weight = vector(True)

    def hoard() -> list[Tensor]:
        rows = [weight]
        for _ in range(20):
            rows.append(rows[-1].exp())
        return rows

    with Full(TIGHT) as device, rekindle.budget(100 * TIGHT) as run:
        with pytest.raises(torch.OutOfMemoryError, match="a stand-in") as caught:
            hoard()
        (note,) = caught.value.__notes__
        assert "held by your code" in note
        assert "Everything that may be evicted has been" in note
        refused = device.refused
        assert refused == 4  # the first time, with less, with much less, with nothing
        run._driver.engine.check()


class OutOfMemoryAfter(Tracker):
    """A device whose memory runs out in the midst of an operator, once: its work is half done."""

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


@pytest.mark.python_core("the native one is for the CPU, whose allocator refuses nothing")
@pytest.mark.parametrize("grad_mode", [True, False], ids=["recorded", "unrecorded"])
def test_what_is_tried_again_draws_the_same_random_numbers(grad_mode: bool) -> None:
    def draw() -> Tensor:
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad_mode):
            return torch.stack([torch.bernoulli(vector() / 2) for _ in range(3)])

    wanted = draw()
    with OutOfMemoryAfter("aten::bernoulli") as device, rekindle.budget(100 * TIGHT):
        got = draw()
    assert device.failed
    assert torch.equal(got, wanted)


def test_what_has_written_a_part_of_a_list_is_not_tried_again() -> None:
    """Once more would add twice."""
    weights = [torch.ones(3), torch.ones(4)]
    with (
        OutOfMemoryAfter("aten::_foreach_add_") as device,
        rekindle.budget(100 * TIGHT),
        pytest.raises(torch.OutOfMemoryError, match="a stand-in"),
    ):
        torch._foreach_add_(weights, 1.0)
    assert device.failed
    assert all(bool((weight == 2).all()) for weight in weights)
