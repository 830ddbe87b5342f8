"""Compare one training step of a planned model (`rekindle.plan`) with a step in plain PyTorch.

The planned model returns all results of the model, and the loss is computed outside of it. The
budget is ample, or it is the constants (such as weights) and a part of the activation memory. If no
plan fits, the smallest budget with a plan is used.
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import rekindle
from rekindle.planners import Cuts, KeepAll, Planner
from tests.pytorch.harsh import Watch, differing, everything
from tests.pytorch.planned.helpers import Onlooker
from tests.pytorch.tracker import Measured
from tests.zoo.architectures import Architecture, loss_of
from tests.zoo.batches import Batch
from tests.zoo.runs import step_of, training_step

FRACTION = 0.4
MOST_BUDGETS = 8
#: Memory that the budget reserves for values that `loss_of` computes outside of the plan. If the
#: model returns a loss, it is `OF_A_LOSS` bytes, for the mean. If not, it is `TIMES_RESULTS` times
#: the size of the model's results, for their squares and gradients.
OF_A_LOSS, TIMES_RESULTS = 1_000, 4

Verdict = Literal["same", "refused", "differs", "over budget", "failed"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one planned step. Memory in bytes."""

    verdict: Verdict
    reason: str = ""
    """Why the plan was refused or failed, or the names of the results that differ."""
    path: str = ""
    budget: int = 0
    predicted_peak: int = 0
    peak: int = 0
    """The peak by the independent tracker, including the loss outside of the model."""
    overhead: float = 0.0


@dataclass(frozen=True)
class Plain:
    """The results of a step in plain PyTorch, and the memory that the step needs."""

    wanted: dict[str, Any]
    measured: Measured


def plainly(architecture: Architecture) -> Plain:
    step, watch = training_step(architecture)(), Watch()
    with watch:
        result = step()
        gc.collect()
    return Plain(everything(result), Measured(watch.peak, watch.alive))


def by_plan(
    architecture: Architecture, plain: Plain, fraction: float | None, seconds: float = 3.0
) -> Outcome:
    """Plan a model, run one training step of it, and compare the step with plain PyTorch.

    Args:
        architecture: The model to plan.
        plain: The step in plain PyTorch to compare with.
        fraction: The part of the activation memory to allow; None for an ample budget.
        seconds: Time limit of the planner.
    """
    roomy = fraction is None
    budget = 4 * plain.measured.peak if roomy else plain.measured.budget(fraction)
    planner: Planner = KeepAll() if roomy else Cuts(seconds, gap=0.05)
    try:
        for _ in range(MOST_BUDGETS):
            torch._dynamo.reset()
            model, batch, reserve = _used_once(architecture)
            plan = rekindle.plan(model, batch, budget=budget, planner=planner, reserve=reserve)
            if plan.peak is not None:
                return _compare(model, batch, plan, plain)
            budget = max(plan.smallest_budget, budget + plain.measured.activations // 20)
    except rekindle.Unsupported as error:
        return Outcome("refused", str(error), budget=budget)
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}"[:300], budget=budget)
    return Outcome("failed", "the smallest budget grew too often", budget=budget)


def _compare(model: nn.Module, batch: Batch, plan: Any, plain: Plain) -> Outcome:
    planned = plan.apply()
    step = step_of(model, lambda: loss_of(planned(**batch)))
    with Onlooker() as onlooker:
        result = step()
    different = differing(everything(result), plain.wanted)
    over = onlooker.peak > max(plan.budget, plain.measured.constants)
    return Outcome(
        "differs" if different else "over budget" if over else "same",
        ", ".join(different[:5]),
        plan.path,
        plan.budget,
        plan.peak,
        onlooker.peak,
        plan.overhead,
    )


def _used_once(architecture: Architecture) -> tuple[nn.Module, Batch, int]:
    """Return a model after one forward pass, its batch, and the bytes to reserve for a loss.

    The first forward pass may initialize state under locks, which cannot be traced.
    """
    model, batch = architecture.build()
    state = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in state]
    drawn = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.no_grad():
        results = model(**batch)
        for tensor, content in zip(state, before, strict=True):
            tensor.copy_(content)
    torch.set_rng_state(drawn[0])
    np.random.set_state(drawn[1])  # noqa: NPY002
    random.setstate(drawn[2])
    if getattr(results, "loss", None) is not None:
        return model, batch, OF_A_LOSS
    made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    return model, batch, TIMES_RESULTS * sum(tensor.nbytes for tensor in made)
