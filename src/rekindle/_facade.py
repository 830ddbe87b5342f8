"""Public functions that join the parts: what is measured, what decides, what runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rekindle.planners._costs import ChainSchedule, Measured
    from rekindle.pytorch._chained import Chained


def sequential(
    model: Any,
    sample: Any,
    budget: str | Bytes,
    *,
    loss: Callable[[Any], Any] | None = None,
    beside: str | Bytes = 0,
    reshape: Literal["measure", "refuse"] = "measure",
    watch: Callable[[int, int], None] | None = None,
) -> Chained:
    """An `nn.Sequential` with the same parameters that trains within `budget` bytes.

    Its stages are measured on `sample` and scheduled by Rotor's dynamic program (Beaumont et al.,
    TOMS 2024): for each, keep what its backward pass needs, or its input, or nothing. Stages run in
    eager PyTorch and may do what they like inside. Gradients, buffers and random numbers are
    bit-equal to those of `model`.

    sample: an input such as the training will bring: a tensor, or a tuple of tensors.
    budget: of everything alive during the forward and backward pass: parameters, buffers, their
        gradients (from the beginning where they are there already), the input, the output, which
        the caller is assumed to hold, and whatever the stages make.
    loss: from the output to a number, to measure what it takes; default: a sum.
    beside: bytes that others hold meanwhile: the optimizer's state, targets.
    reshape: what to do about an input of another shape: "measure" again, or "refuse" it.
    watch: called with (stages measured, all stages).

    A stage is a child, those of nested sequentials too; a child that writes into its input or
    returns a view of it belongs to the one before. Forward hooks and Python side effects inside a
    stage happen again when it is computed again. Raises `OutOfBudget` with the smallest budget that
    would do, `Unsupported` for what is no chain.
    """
    from rekindle.pytorch._chained import Chained, is_chain

    if not is_chain(model):
        raise Unsupported(
            f"rekindle.sequential takes an nn.Sequential; got {type(model).__name__}. For "
            "any other model there is `with rekindle.budget(...):`"
        )
    line = "rekindle.sequential(model, sample, {})"
    plan = partial(_plan_chain, budget=parse_bytes(budget, line=line))
    others = parse_bytes(beside, line="rekindle.sequential(..., beside={})") if beside else 0
    return Chained(model, sample, plan, loss=loss, beside=others, reshape=reshape, watch=watch)


def _plan_chain(measured: Measured, budget: Bytes) -> ChainSchedule:
    from rekindle.planners._dial import best_schedule

    schedule = best_schedule(measured, budget)
    if schedule.peak > budget:
        stays = measured.fixed + measured.input
        raise OutOfBudget(
            f"no schedule of these {len(measured.stages)} stages fits {format_bytes(budget)}: "
            f"{format_bytes(stays)} are parameters, buffers, gradients and the input, and the "
            f"least that a stage needs beside that makes {format_bytes(schedule.peak)}. Write "
            f"rekindle.sequential(model, sample, {schedule.peak})",
            needed=schedule.peak - stays,
            budget=budget,
            held={"parameters, buffers, gradients, input": stays},
            smallest_budget=schedule.peak,
        )
    return schedule
