"""Measure the fragmentation of allocators, and its cost on a device with little spare memory.

    scripts/bench fragmentation [--logs FOLDER] [--models NAME ...] [--gigabytes 8]
    scripts/bench fragmentation --traces FOLDER

The script simulates the DTR paper's logs in FOLDER, if given, and one step of each network of
`_workloads.py`, with models of PyTorch's CUDA allocator. If the peak of a program is below 8 GB
when everything is kept, all tensors are enlarged until the peak is 8 GB, because blocks and
segments of an allocator have fixed sizes that would dominate in small programs. Budgets are
fractions of that peak. For each budget, the results have:

`sums`: recomputation time divided by computation time, if an allocation succeeds whenever enough
    bytes are free in total.
`native`, `expandable`, `pages`: PyTorch's allocator by default, with expandable segments, and a
    model of an allocator that gives large blocks whole pages of memory. `reserved` is the peak of
    reserved memory divided by the peak of memory in use, on a device that is large enough.
`score`, `window`: recomputation time divided by computation time, on a device with 1.05 or 1.2
    times the memory of the budget. If an allocation fails there, storages are evicted: one after
    another by the policy's score; or those in the range of addresses (window) that costs least.

A figure is None if the run fails, or if recomputation takes more than five times the computation.
Prints a table and writes results/fragmentation.json.

With `--traces` the script only compares two of the models with a GPU (`_allocator_models.py`), and
writes results/allocator_models.json.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from _allocator_models import comparisons
from _common import conditions, write
from _dtr_logs import load, logs_in
from _trainer import Trainer
from _workloads import WORKLOADS

import rekindle
from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import Thrifty
from rekindle.schedule import Record
from rekindle.simulator import AllocatorName, Device, Repair, replay
from rekindle.trace import Trace, keep_all_peak

RATIOS = (1.0, 0.9, 0.7, 0.5, 0.4, 0.3)
SHARES = (1.05, 1.2)
LIMIT = 5  # a run fails if recomputation takes more than this multiple of the computation time
WARM_UP = 3  # steps until operators have measured costs
LIKE = 0.001  # results that differ by less than this share of the computation time count as equal
NEAR = 1.02  # a step within this factor of the time of another one takes nearly as long


def programs(logs: Path | None, models: Sequence[str], nbytes: int) -> Iterator[tuple[str, Trace]]:
    """Yield names of programs, each with the trace of one step."""
    found = [] if logs is None else logs_in(logs)
    if not found:
        print(f"the DTR paper's logs are left out: --logs {logs} has none")
    for path in found:
        yield f"{path.name.partition('.')[0]} log", enlarged(load(path), nbytes)
    for name in models:
        yield name, enlarged(captured(Trainer(WORKLOADS[name], "cpu").step), nbytes)


def captured(step: Any) -> Trace:
    with rekindle.budget.unlimited():
        for _ in range(WARM_UP):
            step()
    return rekindle.capture(step)


def enlarged(trace: Trace, nbytes: int) -> Trace:
    """Return the step with multiplied sizes: its peak is `nbytes` when everything is kept."""
    factor = max(1.0, nbytes / keep_all_peak(trace))
    return replace(
        trace,
        storages=tuple(int(size * factor) for size in trace.storages),
        ops=tuple(replace(op, workspace=int(op.workspace * factor)) for op in trace.ops),
    )


def run(trace: Trace, budget: int, device: Device | None = None) -> Record | None:
    limit = LIMIT * trace.compute_ns
    try:
        return replay(trace, budget=budget, policy=Thrifty(), recompute_limit=limit, device=device)
    except (NoRoom, Thrashed):
        return None


def recomputed(record: Record | None) -> float | None:
    return None if record is None else round(record.recompute_ns / record.compute_ns, 4)


def measure(trace: Trace, ratio: float) -> dict[str, Any]:
    budget = int(ratio * keep_all_peak(trace))
    row: dict[str, Any] = {"ratio": ratio, "sums": recomputed(run(trace, budget))}
    for allocator in get_args(AllocatorName):
        free = run(trace, budget, Device(allocator))
        row[allocator] = {
            "reserved": free and round(free.reserved_peak / free.allocated_peak, 3),
            "rounding": free and round(free.rounding / free.peak, 4),
        }
        for share in SHARES:
            for repair in get_args(Repair):
                device = Device(allocator, int(share * budget), repair)
                row[allocator][f"{repair} {share}"] = recomputed(run(trace, budget, device))
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare `window` with `score`, on the rows for which `sums` succeeds."""
    found: dict[str, Any] = {}
    for allocator in get_args(AllocatorName):
        for share in SHARES:
            pairs = [
                (row["sums"], row[allocator][f"score {share}"], row[allocator][f"window {share}"])
                for row in rows
                if row["sums"] is not None
            ]
            failed = float("inf")
            both = [(failed if s is None else s, failed if w is None else w) for _, s, w in pairs]
            found[f"{allocator}, {share}"] = {
                "cases": len(pairs),
                "window better": sum(window < score - LIKE for score, window in both),
                "window worse": sum(window > score + LIKE for score, window in both),
                "score fails": sum(score == failed for score, _ in both),
                "window fails": sum(window == failed for _, window in both),
                "window as by sums": sum(
                    window is not None and window <= sums + LIKE for sums, _, window in pairs
                ),
                "within 2 % of that": sum(
                    window is not None and 1 + window <= NEAR * (1 + sums)
                    for sums, _, window in pairs
                ),
            }
    return found


def compare(folder: Path) -> None:
    """Compare the models with the figures of a GPU, for the workloads with a trace in `folder`."""
    about, rows = conditions(), list(comparisons(folder))
    for row in rows:
        print(*row.values(), sep="  ")
    if rows:
        write("allocator_models", about | {"rows": rows})


def line(name: str, row: dict[str, Any]) -> str:
    """Format a row for the terminal."""
    cells = [row["sums"]]
    for allocator in get_args(AllocatorName):
        of = row[allocator]
        cells += [of["reserved"], *(of[f"{r} {s}"] for s in SHARES for r in get_args(Repair))]
    shown = "".join(f"{'-' if cell is None else format(cell, '.3f'):>9}" for cell in cells)
    return f"{name:16}{row['ratio']:>5}{shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, help="a folder of the DTR paper's logs")
    parser.add_argument("--models", nargs="*", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument(
        "--gigabytes", type=float, default=8.0, help="what keeping everything takes, at least"
    )
    parser.add_argument("--traces", type=Path, help="only compare the models with a GPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.traces is not None:
        compare(options.traces)
        return
    about = conditions()
    ways = [f"{repair[0]} {share}" for share in SHARES for repair in get_args(Repair)]
    heads = ["sums", *(head for name in get_args(AllocatorName) for head in (name[:8], *ways))]
    print(f"{'':21}" + "".join(f"{head:>9}" for head in heads))
    rows: list[dict[str, Any]] = []
    for name, trace in programs(options.logs, options.models, int(options.gigabytes * 1e9)):
        for ratio in RATIOS:
            rows.append({"program": name} | measure(trace, ratio))
            print(line(name, rows[-1]), flush=True)
        found = {"summary": summary(rows), "rows": rows}
        write("fragmentation", about | {"gigabytes": options.gigabytes} | found)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
