"""Helpers of the benchmarks: the tests' models, the conditions of a run, spreads, result files."""

from __future__ import annotations

import csv
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # to import the models and the memory tracker of the tests


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def conditions(threads: int = 1) -> dict[str, Any]:
    """Return the conditions of a measurement: command, machine, versions, commit.

    Also set torch's number of threads, here and in child processes. With one thread, other programs
    on the machine disturb the times less, and sums are added up in the same order each time.
    """
    import torch

    import rekindle

    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_at_start": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "rekindle": rekindle.__version__,
        },
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src")),
    }


def write(name: str, results: dict[str, Any], path: Path | None = None) -> None:
    path = path or ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def write_table(
    results: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    out: Path,
    *,
    columns: Sequence[str],
    figure: str,
) -> None:
    """Write the results and their rows as JSON; also write the rows that have `figure` as CSV.

    The CSV has `columns`, and the median, minimum and maximum of `figure`.
    """
    write(out.stem, results | {"rows": rows}, out)
    with out.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*columns, figure, f"{figure}_min", f"{figure}_max"])
        for row in rows:
            if figure in row:
                figures = [row[figure][key] for key in ("median", "min", "max")]
                table.writerow([*(row[name] for name in columns), *figures])


def earlier(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier results file, each with its commit; [] if there is no file.

    A script keeps the rows that it does not measure again.
    """
    if not path.exists():
        return []
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = results.get("figures", results)["rows"]
    return [{"commit": results["commit"]} | row for row in rows]


def earlier_by(path: Path, key: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the rows of the last run as a dict, by their values of the columns `key`."""
    return {tuple(row[name] for name in key): row for row in earlier(path)}


def answers(command: Sequence[str], most_seconds: float) -> Iterator[dict[str, Any]]:
    """Run a process, and yield the JSON objects that it prints, one on each line.

    If the process fails, the last object is {"failed": reason}."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer = threading.Timer(most_seconds, process.kill)
        timer.start()
        said = False
        try:
            for line in process.stdout or ():
                # a killed process may have printed a part of a line
                if line.startswith("{") and line.endswith("\n"):
                    said = True
                    yield json.loads(line)
            code = process.wait()
        finally:
            in_time = timer.is_alive()
            timer.cancel()
            process.kill()
            process.communicate()
        if not in_time:
            yield {"failed": f"took more than {most_seconds:.0f} s"}
        elif code or not said:
            errors.seek(0)
            silent = f"no output, exit status {code}"
            yield {"failed": (errors.read().strip().splitlines() or [silent])[-1][:200]}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((s.partition(":")[2].strip() for s in lines if s.startswith("model name")), "")


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()
