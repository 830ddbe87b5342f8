"""The model zoo: one training step of each architecture within 30 % of its activation memory.

Run plainly, plainly again, and within the budget (or the smallest that is feasible); loss,
gradients, weights, buffers and random numbers are compared bit for bit. Memory is the independent
tracker's.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

from _common import conditions, write
from tests.zoo.architectures import ALL_ARCHITECTURES, Architecture
from tests.zoo.runs import FRACTION, Row, compare, training_step
from tests.zoo.test_zoo import UNSTABLE

from rekindle._units import format_bytes

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
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/zoo.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the networks
    import transformers

    transformers.logging.set_verbosity_error()
    results = conditions()
    results["versions"] |= versions()
    print(line(*COLUMNS))
    started = perf_counter()
    rows: list[dict[str, Any]] = []
    for number, architecture in enumerate(ALL_ARCHITECTURES, 1):
        if options.only and not any(text in architecture.name for text in options.only):
            continue
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
    raise SystemExit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
