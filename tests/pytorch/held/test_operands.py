"""Tests that all operands of an operator are in memory, and not evicted, until it has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.pytorch.harsh import deeper, harshest
from tests.pytorch.sweep import _everything

Step = Callable[[], object]


def test_spectral_norm_with_evict_anything_matches_pytorch() -> None:
    """Spectral norm has an operator that reads a vector and also the input of that vector."""

    def program() -> Step:
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(layer.parameters(), 0.05)
        x = torch.rand(4, 16)

        def step() -> object:
            loss = torch.zeros(())
            for _ in range(2):
                loss = layer(layer(x)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss, layer

        return step

    harshest(program, evict="anything", split="never")


def test_recomputed_operand_is_pinned_while_other_is_recomputed() -> None:
    """The operator `c + a` needs both operands, which are evicted. The budget holds three vectors.

    `a` is recomputed first. It must not be evicted while `c` is recomputed.
    """
    nbytes = 4 * 1_000
    with torch.no_grad(), rekindle.budget(3 * nbytes, evict="anything") as run:
        a = torch.ones(1_000) * 2
        b = a.exp()
        c = b.neg()
        _everything.evict_all(run)
        total = c + a
        run._driver.engine.check()
    assert torch.equal(total, 2 - b)


_pools: list[ThreadPoolExecutor] = []  # the operator below uses the last pool


# The thread for which the operator waits answers each time.
rekindle.recomputable("rekindle_tests::doubled_elsewhere")


@torch.library.custom_op("rekindle_tests::doubled_elsewhere", mutates_args=())
def doubled_elsewhere(x: Tensor) -> Tensor:
    pool = _pools[-1]
    doubled = pool.submit(lambda: x * 2).result(timeout=60)
    pool.submit(int).result()  # then the thread no longer has a reference to `doubled`
    return doubled


@doubled_elsewhere.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def _pools_end() -> Iterator[None]:
    yield
    while _pools:
        _pools.pop().shutdown()


@pytest.mark.usefixtures("_pools_end")
@pytest.mark.parametrize("started", ["before", "during"])
@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_operator_that_waits_for_thread_matches_pytorch(
    evict: Literal["saved", "anything"], started: str
) -> None:
    """An operator waits for a thread that runs operators, in its first run and when recomputed.

    The thread's operators must not wait for that operator, because both would wait for ever.
    """

    # Each case has its own size, because workspaces are measured once per size and process.
    size = 1_000 if started == "before" else 999

    def program() -> Step:
        x = torch.rand(size)

        def step() -> object:
            _pools.append(ThreadPoolExecutor(1))
            if started == "before":
                _pools[-1].submit(int).result()
            weight = torch.rand(size, requires_grad=True)
            losses = [deeper(weight * doubled_elsewhere(x.sin()), 2).sum() for _ in range(4)]
            sum(losses, torch.zeros(())).backward()
            return weight, losses

        return step

    again = harshest(program, evict=evict, policy=rekindle.policies.LRU()).again
    # If the thread started earlier, Rekindle records the operators that it runs, and recomputes
    # `mul`. If the waiting operator started the thread, Rekindle recomputes that operator instead.
    assert again["mul" if started == "before" else "rekindle_tests::doubled_elsewhere"] > 0


@pytest.mark.parametrize("first", ["saved", "anything"])
def test_graph_of_earlier_budget_runs_within_later_one(
    first: Literal["saved", "anything"],
) -> None:
    """A graph was recorded in a budget that has ended. Another budget runs its backward pass."""

    def program() -> Step:
        weight = torch.rand(1_000, requires_grad=True)
        with rekindle.budget(_everything.AMPLE, evict=first) as earlier:
            middle = deeper(weight)
        _everything.evict_all(earlier)

        def step() -> object:
            loss = deeper(middle).sum() * middle.sum()
            loss.backward()
            return weight, loss

        return step

    harshest(program, evict="anything")


def test_write_through_data_of_inference_tensor_matches_pytorch() -> None:
    """Inference tensors have no version counters, so `y` and `y.data` cannot share one."""
    x = torch.rand(1_000)
    with rekindle.budget(4 * x.nbytes, evict="anything") as run, torch.inference_mode():
        y = x + 1
        y.data.mul_(2)
        made = [x.sin() for _ in range(5)]
    assert torch.equal(y, (x + 1) * 2)
    assert all(torch.equal(each, x.sin()) for each in made)
    assert run.evictions > 0


@pytest.mark.parametrize("apart", [True, False])
def test_attention_to_itself_is_recomputed_with_equal_bits(apart: bool) -> None:
    """The kernel makes one product if query, key and value are the same object, else three."""

    def attended(x: Tensor) -> Tensor:
        operands = (x.clone(), x.clone(), x.clone()) if apart else (x, x, x)
        return torch._native_multi_head_attention(
            *operands, 8, 2, weight, bias, last, last_bias, None, False
        )[0]

    torch.manual_seed(645)
    x = torch.randn(64, 16, 8)
    weight, bias, last, last_bias = (torch.rand(size) for size in ((24, 8), 24, (8, 8), 8))
    expected = attended(x * 2).clone()
    with rekindle.budget("512KiB", evict="anything") as run:
        found = attended(x * 2)
        torch.ones(115 << 10)
        before = run.recomputations
        found = found.clone()
        assert run.recomputations > before
    assert torch.equal(found, expected)
