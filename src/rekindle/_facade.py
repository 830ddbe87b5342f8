"""Public functions that join the parts: what is measured, what decides, what runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, parse_bytes
from rekindle.policies import DTR, Policy
from rekindle.report import Choice, Profile
from rekindle.simulator import Point, at_batch, curve, fits

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


def profile(
    step: Callable[[], object],
    *,
    budget: str | Bytes | None = None,
    policy: Policy | None = None,
    device: str | None = None,
    repeats: int = 3,
    clock: Callable[[], Nanoseconds] = time.perf_counter_ns,
    watch: Callable[[str], None] = lambda stage: None,
) -> Profile:
    """What one step needs, who holds it at the peak, and what it would take within less.

    >>> profile = rekindle.profile(step)  # doctest: +SKIP
    >>> profile.budget_for(slowdown=1.1), profile.fits("8GB")  # doctest: +SKIP

    step: a function that takes one whole step: forward, backward, optimizer. It runs several times,
        and what it learns is undone: weights, buffers, gradients, optimizer state and random
        generators are as they were. What it takes from an iterator is taken.
    budget: run it within that (bytes, or text such as "6GiB"), if it does not fit without; default:
        no limit.
    policy: what to let go, in the run and in the prediction; default `DTR()`.
    device: the device whose memory is meant; default: CUDA if it is in use, else the CPU.
    repeats: how often it is timed, with the bookkeeping and without. 0: it runs only once, nothing
        is undone, and times are those of its operators.
    clock: what it is timed with, in ns.
    watch: told what is being done, for whoever wants to show it.

    Raises `OutOfBudget` if the step does not fit into `budget`.
    """
    from rekindle.pytorch import observe, prices

    policy = DTR() if policy is None else policy
    seen = observe(
        step,
        amount=budget,
        policy=policy,
        device=device,
        repeats=repeats,
        clock=clock,
        watch=watch,
    )
    points = curve(
        seen.trace, policy, watch=lambda done, of: watch(f"simulating budget {done + 1} of {of}")
    )
    again = prices().again

    def choice(point: Point) -> Choice:
        ns = seen.kept_ns + point.recompute_ns + again * point.recomputations
        return Choice(
            point.budget, ns, ns / seen.plain_ns, point.recompute_ns, point.recomputations
        )

    report = replace(
        seen.report,
        title="A profile of one step",
        choices=tuple(choice(point) for point in points),
        keep_all=points[0].budget if points else None,
        smallest_budget=points[-1].budget if points else None,
        plain_ns=seen.plain_ns,
    )
    return Profile(report, seen.trace)


def max_batch(
    step_factory: Callable[[int], Callable[[], object]],
    *,
    budget: str | Bytes = "auto",
    at_most: int = 1 << 20,
    simulated: bool = False,
    policy: Policy | None = None,
    device: str | None = None,
    watch: Callable[[str], None] = lambda stage: None,
) -> int:
    """The largest batch whose training steps fit into `budget`.

    >>> rekindle.max_batch(lambda n: lambda: train(batch[:n]), budget="6GiB")  # doctest: +SKIP

    step_factory: given a size of the batch returns a function that takes one whole step. Sizes are
        tried by doubling, then by bisection; each step runs twice, and what it learns is undone:
        weights, buffers, gradients, optimizer state, random generators.
    budget: bytes, or text such as "6GiB"; "auto": what the device has.
    at_most: sizes above are not tried.
    simulated: only batches of 2 and 4 run, and their traces are continued in a straight line.
        Quick, and needs little memory; try the answer before you rely on it.
    policy, device, watch: as for `rekindle.profile`.

    Raises the error of the smallest batch if not even that fits.
    """
    from rekindle.pytorch import Probe

    policy = DTR() if policy is None else policy
    probe = Probe(budget, policy, device)
    limit = probe.budget
    shortages: list[Exception] = []

    def runs(batch: int) -> bool:
        watch(f"trying a batch of {batch}")
        shortage = probe.shortage(step_factory(batch))
        shortages.extend([shortage] if shortage else [])
        return shortage is None

    feasible = runs
    if simulated:
        watch("writing down batches of 2 and 4")
        two, four = ((batch, probe.trace(step_factory(batch))) for batch in (2, 4))

        def simulates(batch: int) -> bool:
            watch(f"simulating a batch of {batch}")
            return fits(at_batch(two, four, batch), limit, policy) is not None

        feasible = simulates
    found = _largest(feasible, at_most)
    if found:
        return found
    raise shortages[0] if shortages else _not_even_one(limit)


def _largest(feasible: Callable[[int], bool], at_most: int) -> int:
    """The largest number from 1 to `at_most` that is feasible, as all below it are; 0: none."""
    yes, no = 0, 1
    while no <= at_most and feasible(no):
        yes, no = no, 2 * no
    no = min(no, at_most + 1)
    while no - yes > 1:
        middle = (yes + no) // 2
        if feasible(middle):
            yes = middle
        else:
            no = middle
    return yes


def _not_even_one(budget: Bytes) -> OutOfBudget:
    return OutOfBudget(
        f"not even a batch of 1 is simulated to fit into {format_bytes(budget)}; give more, or see "
        "what one needs: rekindle.profile(step_factory(1))",
        needed=0,
        budget=budget,
        held={},
        smallest_budget=budget + 1,
    )
