"""Public functions that join the parts: what is measured, what decides, what runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rekindle.planners._costs import ChainSchedule, Measured
    from rekindle.pytorch._chained import Chained
    from rekindle.pytorch._export import Export


# When a block runs again, variables of its Python code hold results a little longer than the
# timeline of operators knows. Beside whole blocks that vanishes; beside saved results it does not.
_MARGIN = 0.97


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


def export(
    model: Any,
    step: Callable[[], object],
    budget: str | Bytes,
    *,
    blocks: Sequence[str] | None = None,
    selective: bool = False,
) -> Export:
    """Which blocks of `model` to put under `torch.utils.checkpoint` to train within `budget` bytes.

    `step()` runs once and is captured; it should be a whole step of training, not the first one.

    blocks: paths of submodules that may be chosen; default: the children of lists and sequentials.
    selective: let the checkpoints save the dearest results for which there is room.

    The result has `.apply(model)`, `.code()` to paste, and `.policy(block)` for selective
    checkpointing; where whole blocks cannot reach the budget, `.fits` is False and `.excess` says
    by how much. Raises `Unsupported` where there are no blocks.
    """
    from rekindle.planners import Problem
    from rekindle.planners._blocks import blocks_of
    from rekindle.pytorch._export import Export, candidates
    from rekindle.pytorch._step import capture_modules

    limit = parse_bytes(budget, line="rekindle.export(model, step, {})")
    trace, modules = capture_modules(step, model)
    ran = {".".join(path.split(".")[:n]) for path in modules for n in range(1, path.count(".") + 2)}
    names = candidates(model, ran) if blocks is None else list(blocks)
    if not names or not ran.issuperset(names):
        missing = ", ".join(name for name in names if name not in ran)
        what = f"{missing} did not run" if missing else "there are no lists or sequentials"
        raise Unsupported(f"rekindle.export: {what}; write blocks=[...] with paths of submodules")
    problem = Problem.of(trace)
    found = blocks_of(problem, modules, names)
    chosen = found.choose(limit)
    saved = found.save(chosen, int(_MARGIN * limit)) if selective else frozenset[int]()
    return Export(
        limit,
        found.peak(chosen, saved),
        found.peak(frozenset()),
        found.recompute_ns(chosen, saved),
        problem.compute_ns,
        {names[block]: found.calls(block, saved) for block in sorted(chosen)},
    )
