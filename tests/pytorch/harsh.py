"""Run a program in plain PyTorch, then within the smallest budget that works, and compare all bits.

A program builds what it needs (weights, data) and returns its step function. The results of the
step are compared: tensors, modules (weights, gradients, buffers) and plain values, in any nesting,
and the state of the random generator. The smallest budget is found as a user would: start small,
and follow the amounts that `OutOfBudget` suggests. It forces many evictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import rekindle
from rekindle import Run
from rekindle.policies import Policy
from tests.differ.judge import smallest
from tests.pytorch import cores
from tests.pytorch.bits import differing, everything
from tests.pytorch.tracker import Tracker

Program = Callable[[], Callable[[], Any]]
WIDTH = 1_000  # elements of most vectors: 4,000 bytes


class Watch(Tracker):
    """A tracker that also counts executed operators, recomputations included.

    The native core recomputes below every dispatch mode, so it reports recomputed operators itself.
    """

    def __init__(self, *, resized: bool = False) -> None:
        super().__init__(resized=resized)
        self._operators: Counter[str] = Counter()
        self._native = cores.count_drivers()

    @property
    def operators(self) -> Counter[str]:
        return self._operators + cores.ran_again(self._native)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self._operators[func.name().split(".")[0].removeprefix("aten::")] += 1
        return result


@dataclass(frozen=True)
class Harsh:
    """The outcome of a run within the smallest budget."""

    run: Run
    budget: int
    plain: Counter[str]
    """Operators of the plain run, by name."""
    operators: Counter[str]
    """All operators within the budget."""

    @property
    def again(self) -> Counter[str]:
        """Return how often operators ran in addition to the program's own calls."""
        return self.operators - self.plain


def harshest(
    program: Program,
    *,
    policy: Policy | None = None,
    evict: Literal["saved", "auto", "anything"] = "auto",
    split: Literal["equal", "never"] = "equal",
    resized: bool = False,
) -> Harsh:
    """Run `program` in plain PyTorch and within the smallest budget, and assert equal results.

    Also assert that the budget was never exceeded and that values were recomputed. Set `resized` if
    the program itself changes the size of storages.
    """
    plain = Watch()
    step = _built(program)
    with plain:
        result = step()
    operators = plain.operators
    wanted = everything(result)
    least = plain.alive  # no smaller budget can work, because all results must fit at the end
    del step, result

    def attempt(budget: int) -> tuple[Any, Run, Watch]:
        step, watch = _built(program), Watch(resized=resized or evict != "saved")
        with watch, rekindle.budget(budget, policy=policy, evict=evict, split=split) as run:
            result = step()
            assert watch.peak <= budget  # after the budget all values are in memory
        return result, run, watch

    (result, run, watch), budget, _ = smallest(attempt, least)
    assert differing(everything(result), wanted) == []
    run._driver.engine.check()
    assert run.recomputations > 0, "nothing was recomputed: this tests nothing"
    return Harsh(run, budget, operators, watch.operators)


def _built(program: Program) -> Callable[[], Any]:
    torch.manual_seed(20)
    return program()


def vector(requires_grad: bool = False) -> Tensor:
    """Return a random vector of WIDTH numbers between 0.5 and 1.5, whose products stay finite."""
    return (torch.rand(WIDTH) + 0.5).requires_grad_(requires_grad)


def deeper(x: Tensor, layers: int = 6) -> Tensor:
    """Add a chain of layers that needs memory: each layer saves one or two vectors."""
    for _ in range(layers):
        x = (x.sin() * x).exp() * 0.5
    return x
