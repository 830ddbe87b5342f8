"""Define the public functions that plan a model: `sequential`, `export`, `plan`, `backend`.

Each function joins packages that do not import each other: `rekindle.pytorch` measures or traces
the model, a planner decides, and `rekindle.pytorch` runs the plan. torch is imported only inside
the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from rekindle import _checks as checks
from rekindle._errors import OutOfBudget, Unsupported
from rekindle._planners import given_planner, halfway
from rekindle._progress import ProgressLine
from rekindle._public import publish
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes
from rekindle.planners import Plan, Planner, Problem, Progress
from rekindle.policies.swap import Swap, speed
from rekindle.trace import Trace

if TYPE_CHECKING:
    from rekindle.planners._costs import ChainSchedule, Measured
    from rekindle.pytorch.chains import Chained
    from rekindle.pytorch.planned import Backend, Export, ModelPlan


# Share of the budget that selective checkpoints may fill according to the prediction. The rest is a
# margin: the prediction frees a result after its last reader, but while a block is recomputed, its
# Python variables hold the result longer. This excess is small compared with a whole block, but
# large compared with single saved results.
_MARGIN = 0.97


def sequential(
    model: Any,
    sample: Any,
    budget: str | Bytes,
    *,
    loss: Callable[[Any], Any] | None = None,
    reserve: str | Bytes = 0,
    reshape: Literal["measure", "refuse"] = "measure",
    watch: Callable[[int, int], None] | None = None,
) -> Chained:
    """Make an `nn.Sequential` with the same parameters that trains within a budget.

    A stage is a child of `model`, or of an `nn.Sequential` nested in `model`. Each stage is
    measured on a sample. Then Rotor's dynamic program (Beaumont et al., TOMS 2024) decides for each
    stage what stays in memory after its forward pass: all that its backward pass needs, only the
    stage's input, or nothing. Stages run in eager PyTorch, in nested `torch.utils.checkpoint`s.
    They are recomputed as a whole, so forward hooks and Python side effects inside a stage run
    again. Gradients, buffers and random numbers equal those of `model` bit for bit.

    Args:
        model: The `nn.Sequential`.
        sample: A tensor or a tuple of tensors, like the inputs in training.
        budget: Bytes, or text ("6GiB"), for one forward and backward pass: parameters, buffers,
            gradients, input, output, activations.
        loss: A function from the output to a scalar; its memory is measured too. Default: a sum.
        reserve: Bytes, or text, that the plan leaves free for memory outside the model during a
            step: optimizer state, targets.
        reshape: How to treat an input whose shape differs from `sample`: "measure" the stages
            again, or "refuse" the input.
        watch: A function that is called with (stages measured, number of stages).

    Returns:
        The module that runs the schedule.

    Raises:
        OutOfBudget: No schedule fits; the error names the smallest budget that does.
        Unsupported: `model` is not an `nn.Sequential`.
    """
    from rekindle.pytorch.chains import Chained, is_chain

    if not is_chain(model):
        raise Unsupported(
            f"rekindle.sequential(model, ...): got {type(model).__name__}, wanted an "
            "nn.Sequential; for any other model write `with rekindle.budget(...):` around the "
            "training step"
        )
    line = "rekindle.sequential(model, sample, {})"
    checks.one_of(reshape, ("measure", "refuse"), "rekindle.sequential(..., reshape={})")
    if loss is not None:
        instead = "lambda output: output.mean()"
        checks.function(loss, "rekindle.sequential(..., loss={})", instead, "output")
    plan = partial(_plan_chain, budget=parse_bytes(budget, line=line))
    others = _reserve(reserve)
    watch = watch or ProgressLine().stages
    return Chained(model, sample, plan, loss=loss, reserve=others, reshape=reshape, watch=watch)


def _plan_chain(measured: Measured, budget: Bytes) -> ChainSchedule:
    """Find a schedule for a measured chain, or raise `OutOfBudget` with the smallest budget."""
    from rekindle.planners._dial import best_schedule

    schedule = best_schedule(measured, budget)
    if schedule.peak > budget:
        stays = measured.fixed + measured.input
        raise OutOfBudget(
            f"rekindle.sequential(model, sample, {budget}): got {format_bytes(budget)}, wanted at "
            f"least {format_bytes(schedule.peak)} for {len(measured.stages)} stages "
            f"({format_bytes(stays)} of it for parameters, buffers, gradients and the input); "
            f"write rekindle.sequential(model, sample, {schedule.peak})",
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
    """Choose the blocks of a model to wrap in `torch.utils.checkpoint` for a budget.

    The peak memory of the result is predicted. It is up to a tenth too low if Python variables in a
    block hold intermediate results, as residual convolutional blocks do.

    Args:
        model: The model to export.
        step: A function that makes a whole training step. It runs once here. Run at least one step
            before, because the first step also creates the optimizer state.
        budget: Bytes, or text ("6GiB").
        blocks: Paths of submodules that may be wrapped. Default: the children of every
            `nn.ModuleList` and `nn.Sequential`.
        selective: Inside blocks, let the checkpoints save the results that cost most to recompute,
            as many as fit into the budget.

    Returns:
        An `Export` with `apply(model)`, `code()` to paste, and `policy(block)`. If whole blocks
        cannot reach the budget, `fits` is False and `excess` is the difference in bytes.

    Raises:
        Unsupported: The model has no such blocks, or the step did not run them.
    """
    from rekindle.planners._blocks import blocks_of
    from rekindle.pytorch.observed import capture_modules
    from rekindle.pytorch.planned import Export, candidates

    limit = parse_bytes(budget, line="rekindle.export(model, step, {})")
    checks.step(step, "rekindle.export(model, {}, budget)")
    checks.switch(selective, "rekindle.export(..., selective={})")
    if blocks is not None:
        line, instead = "rekindle.export(..., blocks={})", '["layers.0", "layers.1"]'
        checks.kind(blocks, (list, tuple), "paths of submodules", line, instead)
    trace, modules = capture_modules(step, model)
    ran = {".".join(path.split(".")[:n]) for path in modules for n in range(1, path.count(".") + 2)}
    names = candidates(model, ran) if blocks is None else list(blocks)
    if not names or not ran.issuperset(names):
        missing = ", ".join(str(name) for name in names if name not in ran)
        none = "the model has no nn.ModuleList and no nn.Sequential"
        what = f"{missing} did not run" if missing else none
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


@overload
def plan(
    program: Trace | str | PathLike[str],
    *,
    budget: str | int | None = None,
    planner: Planner | type[Planner] | str | None = None,
    swap: Swap | None = None,
) -> Plan: ...
@overload
def plan(
    program: object,
    example_inputs: Any,
    *,
    budget: str | int | None = None,
    planner: Planner | type[Planner] | str | None = None,
    swap: str | int | Swap | None = None,
    swap_directory: str | PathLike[str] | None = None,
    reserve: str | int = 0,
    shapes: Literal["replan", "error"] = "replan",
    check: bool = True,
    compile: bool = False,
) -> ModelPlan: ...
def plan(
    program: Any,
    example_inputs: Any = None,
    *,
    budget: str | int | None = None,
    planner: Planner | type[Planner] | str | None = None,
    swap: str | int | Swap | None = None,
    swap_directory: str | PathLike[str] | None = None,
    reserve: str | int = 0,
    shapes: Literal["replan", "error"] = "replan",
    check: bool = True,
    compile: bool = False,  # noqa: A002
) -> Any:
    """Plan ahead what to recompute, and what to swap, so that a program runs within a budget.

    Args:
        program: A model, a `Trace`, or the path of a file that holds a trace.
        example_inputs: The arguments of the model: a tuple of positional arguments, a dictionary of
            keyword arguments, or one tensor. Leave it out for a trace.
        budget: Bytes, or text ("6GiB"), for one forward and backward pass: parameters, buffers,
            inputs, activations, gradients. Default: half way between the smallest possible budget
            and the peak when everything is kept; or the smallest budget that has a plan, if that
            is larger.
        planner: One of `rekindle.planners`, or its name ("rotor"). Default: `Cuts`, started from a
            run of DTR.
        swap: Values may also be swapped to the host: a `Swap` with its bandwidth, or, for a model,
            an amount of host memory ("32GiB"), whose bandwidth is measured. Only with the default
            planner.
        swap_directory: The folder of the swap file, for a model on the CPU. Default: `$TMPDIR`, or
            else `/var/tmp`. On CUDA values are swapped to page-locked memory.
        reserve: Bytes of the budget for memory that the graph of the model does not show: optimizer
            state, accumulated gradients, a loss outside the model.
        shapes: How to treat inputs whose shapes differ from the example: "replan", or raise an
            "error".
        check: Run the model and the plan once on the example inputs, compare them bit for bit, and
            refuse a plan whose results differ. False only traces the model. Ignored with
            `compile=True`, which compares each compiled segment with its operators instead.
        compile: Have Inductor compile groups of consecutive light operators (segments). Results
            equal those of the same segments without a budget bit for bit, and those of eager
            PyTorch within rounding. Needs a C++ compiler (on a device: Triton).

    Returns:
        A `ModelPlan` for a model, whose `apply()` returns the module that runs the plan; a `Plan`
        for a trace. A budget that is too small is a status of the plan, not an exception.

    Raises:
        Unsupported: The model cannot be traced, or the plan does not give the results of the model.
        SwapFailed: A planned model could not copy a value to the host, or could not copy it back.

    Example:
        ```python
        plan = rekindle.plan(model, (batch,), budget="6GiB")
        print(plan)
        model = plan.apply()
        ```
    """
    amount = None if budget is None else parse_bytes(budget, line="rekindle.plan(..., budget={})")
    checks.switch(check, "rekindle.plan(..., check={})")
    on_model = not isinstance(program, Trace | str | PathLike)
    rates = None if on_model else speed(swap, "rekindle.plan(..., swap={})")
    planner = given_planner(planner, "rekindle.plan(..., planner={})", TIME_LIMIT)
    if swap_directory is not None and (swap is None or not on_model):
        raise Unsupported(
            f"rekindle.plan(..., swap_directory={swap_directory!r}): it names the folder of the "
            "swap file of a model with swap=; leave it out, or write rekindle.plan(model, x, "
            'swap="32GiB", swap_directory=...)'
        )
    if swap is not None and planner is not None:
        raise Unsupported(
            f"rekindle.plan(..., planner=..., swap={swap}): swap= applies to the default planner "
            "only; leave out planner=, or write planner=rekindle.planners.Cuts(swap=...)"
        )
    if isinstance(program, Trace):
        return _plan_trace(program, amount, _planner(planner, rates))
    if isinstance(program, str | PathLike):
        from rekindle.trace.formats import load

        path = Path(cast("str | PathLike[str]", program))
        return _plan_trace(load(path), amount, _planner(planner, rates))
    if example_inputs is None:
        raise Unsupported(
            f"rekindle.plan: got {type(program).__name__} without example inputs; write "
            "rekindle.plan(model, (batch,), budget=...)"
        )
    from rekindle.pytorch.planned import checked, open_host, plan_model

    host = None
    if swap is not None:
        host = open_host(program, example_inputs, amount, swap, swap_directory)
    progress, others = ProgressLine(), _reserve(reserve)
    plans = _Plans(planner, progress, None if host is None else host.swap)

    def within(amount: Bytes) -> ModelPlan:
        return plan_model(
            program,
            example_inputs,
            amount,
            plans,
            shapes=shapes,
            reserve=others,
            host=host,
            report=progress,
            compiled=compile,
        )

    try:
        with checked(program, example_inputs):
            if amount is not None:
                found = within(amount)
            else:
                everything = within(_NO_LIMIT)
                found = within(halfway(Problem.of(everything.trace)) + others)
                if found.plan.schedule is None:
                    found = within(found.smallest_budget)
        if check and not compile and found.plan.schedule is not None:
            progress("comparing the plan with the model")
            _check(found, program, example_inputs)
        return found
    finally:
        progress.done()


_NO_LIMIT = 1 << 60


def _plan_trace(trace: Trace, budget: Bytes | None, planner: Planner) -> Plan:
    """Plan a trace. Without a budget, use the default one, or the smallest that has a plan."""
    problem = Problem.of(trace)
    if budget is not None:
        return planner.plan(problem, budget)
    found = planner.plan(problem, halfway(problem))
    if found.schedule is not None or found.smallest_budget is None:
        return found
    return planner.plan(problem, found.smallest_budget)


def _check(found: ModelPlan, model: Any, example_inputs: Any) -> None:
    """Raise `Unsupported` unless the planned model gives the results of `model`, bit for bit."""
    from rekindle.pytorch.observed import Failed, differing
    from rekindle.pytorch.planned import training_step

    plain = training_step(model, example_inputs)
    instead = (
        "To evict and recompute while the model runs instead, write `with rekindle.budget(...):` "
        "around the training step"
    )
    try:
        different = differing(plain, training_step(found.apply(), example_inputs), found.budget)
    except Failed as failed:
        raise Unsupported(
            "this model cannot be planned ahead: the planned model raises an error that the "
            f"plain model does not raise ({type(failed.__cause__).__name__}: {failed.__cause__}). "
            f"{instead}"
        ) from failed.__cause__
    if not different:
        return
    if differing(plain, plain, found.budget):
        raise Unsupported(
            "this model cannot be planned ahead: two runs of the plain model give different "
            f"results, so the planned model cannot be compared with it. {instead}"
        )
    names = [name for _, name in different]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    other = " (the model takes another path when a compiler traces it)"
    path = other if found.path == "compiled" else ""
    raise Unsupported(
        "this model cannot be planned ahead: these results of the planned model differ from "
        f"those of the plain model{path}: {', '.join(names[:3])}{more}. {instead}"
    )


def backend(
    budget: str | int,
    *,
    planner: Planner | type[Planner] | str | None = None,
    inner: Literal["inductor", "eager"] = "inductor",
    reserve: str | int = 0,
    shapes: Literal["replan", "error"] = "replan",
) -> Backend:
    """Make a `torch.compile` backend that keeps each graph within a budget.

    Args:
        budget: Bytes, or text ("6GiB"), for each graph. It counts the parameters and buffers that
            the graph reads.
        planner: As for `rekindle.plan`.
        inner: "inductor" compiles groups of light operators, as `rekindle.plan(..., compile=True)`
            does. "eager" runs operator by operator, with the results of eager PyTorch bit for bit.
        reserve: As for `rekindle.plan`.
        shapes: As for `rekindle.plan`.

    Returns:
        The backend. If no plan fits, compilation fails, and the error's `inner_exception` is an
        `OutOfBudget` that names the smallest known budget.

    Example:
        ```python
        model = torch.compile(model, backend=rekindle.backend("6GiB"))
        ```
    """
    from rekindle.pytorch.planned import Backend

    planner = given_planner(planner, "rekindle.backend(..., planner={})", TIME_LIMIT)
    progress = ProgressLine()
    found = Backend(
        parse_bytes(budget, line="rekindle.backend({})"),
        _Plans(planner, progress),
        inner=inner,
        shapes=shapes,
        reserve=_reserve(reserve),
        report=progress,
    )
    found.when_compiled = progress.done
    return found


def _reserve(reserve: str | int) -> Bytes:
    return 0 if reserve == 0 else parse_bytes(reserve, line="reserve={}")


def _planner(planner: Planner | None, swap: Swap | None = None) -> Planner:
    """Return `planner`, or the default planner if it is None."""
    if planner is not None:
        return planner
    from rekindle._planners import WarmCuts

    if find_spec("highspy") is None:
        raise Unsupported(
            "rekindle.plan: the default planner needs the package highspy, which is not "
            "installed; write pip install 'rekindle[plan]', or "
            "planner=rekindle.planners.ChenGreedy(), which does not need it"
        )
    return WarmCuts(time_limit=TIME_LIMIT, gap=GAP, swap=swap)


TIME_LIMIT = 30.0  #: time limit of the default planner, in seconds
GAP = 0.001  #: the default planner stops at a plan that costs at most this share above the bound

# All plans found for the most recent programs. If the search for a larger budget finds a slower
# plan than an earlier search for a smaller budget, the earlier plan is used. So a larger budget
# never gives a slower plan.
_known: dict[tuple[Trace, Planner], list[Plan]] = {}
_MOST_KNOWN = 16


class _Plans:
    """Plans traces when called with a trace and a budget, and remembers all plans that it finds.

    A call returns the fastest remembered plan of the trace that fits the budget. It shows the
    progress of the search on a terminal.
    """

    def __init__(
        self, planner: Planner | None, progress: ProgressLine, swap: Swap | None = None
    ) -> None:
        self._planner = planner
        self._progress = progress
        self._swap = swap

    def __call__(self, trace: Trace, budget: Bytes) -> Plan:
        planner = _planner(self._planner, self._swap)
        problem = Problem.of(trace)
        with self._progress as progress:

            def watch(step: Progress) -> None:
                progress(f"{planner.name}: {step.note}")

            found = planner.plan(problem, budget, watch=watch)
        key = trace, planner
        while len(_known) >= _MOST_KNOWN and key not in _known:
            del _known[next(iter(_known))]
        plans = _known.setdefault(key, [])
        plans.append(found)
        fitting = [each for each in plans if each.peak is not None and each.peak <= budget]
        if not fitting:
            return found
        best = min(fitting, key=lambda each: (each.cost_ns or 0, each.peak or 0))
        return found if best.cost_ns == found.cost_ns else _for_budget(best, found)


def _for_budget(best: Plan, found: Plan) -> Plan:
    """Return the plan `best`, made for a smaller budget, with budget and bound of `found`."""
    from dataclasses import replace

    bound = min(found.bound_ns, best.cost_ns or 0)
    return replace(best, budget=found.budget, bound_ns=bound, needed=found.needed)


publish("rekindle", [backend, export, plan, sequential])
