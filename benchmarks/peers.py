"""Compare time and memory of Rekindle with other tools, one model after the other.

    scripts/bench peers [--models gpt bert ...] [--methods checkpoint ...] [--quick] [--device cuda]

Each point (a tool with one setting) runs in its own process. Two copies of the model train
alternately, in blocks of steps (A B A B): one in plain PyTorch, one with the tool. A ratio compares
the times of neighboring blocks. The memory of a tool is that of weights, gradients and optimizer
state in the plain run, plus the peak of a step minus the memory that remains at its end. The
profiler reports it on a CPU, the allocator on CUDA. All runs have the same seeds. Prints a table,
writes results/peers.json and .csv and one plot for each model into docs/images/. A tool that is not
installed is reported, such as torch_remat (pip install torch-remat).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, answers, conditions, earlier_by, spread, write_table
from _methods import Point, points
from _trainer import Trainer, activations, block, in_turn, warm
from _workloads import WORKLOADS, Workload

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("model", "method", "setting")  #: columns that identify a row of the results
PICTURES = ROOT / "docs" / "images"
SECONDS = 0.7  # time of a block of steps
ROUNDS = 3
MOST_SECONDS = 300.0  # time limit for one process (one point of the results)


# -- one point, in a process of its own -----------------------------------------------------------


def measure(workload: Workload, point: Point, device: str) -> dict[str, Any]:
    """Return memory and time of one point, with those of the plain model."""
    plain, changed = Trainer(workload, device), Trainer(workload, device)
    for _ in range(2):
        plain.step()
    constants = plain.constants()
    peak = constants + activations(plain, device)
    about: dict[str, Any] = {"constants": constants, "peak": peak, "reserve": plain.state()}
    about["inputs"] = changed.batch
    changed.called = point.prepare(changed.model, workload, about)
    count = max(2, int(SECONDS / block(plain.step, 1, device)))
    with warm(point, changed, constants, peak):
        used = constants + activations(changed, device)
    pairs = in_turn(
        (plain, count), (changed, count), (point, constants, peak), rounds=ROUNDS, device=device
    )
    return {
        "peak": used,
        "plain_peak": peak,
        "constants": constants,
        "memory": round((used - constants) / (peak - constants), 4),
        "time": spread([taken / free for free, taken in pairs], 3),
        "seconds": spread([taken for _, taken in pairs]),
    }


def worker(workload: Workload, name: str, device: str) -> dict[str, Any]:
    torch.set_default_device(device)
    point = next(p for p in points(workload) if f"{p.method}:{p.setting}" == name)
    try:
        return measure(workload, point, device)
    except ImportError as error:
        return {"missing": str(error)}
    except MemoryError as error:  # the budget is below what cannot be evicted
        return {"infeasible": str(error).splitlines()[0]}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


# -- all points -----------------------------------------------------------------------------------


def run(workload: Workload, point: Point, device: str) -> dict[str, Any]:
    name = f"{point.method}:{point.setting}"
    command = [sys.executable, __file__, "--worker", workload.name, name, "--device", device]
    return [*answers(command, MOST_SECONDS)][-1]


def show(row: dict[str, Any]) -> None:
    head = f"{row['model']:10} {row['method']:18} {row['setting']:>8}"
    if "time" in row:
        times = row["time"]
        print(
            f"{head}   memory {row['memory']:6.1%}   time {times['median']:6.3f}"
            f" ({times['min']:.3f}-{times['max']:.3f})",
            flush=True,
        )
    else:
        reason = next(
            f"{key}: {row[key]}" for key in ("infeasible", "missing", "failed") if key in row
        )
        print(f"{head}   {reason[:110]}", flush=True)


def plot(model: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Plot time against memory, with a curve for each method."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot([100], [1.0], "k*", markersize=12, label="plain")
    markers = iter("osD^vP<>X")
    for method in dict.fromkeys(row["method"] for row in rows):
        found = sorted(
            (100 * row["memory"], row["time"]["median"])
            for row in rows
            if row["method"] == method and "time" in row
        )
        if found:
            own = method.startswith("rekindle")
            style = ("-" if own else "--") + next(markers)
            width = 2 if own else 1
            axes.plot(*zip(*found, strict=True), style, label=method, lw=width)
    axes.set_xlabel("activation memory, % of the plain run")
    axes.set_ylabel("time of a step / plain")
    axes.set_title(model)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--quick", action="store_true", help="three budgets a method")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/peers.json")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, point = options.worker
        print(json.dumps(worker(WORKLOADS[name], point, options.device)))
        return
    now = conditions()
    suffix = "" if options.device == "cpu" else f"_{options.device}"
    out = options.out or RESULTS / f"peers{suffix}.json"
    rows = earlier_by(out, KEY)
    for name in options.models:
        workload = WORKLOADS[name]
        for point in points(workload, quick=options.quick):
            if options.methods and point.method not in options.methods:
                continue
            key = (name, point.method, point.setting)
            row = dict(zip(KEY, key, strict=True)) | run(workload, point, options.device)
            rows[key] = row | {"commit": now["commit"], "cpu": now["machine"]["cpu"]}
            show(rows[key])
        mine = [row for key, row in rows.items() if key[0] == name]
        plot(name, mine, PICTURES / f"{out.stem}_{name}.png")
        columns = (*KEY, "memory")
        write_table(now, [*rows.values()], out, columns=columns, figure="time")


if __name__ == "__main__":
    main()
