"""Measure start-up costs: entering a budget, first steps, `rekindle run`, `rekindle build`.

The budgets are so large that nothing is evicted. benchmarks/README.md has the claims.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import ROOT, conditions, spread, write
from _workloads import WORKLOADS, Workload
from native import Unrolled
from torch import nn

import rekindle

AMOUNT = "4GiB"
PARTS = ("contexts", "processes", "run", "build")
EMPTY = 20  # number of empty budgets that are entered and left in one measurement


def encoder(*, width: int, layers: int, **_: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer
    return nn.Sequential(
        *[
            layer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
    )


SMALL = (  # programs of many small operators; the second one also has many modules
    Workload(
        "cell", lambda *, width, **_: Unrolled(width),
        lambda time, batch, width: torch.randn(time, batch, width),
        lambda model, batch: model(batch).square().mean(), lambda model: [],
        cpu={"time": 60, "batch": 16, "width": 64}, cuda={},
    ),
    Workload(
        "24 small blocks", encoder,
        lambda batch, time, width, **_: torch.randn(batch, time, width),
        lambda model, batch: model(batch).square().mean(), lambda model: [],
        cpu={"batch": 2, "time": 64, "width": 64, "layers": 24}, cuda={},
    ),
)  # fmt: skip
MODELS = {workload.name: workload for workload in (*SMALL, *WORKLOADS.values())}
FIGURES = ("plain_ms", "each", "first", "tenth", "empty_ms")


class Steps(NamedTuple):
    """A model in training, and its number of modules."""

    step: Callable[[], None]
    modules: int


def training(workload: Workload) -> Steps:
    torch.manual_seed(0)
    sizes = workload.sizes("cpu")
    model, batch = workload.build(**sizes), workload.batch(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()

    return Steps(step, len(list(model.modules())))


def seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of a function."""
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def contexts(workload: Workload, rounds: int) -> dict[str, Any]:
    """Time three uses: a budget around each step, a budget around many steps, an empty budget.

    Within the budget around many steps, the first and the tenth step are timed.
    """
    step, modules = training(workload)

    def each() -> None:
        with rekindle.budget(AMOUNT):
            step()

    def empty() -> None:
        for _ in range(EMPTY):
            with rekindle.budget(AMOUNT):
                pass

    for work in (step, each, each):
        work()
    found: dict[str, list[float]] = {"each": [], "first": [], "tenth": [], "empty_ms": []}
    plain_ms: list[float] = []
    for _ in range(rounds):
        plain = seconds(step)
        found["each"].append(seconds(each) / plain)
        with rekindle.budget(AMOUNT):
            found["first"].append(seconds(step) / plain)
            for _ in range(8):
                step()
            found["tenth"].append(seconds(step) / plain)
        found["empty_ms"].append(1e3 * seconds(empty) / EMPTY)
        plain_ms.append(1e3 * plain)
    row = {"model": workload.name, "modules": modules, "plain_ms": spread(plain_ms, 2)}
    return row | {name: spread(values, 3) for name, values in found.items()}


def first_steps(name: str, *, within: bool) -> list[float]:
    """Return the processor seconds of the first three steps of a new process."""
    command = [sys.executable, __file__, "--child", name, *(["--within"] if within else [])]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def new_processes(name: str, rounds: int) -> dict[str, Any]:
    """Time the first three steps of new processes, in plain PyTorch and in a budget in turn."""
    plain, within = [], []
    for _ in range(rounds):
        plain.append(first_steps(name, within=False))
        within.append(first_steps(name, within=True))
    ratios = [
        [mine[at] / theirs[at] for mine, theirs in zip(within, plain, strict=True)]
        for at in range(3)
    ]
    return {
        "model": name,
        "plain_ms": [spread([1e3 * each[at] for each in plain], 1) for at in range(3)],
        "ratios": [spread(each, 3) for each in ratios],
    }


def child(name: str, *, within: bool) -> None:
    """Print the seconds of the first three steps of this process."""
    step, _ = training(MODELS[name])
    with rekindle.budget(AMOUNT) if within else nullcontext():
        print(json.dumps([seconds(step) for _ in range(3)]))


def process(command: list[str], **environment: str) -> dict[str, float]:
    """Return the processor and the wall-clock seconds of a process, its children included."""
    began = time.perf_counter()
    child = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{command} ends with {child.returncode}")
    return {"processor": used.ru_utime + used.ru_stime, "clock": time.perf_counter() - began}


def empty_script(rounds: int) -> dict[str, Any]:
    """Time a script that only imports torch, with `python` and with `rekindle run`."""
    plain, within = [], []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text("import torch\n")
        run = [sys.executable, "-m", "rekindle", "run", "--quiet", "--budget", AMOUNT, str(script)]
        for _ in range(rounds + 1):
            plain.append(process([sys.executable, str(script)])["processor"])
            within.append(process(run)["processor"])
    # the first pair is left out: it fills the system's file cache
    pairs = list(zip(within[1:], plain[1:], strict=True))
    return {
        "plain_s": spread(plain[1:], 2),
        "run_s": spread(within[1:], 2),
        "ratio": spread([mine / theirs for mine, theirs in pairs], 2),
    }


def cold_build() -> dict[str, Any]:
    """Time `rekindle build` with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "rekindle", "build"]
        took = process(command, REKINDLE_CACHE=cache, XDG_CACHE_HOME=cache)
    return {name: round(value, 1) for name, value in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.child:
        child(options.child, within=options.within)
        return
    results: dict[str, Any] = conditions()
    if "run" in options.parts:
        results["run"] = empty_script(options.rounds)
        print("rekindle run:", results["run"], flush=True)
    rows = []
    for name in options.models if "contexts" in options.parts else ():
        row = contexts(MODELS[name], options.rounds)
        rows.append(row | {"commit": results["commit"]})
        figures = {part: row[part]["median"] for part in FIGURES}
        print(f"{name}: {figures}", flush=True)
    if "processes" in options.parts:
        results["processes"] = []
        for name in options.models:
            found = new_processes(name, options.rounds)
            results["processes"].append(found | {"commit": results["commit"]})
            print(f"{name}: {[each['median'] for each in found['ratios']]}", flush=True)
    if "build" in options.parts:
        results["build"] = cold_build()
        print("cold build:", results["build"], flush=True)
    if "contexts" in options.parts:
        results["rows"] = rows
    path = options.out or ROOT / "benchmarks" / "results" / "first_minute.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write("first_minute", before | results, path)  # parts that were not measured stay


if __name__ == "__main__":
    main()
