"""Regenerate the simulated figures of the DTR paper (Kirisame et al., ICLR 2021) from its logs.

python benchmarks/paper.py LOGS FOLDER [--authors-quirks] [--jobs N]
"""

from __future__ import annotations

import csv
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path

import click
from _authors import Case, Dead, Outcome, run
from _dtr_logs import logs_in
from _theory import adversary, chen, linear_recomputations, revolve

from rekindle.native import cores
from rekindle.policies import ABLATIONS, DTR, PAPER, Ablation
from rekindle.report import _paper, _plot
from rekindle.simulator import RATIOS

_BANISHING: Sequence[tuple[Dead, str]] = (
    ("banish", "dtr-unopt"),
    ("evict", "dtr"),
    ("ignore", "dtr"),
)


@click.command()
@click.argument("logs", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--authors-quirks", is_flag=True, help="Decide as the simulator of the DTR paper's authors."
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=cores(),
    metavar="N",
    help="The number of processes. Default: one for each core.",
)
def command(logs: Path, folder: Path, authors_quirks: bool, jobs: int) -> None:
    """Regenerate the simulated figures of the DTR paper.

    LOGS is a folder of operator logs. FOLDER receives tables (.csv) and plots (.svg): overhead
    against memory for the paper's policies and ours, the ablation, deallocation policies (always as
    in the authors' simulator), and the number of scores computed. Plots of the paper's theorems,
    which need no log, are added.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = logs_in(logs)

    def finish(name: str, chosen: Sequence[tuple[Dead, str]], quirks: bool) -> list[Outcome]:
        wanted = [
            Case(path, policy, ratio, dead, quirks)
            for path in paths
            for dead, policy in chosen
            for ratio in RATIOS
        ]
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            outcomes = list(pool.map(run, wanted))
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Outcome)])
            writer.writeheader()
            writer.writerows(asdict(outcome) for outcome in outcomes)
        click.echo(f"{name}: {len(outcomes)} runs", err=True)
        return outcomes

    figure_2: Sequence[tuple[Dead, str]] = [("evict", name) for name in (*PAPER, "thrifty")]
    outcomes = finish("overhead", figure_2, authors_quirks)
    _paper.overheads(outcomes, folder / "overhead.svg")
    bars(_scores(outcomes), folder / "scores.svg", what="scores computed")

    outcomes = finish("ablation", [("evict", name) for name in ABLATIONS], authors_quirks)
    _paper.overheads(outcomes, folder / "ablation.svg")

    outcomes = finish("deallocation", _BANISHING, True)
    named = [replace(outcome, policy=outcome.dead) for outcome in outcomes]
    _paper.overheads(named, folder / "deallocation.svg")
    _theory(folder)


def _scores(outcomes: list[Outcome]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return points (ratio, scores computed) of the runs that passed, by log and policy."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for outcome in outcomes:
        if outcome.status == "pass" and outcome.ratio and outcome.scores:
            points = found.setdefault(outcome.log, {}).setdefault(outcome.policy, [])
            points.append((outcome.ratio, outcome.scores))
    return found


def _theory(folder: Path) -> None:
    """Plot simulations of the paper's theorems, with the recomputation of Chen and Revolve."""
    ours = Ablation(staleness=False, size=True, cost="exact")
    sizes = [2**power for power in range(4, 11)]
    roots = {n: -(-2 * n**0.5 // 1) for n in sizes}
    theory(
        {
            "h(-, m, e*)": [(n, linear_recomputations(n, int(roots[n]), ours)) for n in sizes],
            "h_DTR": [(n, linear_recomputations(n, int(roots[n]), DTR())) for n in sizes],
            "Chen": [(n, chen(n)) for n in sizes],
            "Revolve": [(n, revolve(n, int(roots[n]) - 2)) for n in sizes],
        },
        folder / "linear.svg",
        title="Linear network, memory 2 sqrt(N)",
        x="layers N",
        y="recomputed operators",
        bounds=("Chen", "Revolve"),
    )
    theory(
        switch(256),
        folder / "switch.svg",
        title="From no recomputation to O(log N) space, N = 256",
        x="memory (units)",
        y="recomputed operators + 1",
        bounds=("Revolve", "N log2 N", "N"),
    )
    theory(
        {
            f"{name}, B = {budget}": [
                (n, adversary(n, budget, policy).total / n) for n in sizes[2:-1]
            ]
            for budget in (4, 8)
            for name, policy in (("h_DTR", DTR()), ("h_DTR^eq", DTR("classes")))
        }
        | {"N / B, B = 4": [(n, n / 4) for n in sizes[2:-1]]},
        folder / "adversary.svg",
        title="Adversary: time over that of a schedule which knows",
        x="operators N",
        y="time / N",
        bounds=("N / B, B = 4",),
    )


def switch(layers: int) -> dict[str, list[tuple[float, float]]]:
    """Return curves of the operators recomputed in a linear network, against the budget.

    Budgets are from log2(layers) to `layers`. The curves are those of h_DTR and of Revolve, and for
    comparison `layers` and layers * log2(layers).
    """
    least = math.ceil(math.log2(layers)) + 2
    budgets = sorted({*(round(least * (layers / least) ** (i / 15)) for i in range(16)), layers})
    ours = [(b, linear_recomputations(layers, b, DTR()) + 1) for b in budgets]
    return {
        "h_DTR": [(float(b), float(y)) for b, y in ours],
        "Revolve": [(float(b), revolve(layers, b - 2) + 1.0) for b in budgets],
        "N": [(float(budgets[0]), float(layers)), (float(layers), float(layers))],
        "N log2 N": [(float(b), layers * math.log2(layers)) for b in (budgets[0], layers)],
    }


def bars(
    counts: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path, *, what: str
) -> None:
    """Draw counts against the memory ratio, with a logarithmic axis for the counts.

    Args:
        counts: For each model and policy, points (ratio, count).
        path: The file to write.
        what: The label of the axis of counts.
    """
    figure, axes = _plot.grid(len(counts))
    for (log, by_policy), axis in zip(counts.items(), axes, strict=True):
        for number, (policy, points) in enumerate(by_policy.items()):
            x, y = [point[0] for point in points], [point[1] for point in points]
            _plot.line(axis, x, y, label=policy, number=number)
        axis.set(title=log, xlabel="memory ratio", ylabel=what, yscale="log")
        axis.invert_xaxis()
    axes[0].legend(fontsize="x-small")
    _plot.save(figure, path)


def theory(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x: str,
    y: str,
    bounds: Sequence[str] = (),
) -> None:
    """Draw curves over problem sizes or budgets, both axes logarithmic.

    Args:
        lines: The points of each curve, by label.
        path: The file to write.
        title: The title of the plot.
        x: The label of the x axis.
        y: The label of the y axis.
        bounds: The labels of the curves that are drawn dashed.
    """
    figure, (axis,) = _plot.grid(1, width=6.0, height=4.5)
    for number, (label, points) in enumerate(lines.items()):
        style = "--" if label in bounds else "-"
        _plot.line(
            axis,
            [p[0] for p in points],
            [p[1] for p in points],
            label=label,
            number=number,
            style=style,
        )
    axis.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    axis.legend(fontsize="small")
    _plot.save(figure, path)


if __name__ == "__main__":
    command()
