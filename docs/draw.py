"""Draw the pictures of the page how-it-works.md from simulated runs: python docs/draw.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import rekindle
from rekindle.planners import ChenSqrt, Plan, Problem, Rotor
from rekindle.planners.cuts import Cuts
from rekindle.schedule import Compute, Record
from rekindle.trace import Trace, chain, keep_all_peak

IMAGES = Path(__file__).parent / "images"
KEPT, FIRST, AGAIN, GRAY = (
    "#9ecae1",
    "#0072b2",
    "#d55e00",
    "#666666",
)  # colors that everybody can tell apart


def main() -> None:
    trace = chain(12)
    draw_residency(trace)
    draw_memory(trace)
    draw_tradeoff(chain(48))


def draw_residency(trace: Trace) -> None:
    """Draw which values are in memory over time, without a budget and with half of the memory."""
    peak = keep_all_peak(trace)
    figure = Figure(figsize=(7, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for axes, budget in ((above, None), (below, peak // 2 + 1)):
        record = rekindle.simulate(trace, budget=budget)
        residency(axes, trace, record)
        limit = "no budget" if budget is None else f"budget: {budget} of {peak} values"
        again = f"{record.recomputations} operators are recomputed"
        axes.set_title(f"{limit}, {again}", loc="left", fontsize=13)
        axes.set_ylabel("tensors, oldest first", fontsize=12)
    below.set_xlabel("operators that ran", fontsize=12)
    save(figure, "residency.svg")


def residency(axes: Axes, trace: Trace, record: Record) -> None:
    """Draw a row for each value: dark where it is computed, orange where it is recomputed."""
    born: dict[int, tuple[int, bool]] = {}
    made: set[int] = set()
    now = 0

    def lived(storage: int) -> None:
        start, again = born.pop(storage)
        axes.barh(storage, now - start, left=start, height=0.9, color=KEPT)
        axes.barh(storage, 0.9, left=start, height=0.9, color=AGAIN if again else FIRST)

    for action in record.actions:
        if isinstance(action, Compute):
            for storage in trace.new_storages(trace.ops[action.op]):
                born[storage] = (now, action.op in made)
            made.add(action.op)
            now += 1
        elif action.storage in born:
            lived(action.storage)
    for storage in list(born):
        lived(storage)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks([])


def draw_memory(trace: Trace) -> None:
    """Draw memory over time under three budgets."""
    peak = keep_all_peak(trace)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for budget, color in ((peak, GRAY), (peak * 2 // 3, FIRST), (peak // 2, AGAIN)):
        record = rekindle.simulate(trace, budget=budget)
        label = f"budget {budget}: {record.overhead:.0%} more computation"
        made = [
            sum(trace.storages[made] for made in trace.new_storages(trace.ops[action.op]))
            if isinstance(action, Compute)
            else 0
            for action in record.actions
        ]
        memory = [before + new for before, new in zip(record.memory, made, strict=True)]
        axes.step(record.clock, memory, where="post", color=color, label=label)
        axes.axhline(budget, color=color, linewidth=0.8, linestyle=":")
    axes.set_xlabel("time, in operators")
    axes.set_ylabel("values in memory")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, "memory.svg")


def draw_tradeoff(trace: Trace) -> None:
    """Draw time against memory: online, planned, and the proven lower bound."""
    problem = Problem.of(trace)
    peak = keep_all_peak(trace)
    shares = (0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()

    def overheads(plans: list[Plan]) -> tuple[list[float], list[float]]:
        found = [
            (s, p.overhead) for s, p in zip(shares, plans, strict=True) if p.overhead is not None
        ]
        return [100 * s for s, _ in found], [100 * overhead for _, overhead in found]

    best = [Cuts(time_limit=10).plan(problem, int(peak * share)) for share in shares]
    bound = [100 * plan.lower_bound for plan in best]
    axes.fill_between([100 * share for share in shares], bound, color=KEPT, alpha=0.5, lw=0)
    axes.annotate("no schedule can be here", (35, 5), color=FIRST)
    for name, planner, color in (
        ("Chen, every root-n-th", ChenSqrt(), GRAY),
        ("Rotor", Rotor(), FIRST),
    ):
        plans = [planner.plan(problem, int(peak * share)) for share in shares]
        axes.plot(*overheads(plans), "o--", color=color, label=name, markersize=4)
    axes.plot(*overheads(best), "o-", color="black", label="cut relaxation", markersize=4)
    records = [rekindle.simulate(trace, budget=int(peak * share)) for share in shares]
    online = [100 * record.overhead for record in records]
    axes.plot([100 * s for s in shares], online, "s-", color=AGAIN, label="online (DTR)", ms=4)
    axes.set_xlabel("budget, % of what keeping everything takes")
    axes.set_ylabel("recomputation, %")
    axes.set_ylim(0, 80)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, "tradeoff.svg")


def save(figure: Figure, name: str) -> None:
    """Write the picture as SVG; equal pictures give equal files."""
    with mpl.rc_context({"svg.hashsalt": "rekindle"}):
        figure.savefig(IMAGES / name, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
