"""Measure resident memory and processor time of processes with a budget.

    scripts/bench resident [--programs gpt lstm_80 ...] [--ways plain malloc arena]
                           [--fractions 0.7 ...] [--threads 1 2] [--preload LIBRARY]

Each point runs in its own process. The process measures the processor time of the steps, and how
much its resident memory grows from just before the model is built. So the memory of weights,
gradients, optimizer state and batches is included. The ways are `plain` (no budget), `malloc` (a
budget with `arena=False`) and `arena` (a budget with Rekindle's CPU allocator, the default).

The budget of a model is its constants and a fraction of its activation memory. `lstm_80` is an
unrolled LSTM cell within 80 MiB. `loop_100` and `loop_25` are the loop of 2,000 matrix products of
pytorch#125591 within 100 and 25 MiB. With `--cap` a watchdog kills each process whose anonymous
memory exceeds 1.2 times its budget plus 250 MiB. Anonymous memory is memory without a file behind
it, which is what control groups limit. The memory of Python and PyTorch is included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, conditions, earlier_by, write
from _trainer import Trainer, activations
from _workloads import WORKLOADS

import rekindle

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("program", "fraction", "threads", "way", "preload")
WAYS = ("plain", "malloc", "arena")
FRACTIONS = (0.7, 0.5, 0.3)  #: budgets, as fractions of the activation memory
STEPS = 4
PAGE = resource.getpagesize()
MIB = 2**20
MOST_SECONDS = 300.0  # time limit for one process (one point of the results)
EVERY_SECONDS = 0.001  # interval of the watchdog
SLACK = 250 * MIB  # in addition to 1.2 times the budget, with `--cap`


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def most_resident() -> int:
    """Return the peak of resident bytes since `forget_most`, as the operating system counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_most() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load_libraries() -> None:
    """Load the libraries that the first budget of a process loads, to exclude their memory."""
    with rekindle.budget("1MiB", learn=False):
        (torch.ones(3, requires_grad=True) * 2).sum().backward()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


# -- programs: each returns a step, and a function for the tensors whose bits are compared ---------

Program = Callable[[], tuple[Callable[[], None], Callable[[], Iterable[torch.Tensor]]]]


def model(name: str) -> Program:
    def build() -> tuple[Callable[[], None], Callable[[], Iterable[torch.Tensor]]]:
        trainer = Trainer(WORKLOADS[name], "cpu")
        return trainer.step, trainer.model.parameters

    return build


def unrolled_lstm() -> tuple[Callable[[], None], Callable[[], Iterable[torch.Tensor]]]:
    torch.manual_seed(0)
    cell = torch.nn.LSTMCell(64, 256)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    x = torch.randn(600, 64, 64)

    def step() -> None:
        optimizer.zero_grad()
        h = c = torch.zeros(64, 256)
        for one in x:
            h, c = cell(one, (h, c))
        h.square().mean().backward()
        optimizer.step()

    return step, cell.parameters


def loop_of_products() -> tuple[Callable[[], None], Callable[[], Iterable[torch.Tensor]]]:
    torch.manual_seed(0)
    a, b, start = (torch.randn(200, 200, dtype=torch.float64) for _ in range(3))
    a, b = a / a.norm(), b / b.norm()
    scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def step() -> None:
        c, d = a + scale * b, start
        for _ in range(2000):
            d = c @ d
            d = d / d.norm()
        (b.t() @ d).norm().backward()

    return step, lambda: [scale.grad] if scale.grad is not None else []


FIXED: dict[str, tuple[Program, int, int]] = {  #: program, budget, number of steps
    "lstm_80": (unrolled_lstm, 80 * MIB, 2),
    "loop_100": (loop_of_products, 100 * MIB, 1),
    "loop_25": (loop_of_products, 25 * MIB, 1),
}


# -- one point ------------------------------------------------------------------------------------


def budget_of(name: str) -> dict[str, int]:
    """Return the constants of a model, and its activation memory, in bytes."""
    trainer = Trainer(WORKLOADS[name], "cpu")
    trainer.step()
    return {"constants": trainer.constants(), "activations": activations(trainer, "cpu")}


def measure(name: str, way: str, budget: int) -> dict[str, Any]:
    build, _, steps = FIXED.get(name, (model(name), 0, STEPS))
    load_libraries()
    before = resident()
    forget_most()
    step, bits = build()
    print(json.dumps({"before": before}), flush=True)
    context = nullcontext() if way == "plain" else rekindle.budget(budget, arena=way == "arena")
    start = resource.getrusage(resource.RUSAGE_SELF)
    with context as run:
        for _ in range(steps):
            step()
    end = resource.getrusage(resource.RUSAGE_SELF)
    row = {
        "growth": most_resident() - before,
        "user": round(end.ru_utime - start.ru_utime, 2),
        "system": round(end.ru_stime - start.ru_stime, 2),
        "faults": end.ru_minflt - start.ru_minflt,
        "left": resident() - before,
        "bits": digest(bits()),
    }
    if run is not None:
        row |= {"peak": run.peak, "recomputed": run.recomputations}
    return row


def worker(name: str, way: str, budget: int) -> dict[str, Any]:
    try:
        return measure(name, way, budget)
    except rekindle.OutOfBudget as error:
        return {"infeasible": f"needs {error.smallest_budget}"}


def point(command: list[str], most: int | None, preload: str) -> dict[str, Any]:
    """Run a worker, and return its row. Kill it if its anonymous memory exceeds `most` bytes."""
    environment = os.environ | ({"LD_PRELOAD": preload} if preload else {})
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        timer = threading.Timer(MOST_SECONDS, process.kill)
        timer.start()
        row: dict[str, Any] = {}
        try:
            for line in process.stdout or ():
                if not line.startswith("{"):
                    continue
                row |= json.loads(line)
                if "growth" not in row and most is not None:
                    threading.Thread(target=watch, args=(process, most), daemon=True).start()
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.communicate()
        if code == -9:
            row |= {"killed": True}
        elif code:
            errors.seek(0)
            row |= {"failed": (errors.read().strip().splitlines() or [str(code)])[-1][:200]}
    return row


def watch(process: subprocess.Popen[str], limit: int) -> None:
    """Kill the process when its anonymous memory (without a file) exceeds `limit` bytes."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        own = [1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
        if sum(own) > limit:
            process.kill()
            return
        time.sleep(EVERY_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    programs = [*WORKLOADS, *FIXED]
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--fractions", nargs="+", type=float, default=[*FRACTIONS])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--preload", default="", help="a library for LD_PRELOAD")
    parser.add_argument("--cap", action="store_true", help="kill processes far above the budget")
    parser.add_argument("--out", type=Path, default=RESULTS / "resident.json")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--measure-budget", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, way, budget, threads = options.worker
        torch.set_num_threads(int(threads))
        print(json.dumps(worker(name, way, int(budget))))
        return
    if options.measure_budget:
        torch.set_num_threads(1)
        print(json.dumps(budget_of(options.measure_budget)))
        return
    now = conditions()
    rows = earlier_by(options.out, KEY)
    for name in options.programs:
        found = {"constants": 0, "activations": 0}
        if name not in FIXED:
            command = [sys.executable, __file__, "--measure-budget", name]
            found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        for fraction in options.fractions if name not in FIXED else [1.0]:
            budget = found["constants"] + int(fraction * found["activations"])
            budget = FIXED[name][1] if name in FIXED else budget
            for threads in options.threads:
                for way in options.ways:
                    if way == "plain" and fraction not in (1.0, options.fractions[0]):
                        continue  # without a budget the fraction does not matter
                    place = (name, fraction, threads, way, Path(options.preload).name)
                    most = int(1.2 * budget) + SLACK if options.cap else None
                    command = [sys.executable, __file__, "--worker", name, way, str(budget)]
                    row = point([*command, str(threads)], most, options.preload)
                    row |= {"commit": now["commit"], "load": round(os.getloadavg()[0], 1)}
                    if options.cap:
                        row = {"under_a_cap": "killed" if "killed" in row else row.get("bits")}
                    rows[place] = rows.get(place, {}) | dict(zip(KEY, place, strict=True))
                    rows[place] |= {"budget": budget} | row
                    shown = {key: each for key, each in rows[place].items() if key != "commit"}
                    print(shown, flush=True)
                    write("resident", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
