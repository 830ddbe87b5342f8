"""Compare only recomputing, only swapping, and the cheaper of both, on the DTR paper's logs.

    scripts/bench swap_simulated --logs FOLDER [--only NAME ...]

The script simulates the logs. Budgets are fractions of the peak when everything is kept. Bandwidths
(the same in both directions) are fractions of the bandwidth at which copies cost no time. At that
bandwidth, all values can be copied to the host during a third of the computation, about a forward
pass.

`recompute`: only recomputing. `swap`: only swapping. `hybrid`: the engine decides for each evicted
value. `chosen`: the best of the three, which a user can choose after a simulation. An overhead is
the time of recomputing and of waiting for copies, divided by the computation time. The script
prints a table, and writes results/swap_simulated.json and .png.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from _common import ROOT, conditions, write
from _dtr_logs import load, logs_in

from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import DTR, Swap
from rekindle.simulator import replay
from rekindle.trace import Trace, keep_all_peak

RATIOS = (0.5, 0.4, 0.3, 0.2)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
LIMIT = 10  # a run fails if recomputation takes more than this multiple of the computation time
WAYS = ("recompute", "swap", "hybrid", "chosen")
RESULT = ROOT / "benchmarks" / "results" / "swap_simulated.json"


def run(trace: Trace, ratio: float, swap: Swap | None) -> dict[str, Any]:
    everything = keep_all_peak(trace)
    limit, budget = LIMIT * trace.compute_ns, int(ratio * everything)
    try:
        record = replay(trace, budget=budget, policy=DTR(), recompute_limit=limit, swap=swap)
    except (NoRoom, Thrashed) as error:
        return {"status": "oom" if isinstance(error, NoRoom) else "thrash"}
    return {
        "status": "pass",
        "overhead": round(record.overhead, 4),
        "recomputing": round(record.recompute_ns / record.compute_ns, 4),
        "waiting": round(record.waiting_ns / record.compute_ns, 4),
        "copying": round(record.transfer_ns / record.compute_ns, 4),
        "swapped_out": round(record.swapped_out / everything, 4),
        "swapped_in": round(record.swapped_in / everything, 4),
    }


def hiding(trace: Trace) -> float:
    """Return the bandwidth (bytes per second) at which copies cost no time."""
    return keep_all_peak(trace) * 3e9 / trace.compute_ns


def measure(name: str, trace: Trace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for ratio in RATIOS:
        plain = run(trace, ratio, None)
        for share in SHARES:
            rate = max(1, int(share * hiding(trace)))
            swap = Swap(out_bytes_per_s=rate, in_bytes_per_s=rate)
            row: dict[str, Any] = {"log": name, "ratio": ratio, "share": share, "recompute": plain}
            row["swap"] = run(trace, ratio, replace(swap, only=True))
            row["hybrid"] = run(trace, ratio, swap)
            row["chosen"] = min((row[way] for way in WAYS[:3]), key=overhead)
            rows.append(row)
            shown = "".join(f"{overhead(row[way]):>11.3f}" for way in WAYS)
            print(f"{name:>12} {ratio:>5} {share:>5}{shown}", flush=True)
    return rows


def overhead(outcome: dict[str, Any]) -> float:
    return outcome.get("overhead", float("inf"))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the cases in which `hybrid` is faster or slower than the better of the other two."""
    pairs = [
        (overhead(row["hybrid"]), min(overhead(row["recompute"]), overhead(row["swap"])))
        for row in rows
    ]
    lost = [ours - best for ours, best in pairs if ours > best]
    return {
        "cases": len(pairs),
        "hybrid better": sum(ours < best for ours, best in pairs),
        "equal": sum(ours == best for ours, best in pairs),
        "hybrid worse": len(lost),
        "hybrid worse by more than 0.01": sum(more > 0.01 for more in lost),
        "hybrid fails where one of the two does not": sum(more == float("inf") for more in lost),
        "worst": max((more for more in lost if more < float("inf")), default=0.0),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["log"] for row in rows))
    figure, grid = plt.subplots(
        len(RATIOS), len(names), figsize=(2.7 * len(names), 9), sharex=True, squeeze=False
    )
    styles = {"recompute": "k--", "swap": "C0:", "hybrid": "C1-o", "chosen": "C2-"}
    for (i, ratio), (j, name) in ((r, n) for r in enumerate(RATIOS) for n in enumerate(names)):
        axes = grid[i][j]
        mine = [row for row in rows if (row["log"], row["ratio"]) == (name, ratio)]
        for way, style in styles.items():
            found = [(100 * row["share"], overhead(row[way])) for row in mine]
            found = [(x, y) for x, y in found if y < float("inf")]
            if found:
                wide = {"linewidth": 5, "alpha": 0.3} if way == "chosen" else {"markersize": 3}
                axes.plot(*zip(*found, strict=True), style, label=way, **wide)
        least = min(overhead(row["chosen"]) for row in mine)
        ceiling = max(
            1.0 if overhead(row["recompute"]) == float("inf") else overhead(row["recompute"])
            for row in mine
        )
        axes.set_ylim(0.8 * max(min(least, ceiling), 0.005), 4 * ceiling)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        if i == 0:
            axes.set_title(name)
        if j == 0:
            axes.set_ylabel(f"overhead at {ratio:.1f}")
        if i == len(RATIOS) - 1:
            axes.set_xlabel("bandwidth, % of hiding all")
    handles = {h.get_label(): h for axes in grid.flat for h in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="a folder of the logs")
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    about = conditions()
    rows: list[dict[str, Any]] = []
    print("         log ratio share" + "".join(f"{way:>11}" for way in WAYS))
    for path in logs_in(given.logs):
        name = path.name.partition(".")[0]
        if not given.only or name in given.only:
            rows += measure(name, load(path))
    figures = {"summary": summary(rows), "rows": rows}
    print(json.dumps(figures["summary"], indent=1))
    write(RESULT.stem, {**about, "figures": figures})
    plot(rows, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
