"""Time steps by the simulated clock of the stand-in device, and compare them with predictions.

On this clock, kernels and copies take the time that their bytes and operations would take on a
device, and the host takes no time. So the times are the same in every run.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

import rekindle
from rekindle.pytorch.learned import _step_plans
from tests.standin.programs import blocks

STEPS = 8
SECONDS = 8.0  # seconds for the search of a plan
FRACTION = 0.5
BYTES, FLOPS = 100_000.0, 1_000_000.0  # per us: bytes of memory, operations of products

WAYS: dict[str, dict[str, Any]] = {
    "alone": {"learn": False},
    "recomputed": {"learn": "wait"},
    "online": {"learn": False, "swap": "1GiB"},
    "learned": {"learn": "wait", "swap": "1GiB"},
}


def _steps(standin: Any, **budget: Any) -> tuple[list[float], list[torch.Tensor], int, Any]:
    """Return the time (us) of each step, the parameters, the peak of memory, and the run."""
    torch.manual_seed(0)
    model = blocks(width=256, depth=10, dropout=0.0)
    batch = torch.randn(1024, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times: list[float] = []

    def train() -> None:
        for _ in range(STEPS):
            start = standin.us(0)
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            times.append(standin.us(0) - start)

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = None
    if budget:
        with rekindle.budget(device="cuda", cache=False, **budget) as run:
            train()
    else:
        train()
    peak = torch.cuda.max_memory_allocated()
    return times, [each.detach().cpu() for each in model.parameters()], peak, run


def timed(standin: Any, copied: float) -> dict[str, Any]:
    """Time steps without and within a budget; copies to the host move `copied` bytes per us."""
    standin.clock(BYTES, FLOPS, copied)
    before = torch.cuda.memory_allocated()
    plain, expected, peak, _ = _steps(standin)
    constant = before + sum(2 * each.nbytes for each in expected)
    amount = constant + int(FRACTION * (peak - constant))
    found: dict[str, Any] = {"plain": plain[-1]}
    for way, options in WAYS.items():
        with patch.object(_step_plans, "SECONDS", SECONDS):
            times, values, most, run = _steps(standin, amount=amount, **options)
        swapped = run.report().swapped
        answer = {
            "step": times[-1],
            "equal": all(map(torch.equal, values, expected)),
            "peak over budget": most / amount,
            "out": getattr(swapped, "out", 0),
            "back": getattr(swapped, "back", 0),
            "waiting": getattr(swapped, "waiting_ns", 0) / 1000,
        }
        if run._learner is not None:
            route = run._learner.plans.shapes[0].route
            answer["followed"] = run._learner.followed
            answer["copies"] = len(route.copies)
            answer["planned"] = plain[-1] + route.recompute_ns / 1000
        found[way] = answer
    return found


def timed_passes(
    standin: Any,
    model: torch.nn.Module,
    network: torch.nn.Module,
    batch: torch.Tensor,
    passes: int,
) -> tuple[float, list[torch.Tensor]]:
    """Run forward and backward passes of `network`, which is `model` or a plan of it.

    The peak of memory is reset before each pass.

    Returns:
        The time (us) of the last pass, and the gradients.
    """
    torch.cuda.manual_seed(1)
    took = 0.0
    for _ in range(passes):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        start = standin.us(0)
        network(batch).backward()
        took = standin.us(0) - start
    return took, [each.grad.cpu() for each in model.parameters() if each.grad is not None]


class _WithLoss(torch.nn.Module):
    """The model with its loss inside, so that a plan counts all memory of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = blocks(width=256, depth=10, dropout=0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).pow(2).mean()


def timed_plans(standin: Any, copied: float) -> dict[str, Any]:
    """Time forward and backward passes of planned models, with and without `swap=`."""
    standin.clock(BYTES, FLOPS, copied)
    torch.manual_seed(0)
    model = _WithLoss()
    batch = torch.randn(1024, 256).cuda()

    def run(network: torch.nn.Module) -> tuple[float, list[torch.Tensor], int]:
        """Return the time (us) of the last pass, the gradients, and the peak of memory."""
        took, gradients = timed_passes(standin, model, network, batch, passes=3)
        return took, gradients, torch.cuda.max_memory_allocated()

    plain, expected, most = run(model)
    model.zero_grad()
    constant = torch.cuda.memory_allocated() + sum(each.nbytes for each in expected)
    amount = constant + int(FRACTION * (most - constant))
    found: dict[str, Any] = {"plain": plain}
    for way, options in {"recomputed": {}, "swapped": {"swap": "1GiB"}}.items():
        plan = rekindle.plan(model, (batch,), budget=amount, **options)
        took, gradients, peak = run(plan.apply())
        transfers = None if plan.host is None else plan.host.transfers
        found[way] = {
            "step": took,
            "planned": (plan.time_ns or 0) / 1000,
            "overhead": plan.overhead,
            "equal": all(map(torch.equal, gradients, expected)),
            "peak over budget": peak / amount,
            "swapped out": plan.plan.swapped_out,
            "waiting": 0 if transfers is None else transfers.waiting_ns / 1000,
        }
    return found
