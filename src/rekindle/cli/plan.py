"""`rekindle plan`: plan a trace within a budget, and show the lower bound for any schedule."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rekindle._errors import RekindleError
from rekindle._progress import ProgressLine
from rekindle._types import Bytes
from rekindle._units import format_bytes, format_ns
from rekindle.cli._options import examples, plot_file, size, sizes
from rekindle.policies.swap import Swap

if TYPE_CHECKING:
    from rich.table import Table

    from rekindle.planners import Plan, Problem
    from rekindle.planners._base import Watch

_RATIOS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_SHOWN = "cuts"  # name of the planner to run if --planner is not given


@click.command(
    epilog=examples(
        "rekindle plan step.jsonl --budget 6GiB",
        "rekindle plan step.jsonl --ratio 0.5 --planner rotor",
        "rekindle plan step.jsonl --ratio 0.5 --swap 6GB",
        "rekindle plan step.jsonl --compare --plot plan.svg",
        exits="1: there is no plan within the budget.",
    )
)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="SIZE",
    callback=sizes,
    help=(
        "A budget, such as 6GiB; may be repeated. Default, if --ratio is not given either: the "
        "middle between the smallest budget that any schedule needs and the peak when everything "
        "is kept; if no plan is found for it, the smallest budget for which one is found."
    ),
)
@click.option(
    "--ratio",
    "ratios",
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help=(
        "A budget as a part of the peak when everything is kept in memory, such as 0.5; may be "
        "repeated."
    ),
)
@click.option(
    "--planner",
    "names",
    multiple=True,
    metavar="NAME",
    help="The planner; may be repeated. An unknown name lists them all. [default: cuts]",
)
@click.option(
    "--compare",
    is_flag=True,
    help=("Compare all planners; if no budget is given, at ratios from 0.8 to 0.2."),
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="The most time for each plan of a planner that searches.",
)
@click.option(
    "--swap",
    "bandwidth",
    callback=size,
    metavar="SIZE",
    help=(
        "Let plans also swap values to the host and back. SIZE is the bandwidth of each direction, "
        "in bytes per second. Only the planners cuts and dtr can swap."
    ),
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=plot_file,
    help="Draw time against memory into FILE (.png, .svg or .pdf).",
)
@click.option(
    "--json", "as_json", is_flag=True, help=("Print one JSON object per plan, and nothing else.")
)
@click.pass_context
def command(
    ctx: click.Context,
    trace: Path,
    budgets: tuple[Bytes, ...],
    ratios: tuple[float, ...],
    names: tuple[str, ...],
    compare: bool,
    time_limit: float,
    bandwidth: Bytes | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Plan ahead what to recompute so that TRACE runs within a budget.

    TRACE is a trace of any format, or a graph of Checkmate. The overhead is the time of
    recomputation (with --swap also the time of waiting for copies), divided by the time of running
    each operator once. No schedule has less overhead than the lower bound. The exit code is 1 if a
    named planner, or the default one, has no plan.
    """
    from rekindle._planners import PLANNERS, SWAPPING, halfway
    from rekindle.planners import Problem
    from rekindle.trace.formats import load

    unknown = [name for name in names if name not in PLANNERS]
    if unknown:
        raise click.UsageError(
            f"there is no planner {unknown[0]!r}; wanted one of: {', '.join(PLANNERS)}", ctx
        )
    planners = {name: partial(make, time_limit) for name, make in PLANNERS.items()}
    if bandwidth is not None:
        swap = Swap(None, bandwidth, bandwidth)
        planners = {name: partial(make, time_limit, swap) for name, make in SWAPPING.items()}
    unable = [name for name in names if name not in planners]
    if unable:
        raise click.UsageError(
            f"--swap: the planner {unable[0]} cannot swap values to the host; write --planner "
            f"{' or --planner '.join(planners)}",
            ctx,
        )
    try:
        problem = Problem.of(load(trace))
    except RekindleError as error:
        named = str(error).startswith(str(trace))
        raise click.ClickException(str(error) if named else f"{trace}: {error}") from None
    shares = ratios or (_RATIOS if compare and not budgets else ())
    wanted = [*budgets, *(int(share * problem.keep_all_peak) for share in shares)]
    anything = not wanted
    if anything:
        wanted = [halfway(problem)]
    chosen = names or (tuple(planners) if compare else (_SHOWN,))
    plans: list[Plan] = []
    for budget in wanted:
        for name in chosen:
            with _progress(name, as_json) as watch:
                plan = planners[name]().plan(problem, budget, watch=watch)
                if anything and plan.schedule is None and plan.smallest_budget is not None:
                    plan = planners[name]().plan(problem, plan.smallest_budget, watch=watch)
            plans.append(plan)
            if as_json:
                click.echo(json.dumps(_as_object(plan, problem)))
    if not as_json:
        _show(plans, problem)
    if plot is not None:
        _draw(plans, problem, plot)
    if (names or not compare) and any(plan.schedule is None for plan in plans):
        ctx.exit(1)


def _ratio(plan: Plan, problem: Problem) -> float:
    return plan.budget / problem.keep_all_peak if problem.keep_all_peak else 1.0


def _as_object(plan: Plan, problem: Problem) -> dict[str, object]:
    return {
        "trace": problem.trace.name,
        "planner": plan.planner,
        "ratio": round(_ratio(plan, problem), 6),
        "budget_bytes": plan.budget,
        "status": plan.status.name.lower(),
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "waiting_ns": plan.waiting_ns,
        "swapped_out_bytes": plan.swapped_out,
        "peak_bytes": plan.peak,
        "seconds": round(plan.seconds, 4),
        "smallest_budget_bytes": plan.smallest_budget,
        "message": plan.message,
    }


@contextmanager
def _progress(name: str, quiet: bool) -> Generator[Watch | None]:
    """Show the state of the search on standard error; yield the function that updates it."""
    if quiet:
        yield None
        return
    from rekindle.planners import Progress

    with ProgressLine() as line:

        def watch(step: Progress) -> None:
            best = "none yet" if step.incumbent_ns is None else format_ns(step.incumbent_ns)
            state = f"{name}: {step.seconds:.0f} s, plan {best}, bound {format_ns(step.bound_ns)}"
            if step.incumbent_ns:
                state += f", gap {(step.incumbent_ns - step.bound_ns) / step.incumbent_ns:.2%}"
            line(f"{state} ({step.note})")

        yield watch


def _show(plans: Sequence[Plan], problem: Problem) -> None:
    from rich.console import Console

    console = Console()
    for budget in dict.fromkeys(plan.budget for plan in plans):
        console.print(_table([plan for plan in plans if plan.budget == budget], problem))
    console.print(
        f"keep-all: {format_ns(problem.compute_ns)} in {format_bytes(problem.keep_all_peak)}; "
        f"no schedule fits below {format_bytes(problem.floor)}"
    )
    if len(plans) == 1 and plans[0].schedule is None:
        console.print(plans[0].message, soft_wrap=True)


def _table(plans: Sequence[Plan], problem: Problem) -> Table:
    """Make a table that compares the plans of several planners for one budget."""
    from rich.table import Table

    bound = _bound(plans)
    first = plans[0]
    title = f"{problem.trace.name} within {format_bytes(first.budget)} ".lstrip()
    title += f"({_ratio(first, problem):.0%} of keep-all), lower bound {bound:.2%}"
    table = Table(title=title, title_justify="left")
    swapping = any(plan.swapped_out for plan in plans)
    more = ("waiting", "swapped") if swapping else ()
    for heading in ("planner", "overhead", "gap", "peak", *more, "seconds", "status"):
        justify = "left" if heading in ("planner", "status") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for plan in plans:
        table.add_row(
            plan.planner,
            "-" if plan.overhead is None else f"{plan.overhead:.2%}",
            "-" if plan.gap is None else f"{_gap(plan, bound):.2%}",
            "-" if plan.peak is None else format_bytes(plan.peak),
            *((f"{_waiting(plan):.2%}", format_bytes(plan.swapped_out)) if swapping else ()),
            f"{plan.seconds:.2f}",
            plan.status.name.lower().replace("_", " "),
        )
    return table


def _waiting(plan: Plan) -> float:
    """Return the time of waiting for copies, divided by the cost of running everything once."""
    return plan.waiting_ns / plan.compute_ns if plan.compute_ns else 0.0


def _bound(plans: Sequence[Plan]) -> float:
    """Return the highest lower bound (on the cost of any schedule) that one of the plans proves.

    Checkmate's bound holds only for schedules in Checkmate's stages, so it is used only if no other
    plan has a bound.
    """
    general = [plan for plan in plans if not plan.planner.startswith("checkmate")]
    return max(plan.lower_bound for plan in general or plans)


def _gap(plan: Plan, bound: float) -> float:
    """Return the gap between the plan's cost and `bound`, as a share of the plan's cost."""
    return max(0.0, ((plan.overhead or 0.0) - bound) / (1 + (plan.overhead or 0.0)))


def _draw(plans: Sequence[Plan], problem: Problem, path: Path) -> None:
    from rekindle.report._plot import time_against_memory

    curves: dict[str, list[tuple[float, float]]] = {}
    for plan in plans:
        ratio = _ratio(plan, problem)
        points = curves.setdefault(plan.planner, [])
        if plan.overhead is not None:
            points.append((ratio, plan.overhead))
    budgets = {plan.budget: _ratio(plan, problem) for plan in plans}
    bounds = [
        (ratio, _bound([plan for plan in plans if plan.budget == budget]))
        for budget, ratio in budgets.items()
    ]
    time_against_memory(curves, bounds, path, title=problem.trace.name)
