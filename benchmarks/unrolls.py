"""Compare a budget with checkpointing by hand in long loops. benchmarks/README.md has more.

    scripts/bench unrolls [--programs lstm ...] [--rounds 5]

The programs are in _unrolls.py. Each runs in its own process: in plain PyTorch, within budgets,
with `torch.utils.checkpoint` around pieces of the loop, and with binomial checkpointing written by
hand. In each round every method runs once, and its processor time is divided by that of plain
PyTorch in the same round. The memory of every method is counted by the allocator's events, as the
profiler reports them. Draws docs/images/unrolls.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, answers, conditions, earlier_by, spread, write
from _trainer import nbytes
from _unrolls import PROGRAMS, Unroll, checkpointed, plain, revolved
from tests.pytorch.allocations import allocated
from torch import Tensor

import rekindle

RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "unrolls.png"
KEY = ("program", "method", "setting")
SHARES = (0.5, 0.2, 0.1, 0.05, 0.02)  #: budgets: shares of the activations
MOST_SECONDS = 1200.0  # time limit for one program


class Method:
    """One way to run a program in less memory.

    Attributes:
        name: The name of the method in the plot.
        setting: The budget, the number of steps in a piece, or the number of stored states.
        budget: The most bytes that a run may allocate, or None.
    """

    def __init__(
        self, name: str, setting: str, run: Callable[[], Tensor], budget: int | None = None
    ) -> None:
        self.name, self.setting, self.budget = name, setting, budget
        self._run = run
        self.last: rekindle.Run | None = None

    def __call__(self) -> Tensor:
        """Run the loop and its backward pass; return the loss."""
        if self.budget is None:
            return self._run()
        with rekindle.budget(self.budget) as self.last:
            return self._run()


def methods(program: Unroll, constants: int, activations: int) -> Iterator[Method]:
    """Yield all methods but plain PyTorch, from the one that needs the most memory down."""
    run = partial(plain, program)
    for share in SHARES:
        budget = constants + int(share * activations)
        yield Method("rekindle", f"{share:.0%}", run, budget)
    root = math.isqrt(program.steps)
    for piece in sorted({max(2, root // 3), root, min(3 * root, program.steps)}):
        yield Method("checkpoint", f"{piece} steps", partial(checkpointed, program, piece))
    if program.first_order:
        step = activations // program.steps
        state = nbytes(program.begin())
        counts = (int(share * activations - step) // state for share in SHARES)
        for slots in dict.fromkeys(min(count, program.steps - 1) for count in counts if count > 0):
            yield Method("revolve", f"{slots} states", partial(revolved, program, slots))


def profiled(program: Unroll, run: Callable[[], Tensor]) -> tuple[list[Tensor], int]:
    """Return the loss and the gradients of a run, and its memory peak in bytes without them."""
    for leaf in program.leaves:
        leaf.grad = None
    losses: list[Tensor] = []
    gc.collect()
    used = allocated(lambda: losses.append(run()))
    gradients = [leaf.grad for leaf in program.leaves if leaf.grad is not None]
    found = [*losses, *gradients]
    return found, used.peak - nbytes(found)  # not `used.left`: a budget may free values later


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference of any tensor, divided by that tensor's largest value.

    0.0 means that all bits are equal.
    """
    if all(map(torch.equal, found, wanted)):
        return 0.0
    pairs = zip(found, wanted, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def timed(program: Unroll, run: Callable[[], Tensor]) -> float:
    """Return the processor time (s) of a run."""
    for leaf in program.leaves:
        leaf.grad = None
    gc.collect()
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(program: Unroll, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a program."""
    reference = Method("plain", "", partial(plain, program))
    wanted, activations = profiled(program, reference)
    inputs = [each for each in vars(program).values() if isinstance(each, Tensor)]
    constants = nbytes([*program.leaves, *wanted, *inputs])  # `wanted`: loss and gradients
    usable: list[Method] = []
    rows: dict[Method, dict[str, Any]] = {}
    for method in (reference, *methods(program, constants, activations)):
        row = rows[method] = {"method": method.name, "setting": method.setting}
        try:
            found, peak = profiled(program, method)
        except rekindle.OutOfBudget as error:
            row["infeasible"] = f"needs {error.smallest_budget}"
            continue
        except RuntimeError as error:
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        row["difference"] = difference(found, wanted)
        row |= {"peak": peak, "memory": round(peak / activations, 4)}
        if method.last is not None and method.budget is not None:
            row["recomputations"] = method.last.recomputations
            row["over_budget"] = round((constants + peak) / method.budget, 4)
        usable.append(method)
    times: dict[Method, list[float]] = {method: [] for method in usable}
    for _ in range(rounds):
        for method in usable:
            times[method].append(timed(program, method))
    for method, row in rows.items():
        if method in times:
            pairs = zip(times[method], times[reference], strict=True)
            row["time"] = spread([taken / free for taken, free in pairs], 3)
            row["seconds"] = spread(times[method])
        yield row | {"activations": activations, "steps": program.steps}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw time over plain against memory, a panel for each program."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    styles = {"rekindle": "o-", "checkpoint": "s--", "revolve": "^--"}
    colors = {"rekindle": "#d55e00", "checkpoint": "#0072b2", "revolve": "#009e73"}
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True).flat
    for name, axes in zip(PROGRAMS, panels, strict=False):
        mine = [row for row in rows if row["program"] == name and "time" in row]
        if not mine:
            continue
        axes.plot([100], [1.0], "k*", markersize=11, label="plain PyTorch")
        for method, style in styles.items():
            found = sorted(
                (100 * row["memory"], row["time"]["median"])
                for row in mine
                if row["method"] == method
            )
            if found:
                width = 2.2 if method == "rekindle" else 1.3
                axes.plot(
                    *zip(*found, strict=True), style, color=colors[method], label=method, lw=width
                )
        axes.set_title(f"{PROGRAMS[name].title}, {mine[0]['steps']:,} steps", fontsize=11)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.tick_params(labelbottom=True)
        axes.set_ylim(bottom=0.9)
        axes.grid(alpha=0.3)
    figure.axes[-1].set_axis_off()
    figure.axes[-1].legend(
        *figure.axes[0].get_legend_handles_labels(), loc="center", fontsize=11, frameon=False
    )
    figure.supxlabel("memory, % of the loop's activations in plain PyTorch", fontsize=11)
    figure.supylabel("time over plain PyTorch", fontsize=11)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "unrolls.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    now = conditions()
    if options.worker:
        program = PROGRAMS[options.worker]()  # pyright: ignore[reportCallIssue]  # has a default
        for row in measure(program, options.rounds):
            print(json.dumps(row), flush=True)
        return
    rows = earlier_by(options.out, KEY)
    for name in options.programs:
        command = [sys.executable, __file__, "--worker", name, "--rounds", str(options.rounds)]
        for row in answers(command, MOST_SECONDS):
            row = {"program": name} | row | {"commit": now["commit"]}
            rows[name, row.get("method", ""), row.get("setting", "")] = row
            print({key: each for key, each in row.items() if key != "commit"}, flush=True)
        write(options.out.stem, now | {"rows": [*rows.values()]}, options.out)
    committed = options.out == RESULTS / "unrolls.json"
    plot([*rows.values()], PICTURE if committed else options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
