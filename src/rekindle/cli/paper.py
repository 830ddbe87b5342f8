"""`rekindle paper`: regenerate the simulated figures of the DTR paper from its operator logs.

The paper is Kirisame et al., ICLR 2021.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from rekindle.cli._options import examples
from rekindle.cli.simulate import expand, run_all, write_csv
from rekindle.policies import ABLATIONS, DTR, PAPER, Ablation
from rekindle.simulator import (
    Case,
    Outcome,
    adversary,
    cases,
    chen,
    linear_recomputations,
    revolve,
)

_BANISHING = {"banish": "dtr-unopt", "evict": "dtr", "ignore": "dtr"}


@click.command(
    epilog=examples(
        "rekindle paper logs/ figures/",
        exits="1: a log cannot be read.",
    )
)
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--authors-quirks", is_flag=True, help="Do as the DTR paper's own simulator does.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes. Default: all cores.")
def command(logs: tuple[Path, ...], folder: Path, authors_quirks: bool, jobs: int | None) -> None:
    """Regenerate the simulated figures of the DTR paper.

    LOGS are operator logs or folders of them. FOLDER receives tables (.csv) and plots (.svg):
    overhead against memory for the paper's policies and ours, the ablation, deallocation policies,
    and the number of scores computed. Plots of the paper's theorems, which need no log, are added.
    """
    from rekindle.report import _paper

    folder.mkdir(parents=True, exist_ok=True)
    paths = expand(logs)

    def finish(name: str, wanted: list[Case]) -> list[Outcome]:
        outcomes = run_all(wanted, jobs)
        write_csv(outcomes, folder / f"{name}.csv")
        click.echo(f"{name}: {len(outcomes)} runs", err=True)
        return outcomes

    figure_2 = cases(paths, [*PAPER, "thrifty"], quirks=authors_quirks)
    outcomes = finish("overhead", [replace(case, count=True) for case in figure_2])
    _paper.overheads(outcomes, folder / "overhead.svg")
    _paper.bars(_scores(outcomes), folder / "scores.svg", what="scores computed")

    outcomes = finish("ablation", cases(paths, list(ABLATIONS), quirks=authors_quirks))
    _paper.overheads(outcomes, folder / "ablation.svg")

    outcomes = finish("deallocation", _deallocation(paths, authors_quirks))
    _paper.overheads(outcomes, folder / "deallocation.svg", label=lambda point: point.dead)
    _theory(folder)


def _deallocation(paths: list[Path], quirks: bool) -> list[Case]:
    return [
        case
        for dead, policy in _BANISHING.items()
        for case in cases(paths, [policy], dead=dead, quirks=quirks)  # type: ignore[arg-type]
    ]


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
    from rekindle.report import _paper

    ours = Ablation(staleness=False, size=True, cost="exact")
    sizes = [2**power for power in range(4, 11)]
    roots = {n: -(-2 * n**0.5 // 1) for n in sizes}
    _paper.theory(
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
    _paper.theory(
        switch(256),
        folder / "switch.svg",
        title="From no recomputation to O(log N) space, N = 256",
        x="memory (units)",
        y="recomputed operators + 1",
        bounds=("Revolve", "N log2 N", "N"),
    )
    _paper.theory(
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
    """Count recomputed operators of a linear network, for budgets from log2(layers) to `layers`."""
    import math

    least = math.ceil(math.log2(layers)) + 2
    budgets = sorted({*(round(least * (layers / least) ** (i / 15)) for i in range(16)), layers})
    ours = [(b, linear_recomputations(layers, b, DTR()) + 1) for b in budgets]
    return {
        "h_DTR": [(float(b), float(y)) for b, y in ours],
        "Revolve": [(float(b), revolve(layers, b - 2) + 1.0) for b in budgets],
        "N": [(float(budgets[0]), float(layers)), (float(layers), float(layers))],
        "N log2 N": [(float(b), layers * math.log2(layers)) for b in (budgets[0], layers)],
    }
