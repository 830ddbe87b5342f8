"""Tests of custom operators whose body, in Python, does more than call operators.

A body may read addresses and arrays, call autograd functions, start threads and wait for them, in
its first run and when it is recomputed. The core's lock is not held while the body runs.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle

rekindle.recomputable("rekindle_amid::*")  # bodies that wait for threads are tried as well
N = 4096
EVICT = ("saved", "auto", "anything")


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


def _by_address(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    ctypes.memmove(made.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
    return made


def _after(look: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        look(x)
        return x.clone()

    return body


BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "address": _by_address,
    "numpy": _after(lambda x: x.numpy().sum()),
    "array": _after(lambda x: x.__array__().sum()),
    "storage": _after(lambda x: x.untyped_storage().nbytes()),
    "tolist": _after(lambda x: x[:2].tolist()),
    "item": _after(lambda x: x[0].item()),
    "repr": _after(lambda x: repr(x)),
    "dlpack": _after(lambda x: torch.from_dlpack(x.detach())),
    "list of tensors": _after(lambda x: torch.tensor([x[0], x[1]])),
    "function": lambda x: Copy.apply(x),
}


def _operator(name: str, body: Callable[[Tensor], Tensor]) -> Any:
    made = torch.library.custom_op(
        f"rekindle_amid::{name.replace(' ', '_')}",
        lambda x: body(x),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    made.register_fake(torch.empty_like)
    made.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return made


OPERATORS = {name: _operator(name, body) for name, body in BODIES.items()}


def _step(operator: Any, layers: int = 8) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(N, requires_grad=True)
    y = x
    for _ in range(layers):
        y = operator(y).sin()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("evict", EVICT)
@pytest.mark.parametrize("name", BODIES)
def test_operator_that_reads_its_operand_in_python_is_recomputed(name: str, evict: Any) -> None:
    plain = _step(OPERATORS[name])
    with rekindle.budget(9 * 4 * N, evict=evict, learn=False) as run:
        found = _step(OPERATORS[name])
        run._driver.engine.check()
    assert torch.equal(found, plain)
    assert run.recomputations > 8
    assert run.peak <= 9 * 4 * N


@pytest.mark.parametrize("evict", EVICT)
@pytest.mark.parametrize("look", [Tensor.numpy, Tensor.untyped_storage, Tensor.data_ptr])
def test_operator_that_exports_detached_operand_matches_pytorch(
    look: Callable[[Tensor], object], evict: Any
) -> None:
    twice = _operator(f"twice_{look.__name__}_{evict}", lambda x: (look(x), x * 2)[1])

    def step() -> Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        pool = [layer(torch.randn(60, 8))]
        for _ in range(2):
            y = pool[-1] + twice(pool[-1].detach())
            pool.append(torch.stack([*pool, y]).mean(0).sin())
        pool[-1].square().mean().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    plain = step()
    budget = 4000
    while True:
        try:
            with rekindle.budget(budget, evict=evict, learn=False):
                found = step()
        except rekindle.OutOfBudget as error:
            budget = max(budget + 64, error.smallest_budget)
        else:
            break
    assert torch.equal(found, plain)


# -- threads --------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[list[ThreadPoolExecutor]]:
    """Return the thread pools of the test. A pool's thread belongs to the budget it starts in."""
    pools: list[ThreadPoolExecutor] = []
    yield pools
    for each in pools:
        each.shutdown()


def _pooled(pools: list[ThreadPoolExecutor], work: Callable[[Tensor], Tensor], name: str) -> Any:
    return _operator(name, lambda x: pools[-1].submit(work, x).result(timeout=60).clone())


@pytest.mark.parametrize("evict", EVICT)
def test_operator_that_waits_for_thread_is_recomputed(
    evict: Any, pool: list[ThreadPoolExecutor]
) -> None:
    operator = _pooled(pool, lambda x: x * 2, f"pooled_{evict}")
    pool.append(ThreadPoolExecutor(1))
    plain = _step(operator)
    with rekindle.budget(14 * 4 * N, evict=evict, learn=False) as run:
        pool.append(ThreadPoolExecutor(1))
        pool[-1].submit(int).result()
        found = _step(operator, 8)
        run._driver.engine.check()
    assert torch.equal(found, plain)
    assert run.recomputations > 0


def test_backward_pass_during_recomputation_matches_pytorch(
    pool: list[ThreadPoolExecutor],
) -> None:
    """A thread of the recomputed operator runs a backward pass, which recomputes values as well."""

    def work(x: Tensor) -> Tensor:
        with torch.enable_grad():
            w = x.detach().clone().requires_grad_()
            y = w
            for _ in range(4):
                y = y.sin()
            (gradient,) = torch.autograd.grad(y.sum(), w)
        return gradient

    operator = _pooled(pool, work, "nested")
    pool.append(ThreadPoolExecutor(1))
    plain = _step(operator)
    with rekindle.budget(16 * 4 * N, evict="saved", learn=False) as run:
        pool.append(ThreadPoolExecutor(1))
        pool[-1].submit(int).result()
        found = _step(operator)
        run._driver.engine.check()
    assert torch.equal(found, plain)
    assert run.recomputations > 0


def test_operator_that_exports_operand_matches_pytorch_or_raises(
    pool: list[ThreadPoolExecutor],
) -> None:
    """Each recomputation of the operator exports its operand to NumPy, which may overwrite it.

    A value whose operand may have changed cannot be recomputed. Then the budget raises an error.
    """
    operator = _pooled(pool, lambda x: (x.detach().numpy(), x * 2)[1], "handed_out")

    def step() -> Tensor:
        torch.manual_seed(0)
        w = torch.randn(N, requires_grad=True)
        y = w.sin()
        for _ in range(4):
            y = (y + operator(y)).sin()
        y.sum().backward()
        assert w.grad is not None
        return w.grad

    pool.append(ThreadPoolExecutor(1))
    plain = step()
    ended: list[str] = []
    for vectors in range(6, 24):
        try:
            with rekindle.budget(vectors * 4 * N, learn=False):
                pool.append(ThreadPoolExecutor(1))
                pool[-1].submit(int).result()
                found = step()
        except rekindle.OutOfBudget:
            continue
        except RuntimeError as error:
            ended.append(str(error))
            continue
        assert torch.equal(found, plain)
    assert all("become unavailable again and again" in each for each in ended)


@pytest.mark.parametrize("seed", range(12))
def test_two_threads_that_recompute_alternately_match_pytorch(seed: int) -> None:
    """One thread runs at a time. At each operator, a seed decides which thread continues."""
    schedule = _Schedule(seed, 2)
    turn = torch.library.custom_op(
        f"rekindle_amid::turn_{seed}",
        lambda x: (schedule.switch(), x.clone())[1],
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    turn.register_fake(torch.empty_like)
    turn.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    def step(shared: Tensor, which: int) -> Tensor:
        w = torch.full((N,), 0.1 * (which + 1), requires_grad=True)
        y = w * shared
        for _ in range(8):
            y = turn(y).sin().mul_(1.5)
        y.sum().backward()
        assert w.grad is not None
        return w.grad

    plain = [step(torch.ones(N), which) for which in range(2)]
    with rekindle.budget(24 * 4 * N, evict="saved", learn=False) as run:
        shared = torch.ones(N).mul(1.0)
        found: dict[int, Tensor] = {}
        failures: list[BaseException] = []

        def body(which: int) -> None:
            try:
                schedule.enter(which)
                found[which] = step(shared, which)
            except BaseException as error:
                failures.append(error)
            finally:
                schedule.leave(which)

        threads = [threading.Thread(target=body, args=(which,)) for which in range(2)]
        schedule.begin()
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
            assert not each.is_alive()
        run._driver.engine.check()
    if failures:
        raise failures[0]
    assert run.recomputations > 0
    for which in range(2):
        assert torch.equal(found[which], plain[which])


class _Schedule:
    """The order in which several threads run, drawn from a seed at each switching point."""

    def __init__(self, seed: int, n: int) -> None:
        # An operator whose body draws from a generator would not be recomputed.
        self._numbers = iter(random.Random(seed).choices(range(1 << 20), k=100_000))
        self._changed = threading.Condition()
        self._all = n
        self._there: set[int] = set()
        self._left: set[int] = set()
        self._next = 0
        self._on = False
        self._which = threading.local()

    def begin(self) -> None:
        self._on = True

    def enter(self, which: int) -> None:
        with self._changed:
            self._which.number = which
            self._there.add(which)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self._there) == self._all, 60)
            self._wait()

    def leave(self, which: int) -> None:
        with self._changed:
            self._left.add(which)
            self._draw()

    def switch(self) -> None:
        """Let another thread run here, and continue when it is this thread's turn again."""
        if self._on:
            with self._changed:
                self._draw()
                self._wait()

    def _draw(self) -> None:
        left = [each for each in range(self._all) if each not in self._left]
        if left:
            self._next = left[next(self._numbers) % len(left)]
        self._changed.notify_all()

    def _wait(self) -> None:
        mine = self._which.number
        assert self._changed.wait_for(lambda: self._next == mine, 60)


# -- saved tensors ---------------------------------------------------------------------------------


class _Keeps(torch.autograd.Function):
    """A function that notes whether it unpacks the same object that it saved."""

    same: bool

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.saved = saved
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (saved,) = ctx.saved_tensors
        _Keeps.same = saved is ctx.saved
        return grad_outputs[0] * 2, None


@pytest.mark.parametrize("evict", EVICT)
def test_saved_tensor_without_gradient_unpacks_to_same_object(evict: Any) -> None:
    x = torch.ones(N, requires_grad=True)
    with rekindle.budget(None, evict=evict):
        _Keeps.apply(x, torch.ones(N).mul(3)).sum().backward()
    assert _Keeps.same
