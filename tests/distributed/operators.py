"""Train with custom operators that communicate: `torchrun ... operators.py SEEDS`.

Each rank has inputs of another length, so each evicts and recomputes other values. The operators
have the same shapes on all ranks. A recomputation that communicated on one rank alone would wait
for the others forever, or take the numbers of another operator.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import rekindle
from tests.distributed.ranks import leave

ROWS, WIDTH, DEPTH = 64, 64, 8


def _summed(x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y / dist.get_world_size()


def _summed_functionally(x: Tensor) -> Tensor:
    """Reduce by a functional collective, whose result is a tensor subclass that waits."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) / dist.get_world_size()


def _gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts).amax(0)


def _agreed(x: Tensor) -> Tensor:
    """Scale by a number that the ranks find by their common store, not by a collective."""
    store = dist.distributed_c10d._get_default_store()
    return x * (1 + store.add("calls", 1) * 0)


def _gated(x: Tensor) -> Tensor:
    """Compute without communicating: this operator is recomputed on each rank as it needs."""
    return x.sigmoid() * x


def _dropped(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.2)


BODIES = (_summed, _summed_functionally, _gathered, _agreed, _gated, _dropped)


def _operator(body: Callable[[Tensor], Tensor]) -> Any:
    made = torch.library.custom_op(
        f"rekindle_ranks::{body.__name__[1:]}",
        body,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    made.register_fake(torch.empty_like)
    made.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return made


OPERATORS = [_operator(body) for body in BODIES]


def trained(seed: int, budget: int | None, *, harsh: bool = False) -> tuple[list[Tensor], Any]:
    """Return all gradients and the next random number. `harsh`: evict all before each operator."""
    chosen = random.Random(seed).choices(OPERATORS, k=DEPTH)
    torch.manual_seed(seed)
    weights = [torch.randn(WIDTH, WIDTH).mul_(0.1).requires_grad_() for _ in range(DEPTH)]
    torch.manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(ROWS * (1 + 2 * dist.get_rank()), WIDTH)
    with rekindle.budget(budget, evict="saved", learn=False) as run:
        run._driver.core.list_recomputed_ops(run._driver.handle)
        run._driver.core.evict_before_every_op(run._driver.handle, harsh)
        for weight, operator in zip(weights, chosen, strict=True):
            x = torch.nn.functional.gelu(x @ weight)
            shared = operator(x[:ROWS].tanh())
            x = torch.cat([x[:ROWS] * shared, x[ROWS:]]).tanh()
        x.square().mean().backward()
    gradients = [each.grad for each in weights if each.grad is not None]
    return [*gradients, torch.rand(1)], run


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    recomputed: set[str] = set()
    for seed in range(int(sys.argv[1])):
        wanted, roomy = trained(seed, None)
        for budget, harsh in ((int(roomy.peak * 0.75), False), (None, dist.get_rank() % 2 == 0)):
            got, run = trained(seed, budget, harsh=harsh)
            assert all(map(torch.equal, got, wanted)), f"seed {seed}: other gradients"
            recomputed |= {*run._driver.core.recomputed_ops(run._driver.handle)}
    names = {each for each in recomputed if each.startswith("rekindle_ranks::")}
    assert names <= {"rekindle_ranks::gated", "rekindle_ranks::dropped"}, names
    if dist.get_rank() == 0:
        assert len(names) == 2
    leave()


if __name__ == "__main__":
    main()
