"""Train one step of each architecture of the zoo within 30 % of its activation memory.

The zoo is 124 architectures of transformers and diffusers. Each runs twice in plain PyTorch, and
once within the budget (or the smallest feasible one). Loss, gradients, weights, buffers and random
numbers are compared bit for bit. Memory is counted by the tests' tracker, independently of
Rekindle.

With --planned, each architecture runs by `rekindle.plan` instead: with a budget large enough for
everything, and at 40 % of the activation memory. The plan must give the same bits, or
`rekindle.plan` must raise an error with the reason. Results are written after each run.
Architectures that have results are not run again, except with --only or --again.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from _common import ROOT, conditions, earlier_by, write
from tests.zoo import planned
from tests.zoo.architectures import ALL_ARCHITECTURES, Architecture
from tests.zoo.runs import FRACTION, Row, compare, training_step
from tests.zoo.test_zoo import UNSTABLE

from rekindle._units import format_bytes

#: Budgets of planned runs, as fractions of the activation memory; None: nothing is recomputed.
BUDGETS = {"roomy": None, f"{planned.FRACTION:.0%}": planned.FRACTION}
COLUMNS = (
    "architecture", "parameters", "operators", "plain peak", "budget", "of act.", "recomputed",
    "equal",
)  # fmt: skip


def line(*cells: object) -> str:
    name, *rest = (str(cell) for cell in cells)
    return f"{name:<48}" + "".join(f"{cell:>12}" for cell in rest)


def verdict(row: Row) -> str:
    if row.unstable:
        return "unstable"
    if row.peak > row.budget:
        return "over budget"
    return "no" if row.differing else "yes"


def show(number: int, architecture: Architecture, row: Row) -> None:
    print(
        line(
            f"{number:3}/{len(ALL_ARCHITECTURES)} {architecture.name}"[:47],
            row.parameters,
            row.operators,
            format_bytes(row.plain_peak),
            format_bytes(row.budget),
            f"{row.fraction:.0%}",
            row.recomputations,
            verdict(row),
        ),
        flush=True,
    )


def as_data(architecture: Architecture, row: Row) -> dict[str, Any]:
    return {
        "architecture": architecture.name,
        "family": architecture.family,
        "parameters": row.parameters,
        "operators": row.operators,
        "plain_peak": row.plain_peak,
        "constants": row.constants,
        "budget": row.budget,
        "peak": row.peak,
        "fraction": round(row.fraction, 3),
        "refused": len(row.refused),
        "evictions": row.evictions,
        "recomputations": row.recomputations,
        "equal": verdict(row),
    }


def versions() -> dict[str, str]:
    import diffusers
    import transformers

    return {"transformers": transformers.__version__, "diffusers": diffusers.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those with TEXT in their name")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/zoo[_planned].json")
    parser.add_argument("--planned", action="store_true", help="ahead of time, not online")
    parser.add_argument("--seconds", type=float, default=3.0, help="for a planner; default: 3")
    parser.add_argument("--again", action="store_true", help="also those in the file of results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # warnings of the networks
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.ERROR)  # messages about traces that fail
    results = conditions()
    results["versions"] |= versions()
    chosen = [
        (number, architecture)
        for number, architecture in enumerate(ALL_ARCHITECTURES, 1)
        if not options.only or any(text in architecture.name for text in options.only)
    ]
    failed = (
        by_plans(chosen, results, options) if options.planned else online(chosen, results, options)
    )
    raise SystemExit(1 if failed else 0)


def online(
    chosen: Sequence[tuple[int, Architecture]], results: dict[str, Any], options: Any
) -> list[str]:
    """Run architectures within budgets. Return the names of those that differ."""
    print(line(*COLUMNS))
    started = perf_counter()
    rows: list[dict[str, Any]] = []
    for number, architecture in chosen:
        row = compare(training_step(architecture), FRACTION)
        show(number, architecture, row)
        rows.append(as_data(architecture, row))
    counts = {
        "tried": len(rows),
        "equal": sum(row["equal"] == "yes" for row in rows),
        "unstable": {row["architecture"]: UNSTABLE.get(row["architecture"], "unknown")
                     for row in rows if row["equal"] == "unstable"},
        "failed": [row["architecture"] for row in rows if row["equal"] in ("no", "over budget")],
    }  # fmt: skip
    print(
        f"{counts['equal']} of {counts['tried']} equal, {perf_counter() - started:.0f} s;", end=" "
    )
    print(f"unstable in plain PyTorch: {counts['unstable']}; failed: {counts['failed']}")
    if not options.only or options.out:
        write("zoo", results | {"counts": counts, "rows": rows}, options.out)
    return counts["failed"]


def by_plans(
    chosen: Sequence[tuple[int, Architecture]], results: dict[str, Any], options: Any
) -> list[str]:
    """Run architectures by plans. Return the names of those that fail the check.

    An architecture fails if its plan gives other bits than plain PyTorch, or if it raises an error
    other than one that says why the architecture cannot be planned.
    """
    out = options.out or ROOT / "benchmarks" / "results" / "zoo_planned.json"
    known = earlier_by(out, ["architecture"])
    if options.only or options.again:
        for _, architecture in chosen:
            known.pop((architecture.name,), None)
    for name, fraction in BUDGETS.items():
        for number, architecture in chosen:
            row = known.get((architecture.name,), {})
            if name in row or row.get("roomy", {}).get("verdict") == "refused":
                continue  # has results, or a smaller budget cannot succeed
            plain = planned.plainly(architecture)
            row = row or {
                "commit": results["commit"],
                "architecture": architecture.name,
                "family": architecture.family,
                "plain_peak": plain.measured.peak,
                "constants": plain.measured.constants,
            }
            row[name] = asdict(planned.by_plan(architecture, plain, fraction, options.seconds))
            known[(architecture.name,)] = row
            reported = f"{number:3}/{len(ALL_ARCHITECTURES)} {architecture.name[:40]:<42}"
            print(f"{reported}{name:>8}{row[name]['verdict']:>13}", flush=True)
            rows = [known[each.name,] for each in ALL_ARCHITECTURES if (each.name,) in known]
            write("zoo_planned", results | {"counts": counted(rows), "rows": rows}, out)
    failed = counted(list(known.values()))["failed"]
    print(f"{len(known)} in {out.name}; failed: {failed}")
    return failed


def counted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the plans with equal bits, and the architectures that `rekindle.plan` refused."""
    verdicts = [{name: row.get(name, {}).get("verdict") for name in BUDGETS} for row in rows]
    return {
        "tried": len(rows),
        **{name: sum(each[name] == "same" for each in verdicts) for name in BUDGETS},
        "refused": sum("refused" in each.values() for each in verdicts),
        "failed": [
            row["architecture"]
            for row, each in zip(rows, verdicts, strict=True)
            if not {"same", "refused", None}.issuperset(each.values())
        ],
    }


if __name__ == "__main__":
    main()
