"""Programs of two to four threads within one budget, in a random order that a seed decides.

`python -m tests.pytorch.native.schedules EVICT FIRST COUNT`: one thread runs at a time. Another
thread may take over before each operator, inside the kernels of some operators, and where the core
asks Python about threads. Each program runs first in plain PyTorch, then within a budget, which
gives the same bits or raises `OutOfBudget`, at most 40 times. The outcomes are printed as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.pytorch.held import _evict_held
from rekindle.pytorch.native import core as native_core
from tests.pytorch.planted import replaced

WIDTH = 1_000
STEPS = 3
PATIENCE_S = 60.0
MOST_ATTEMPTS = 40
core: Any = native_core()


class Stopped(BaseException):
    """Raised in the other threads after one thread failed, to end them."""


@final
class Turns:
    """Let one thread run at a time, in a random order that a seed decides."""

    now: Turns | None = None

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._threads: list[int] = [threading.get_ident()]
        self._turn = threading.get_ident()
        self.stopped = False

    @classmethod
    def switch(cls) -> None:
        """Let another thread continue if the seed says so, and wait for the next turn."""
        turns = cls.now
        if turns is not None and not core.has_lock():
            turns._switch()

    def _switch(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if me not in self._threads:
                return
            if self._turn == me:
                self._turn = self._random.choice(self._threads)
                self._changed.notify_all()
            self._wait(me)

    def _wait(self, me: int) -> None:
        if not self._changed.wait_for(lambda: self._turn == me or self.stopped, PATIENCE_S):
            self.stopped = True
            raise AssertionError("no thread is left that could continue")
        if self.stopped:
            raise Stopped

    def run(self, work: Callable[[], None]) -> threading.Thread:
        """Start a thread that runs `work` in turn with the others."""
        failures: list[BaseException] = []
        begun = threading.Event()

        def run() -> None:
            me = threading.get_ident()
            with self._changed:
                self._threads.append(me)
                begun.set()
            try:
                with self._changed:
                    self._wait(me)
                with Switching():
                    work()
            except Stopped:
                pass
            except BaseException as error:
                failures.append(error)
            with self._changed:
                self._threads.remove(me)
                self.stopped = self.stopped or bool(failures)
                self._turn = self._random.choice(self._threads)
                self._changed.notify_all()

        thread = threading.Thread(target=run)
        thread.failures = failures  # type: ignore[attr-defined]
        thread.start()
        begun.wait()
        return thread

    def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._switch()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


class Switching(TorchDispatchMode):
    """A dispatch mode that may let another thread run before each operator of this thread."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Turns.switch()
        return func(*args, **(kwargs or {}))


def switching(compute: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a kernel that computes `compute`, and in which another thread may take over."""

    def kernel(x: Tensor) -> Tensor:
        Turns.switch()
        made = compute(x, out=torch.empty_like(x))
        Turns.switch()
        return made

    return kernel


@torch.library.custom_op("rekindle_schedules::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    Turns.switch()
    made = x * 1.25
    Turns.switch()
    return made


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: gradient * 1.25, setup_context=lambda **_: None)


class Square(torch.autograd.Function):
    """A custom function that reads its saved tensor between operators."""

    @staticmethod
    def forward(ctx, x):
        made = x.sin().sin()
        ctx.save_for_backward(x)
        return x * x + made * 0

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        other = gradient.tanh()
        return 2 * gradient * x + other * 0


@dataclass
class Program:
    """The state that the threads share, and their results."""

    turns: Turns
    kinds: random.Random
    ahead: deque[Tensor] = field(default_factory=deque)
    made: deque[Tensor] = field(default_factory=deque)
    left: dict[str, Tensor] = field(default_factory=dict)
    over: bool = False

    def block(self, x: Tensor, weight: Tensor, kind: int) -> Tensor:
        y = x * weight
        if kind == 0:
            return y.sin() * y
        if kind == 1:
            return torch.tanh(y) + x
        if kind == 2:
            return scaled(y).cos()
        if kind == 3:
            return Square.apply(y)
        if kind == 4:
            return y.view(10, -1).t().reshape(-1).sin()
        return torch.nn.functional.normalize(y, dim=-1) * (x.abs() + 0.1).sqrt()

    def train(self, name: str, blocks: list[int], *, fetch: bool) -> None:
        torch_random = torch.Generator().manual_seed(len(name))
        weights = [
            (torch.rand(WIDTH, generator=torch_random) + 0.5).requires_grad_() for _ in range(2)
        ]
        x = torch.rand(WIDTH, generator=torch_random)
        for step in range(STEPS):
            if fetch:
                self.turns.wait_for(lambda: bool(self.ahead))
                x = self.ahead.popleft()
            y = x
            for number, kind in enumerate(blocks):
                y = self.block(y, weights[number % 2], kind)
            y.square().mean().backward()
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight -= 0.1 * weight.grad
                    weight.grad = None
            if fetch:
                self.made.append(y.detach())
            del y
            self.left[f"{name} {step}"] = weights[0].detach().clone()
        for number, weight in enumerate(weights):
            self.left[f"{name} weight {number}"] = weight.detach()

    def prefetch(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for _ in range(STEPS):
            x = torch.randn(WIDTH, generator=generator)
            y = torch.nn.functional.normalize(x.sin(), dim=-1) + x.flip(0) * 0.1
            z = (y.tanh() * x).sin()
            self.turns.wait_for(lambda: len(self.ahead) < 2)
            self.ahead.append(y + z * 0.5)

    def measure(self) -> None:
        running = torch.zeros(WIDTH)
        with torch.no_grad():
            while True:
                self.turns.wait_for(lambda: self.over or bool(self.made))
                if not self.made:
                    break
                y = self.made.popleft()
                centered = (y - y.mean()).sin()
                running = running * 0.9 + centered.tanh() * 0.1
                assert len(centered.tolist()) == WIDTH
        self.left["running"] = running

    def run(self) -> None:
        works = [self.prefetch]
        if self.kinds.random() < 0.6:
            works.append(self.measure)
        if self.kinds.random() < 0.4:
            other = self._blocks()
            works.append(lambda: self.train("other", other, fetch=False))
        blocks = self._blocks()
        threads = [self.turns.run(work) for work in works]
        try:
            with Switching():
                self.train("main", blocks, fetch=True)
            self.over = True
            self.turns.wait_for(lambda: not any(map(threading.Thread.is_alive, threads)))
        except Stopped:
            pass
        finally:
            self.turns.stop()
            for thread in threads:
                thread.join()
            Turns.now = None  # no switch in the recomputations at the end of the budget
        for thread in threads:
            for failure in thread.failures:  # type: ignore[attr-defined]
                raise failure

    def _blocks(self) -> list[int]:
        return [self.kinds.randrange(6) for _ in range(self.kinds.randint(3, 8))]


def ran(seed: int, turns_seed: int, **how: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the results of the program of `seed`, and its run."""
    torch.manual_seed(seed)
    program = Program(Turns(turns_seed), random.Random(seed))
    Turns.now = program.turns
    run = None
    try:
        if how:
            with rekindle.budget(learn=False, cache=False, **how) as run:
                program.run()
        else:
            program.run()
    finally:
        Turns.now = None
    return {name: value.clone() for name, value in program.left.items()}, run


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def outcome(seed: int, evict: str) -> str:
    expected, _ = ran(seed, seed)
    _, roomy = ran(seed, seed, amount=None)
    amount = int(roomy.peak * random.Random(seed + 1).uniform(0.25, 0.9))
    refused = 0
    for attempt in range(MOST_ATTEMPTS):
        try:
            found, run = ran(seed, seed + 1_000 * attempt, amount=amount, evict=evict)
        except rekindle.OutOfBudget as error:
            refused += 1
            amount = max(amount + WIDTH, error.smallest_budget or 0)
            continue
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:100]}"
        if found.keys() != expected.keys():
            return "not all was done"
        if not all(torch.equal(bits(found[name]), bits(expected[name])) for name in expected):
            return "other bits"
        core.check(run._driver.handle)
        if run.peak > amount:
            return "the budget was passed"
        if amount > 1.2 * roomy.peak:
            return "more than plainly was needed"
        return "evicted" if run.evictions else "fitted"
    return "refused too often"


def main(evict: str, first: int, count: int) -> None:
    torch.set_num_threads(1)
    original = _evict_held.EvictHeld.all_threads_are_known

    def switching_check(held: Any) -> bool:
        Turns.switch()
        found = original(held)
        Turns.switch()
        return found

    _evict_held.EvictHeld.all_threads_are_known = switching_check  # type: ignore[method-assign]
    core.fix_costs(1_000)
    seen: Counter[str] = Counter()
    wrong: list[int] = []
    with replaced("sin", switching(torch.sin)), replaced("tanh", switching(torch.tanh)):
        for seed in range(first, first + count):
            found = outcome(seed, evict)
            seen[found] += 1
            if found not in ("evicted", "fitted"):
                wrong.append(seed)
    sys.stdout.write(json.dumps({"seen": seen, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
