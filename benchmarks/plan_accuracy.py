"""Compare the peak and time that a plan predicts with measured ones, by model and budget.

    scripts/bench plan_accuracy

The loss is computed inside the model, so that the plan covers all memory of the step. The peak is
measured by the tests' tracker, which is independent of Rekindle. The measured time is the processor
time of the fastest of several steps, forward and backward. The predicted time is the sum of the
operators' costs, measured before in the same process.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from typing import Any

from _common import conditions, write

os.environ["REKINDLE_CACHE"] = tempfile.mkdtemp()  # an empty cache: no costs of earlier runs

import torch
from tests.pytorch.models import GPT, UNet, class_loss, next_token_loss, tokens
from tests.pytorch.networks import ResNet
from tests.pytorch.planned.helpers import Onlooker, WithLoss

import rekindle
from rekindle.planners import Cuts, KeepAll

BUDGETS = (1.0, 0.6, 0.4)  # fractions of the keep-everything peak
STEPS = 5


def gpt() -> tuple[WithLoss, Any]:
    model = GPT(vocabulary=256, width=256, heads=4, layers=3, context=128)
    return WithLoss(model, next_token_loss), tokens(256, batch=8, time=128)(0)


def resnet() -> tuple[WithLoss, Any]:
    model = ResNet(width=32, depths=(2, 2), classes=10)
    for module in model.modules():
        if "drop" in vars(module):
            vars(module)["drop"] = 0.0
    return WithLoss(model, class_loss), (torch.randn(16, 3, 64, 64), torch.randint(10, (16,)))


def unet() -> tuple[WithLoss, Any]:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    images = torch.randn(8, 1, 96, 96)
    return WithLoss(UNet(width=16, levels=3), loss), (images, (images > 0).float())


def main() -> None:
    results = conditions()
    rows = [row for build in (unet, gpt, resnet) for row in measured(build)]
    write("plan_accuracy", results | {"rows": rows})


def measured(build: Any) -> Any:
    torch.manual_seed(0)
    model, batch = build()
    whole = rekindle.plan(model, batch, budget="100GB", planner=KeepAll())
    assert whole.peak is not None
    for share in BUDGETS:
        plan = whole
        if share < 1:
            planner = Cuts(time_limit=20, gap=0.02)
            plan = rekindle.plan(model, batch, budget=int(share * whole.peak), planner=planner)
        if plan.peak is None or plan.time_ns is None:
            print(f"{build.__name__:8} {share:4}  {plan.status}")
            continue
        peak, elapsed = run(model, plan.apply(), batch)
        row = {
            "model": build.__name__,
            "budget": plan.budget,
            "share": share,
            "overhead": round(plan.overhead or 0.0, 4),
            "predicted_peak": plan.peak,
            "measured_peak": peak,
            "peak_error": round(plan.peak / peak - 1, 4),
            "predicted_ns": plan.time_ns,
            "measured_ns": elapsed,
            "time_error": round(plan.time_ns / elapsed - 1, 4),
        }
        print(
            f"{build.__name__:8} {share:4.1f}  overhead {plan.overhead:6.1%}  "
            f"peak {plan.peak / 1e6:7.2f} / {peak / 1e6:7.2f} MB {row['peak_error']:+6.1%}  "
            f"time {plan.time_ns / 1e6:7.1f} / {elapsed / 1e6:7.1f} ms {row['time_error']:+6.1%}",
            flush=True,
        )
        yield row


def run(model: torch.nn.Module, planned: torch.nn.Module, batch: Any) -> tuple[int, int]:
    times = []
    for _ in range(STEPS):
        model.zero_grad()
        began = time.process_time_ns()
        planned(*batch).backward()
        times.append(time.process_time_ns() - began)
    model.zero_grad()
    gc.collect()
    with Onlooker() as onlooker:
        planned(*batch).backward()
    return onlooker.peak, min(times)


if __name__ == "__main__":
    main()
