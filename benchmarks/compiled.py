"""Compare compiled plans with eager plans and with torch.compile: time, memory, compilation.

    scripts/bench compiled [--models gpt bert ...] [--ways ...] [--fractions 0.5 ...] [--rounds 5]

In a compiled plan, Inductor compiles small groups of cheap operators (segments). Each point runs in
its own process with an empty Inductor cache and no stored operator costs. So `build_seconds`, the
wall-clock time to build a plan, includes tracing (with the first step), measuring, compiling and
planning. `phases` has the time of each. `build_cpu_seconds` is the processor time of the build,
including that of the C++ compiler.

Then two copies of the model train alternately, in blocks of steps (A B A B): one in plain PyTorch,
and one with the plan or torch.compile. Times are processor times with one thread, so that other
programs disturb little. Memory is counted by the allocator's events, as in `peers`; `over_budget`
is the peak of a step divided by the budget.

`differs` is the largest difference of a gradient from the plain model's, divided by the largest
gradient. For this comparison torch.compile draws random numbers as eager PyTorch does; the timed
code does not. `equal_to_unlimited` is true if all gradients equal those of the same compiled code
without a budget, bit for bit. If a process dies or takes too long, its row has `failed`, and the
figures that the process printed before.

`--depths` measures how long plans of GPTs of 4 and of 48 blocks take to build, and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, answers, conditions, earlier_by, spread, write
from _trainer import Trainer, activations
from _workloads import WORKLOADS, Workload

import rekindle
from rekindle import _facade
from rekindle.planners import KeepAll
from rekindle.pytorch.planned import _prices
from rekindle.pytorch.planned._segments import Segment

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("model", "way", "fraction")
WAYS = ("planned", "compiled plan", "torch.compile")
FRACTIONS = (1.0, 0.5, 0.25, 0.15)  #: budgets, as fractions of the activation memory
SECONDS = 0.6  # time of a block of steps
MOST_SECONDS = 590.0  # time limit for one process (one point of the results)
DEPTHS = (4, 48)


class Phases:
    """Wall-clock seconds of each phase of planning.

    Time in a phase that runs inside another phase counts for the inner one only.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within = ["tracing"]
        self._since = time.perf_counter()

    def reported(self) -> dict[str, float]:
        self._turn()
        return {name: round(seconds, 1) for name, seconds in self.seconds.items()}

    @contextmanager
    def watched(self) -> Iterator[Phases]:
        """Measure the phases of plans while the context is open."""
        parts: dict[str, tuple[type[Any], str]] = {
            "measuring": (_prices.Prices, "of"),
            "compiling": (Segment, "compile"),
            "planning": (_facade._Plans, "__call__"),
        }
        own = {name: getattr(kind, method) for name, (kind, method) in parts.items()}
        for name, (kind, method) in parts.items():
            setattr(kind, method, self._timed(name, own[name]))
        try:
            yield self
        finally:
            for name, (kind, method) in parts.items():
                setattr(kind, method, own[name])

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._within.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._within.pop()

        return timed

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._within[-1]] += now - self._since
        self._since = now


def block(trainer: Trainer, count: int) -> float:
    """Return the processor seconds of a step."""
    gc.collect()
    start = time.process_time()
    for _ in range(count):
        trainer.step()
    return (time.process_time() - start) / count


def processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def changed(way: str, trainer: Trainer, budget: int, reserve: int) -> dict[str, Any]:
    """Let `trainer` train by the method `way`. Return figures of the plan and of its build."""
    began, used = time.perf_counter(), processor_seconds()
    reported: dict[str, Any] = {}
    if way == "torch.compile":
        trainer.called = torch.compile(trainer.model)
        trainer.step()
    else:
        with Phases().watched() as phases:
            plan = rekindle.plan(
                trainer.model,
                (trainer.batch[0],),
                budget=budget,
                reserve=reserve,
                check=False,
                compile=way == "compiled plan",
            )
            trainer.called = plan.apply()
            trainer.step()
        reported["phases"] = phases.reported()
        reported["recomputation"] = plan.overhead
        reported["planner_seconds"] = round(plan.plan.seconds, 1)
        trace = plan.trace
        reported["operators"] = len(trace.ops)
        names = [op.name for op in trace.ops if op.name.startswith("compiled(")]
        reported["segments"] = {"calls": len(names), "distinct": len(set(names))}
    reported["build_seconds"] = round(time.perf_counter() - began, 1)
    reported["build_cpu_seconds"] = round(processor_seconds() - used, 1)
    return reported


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    torch.manual_seed(21)
    trainer.optimizer.zero_grad()
    trainer.workload.loss(trainer.called, trainer.batch).backward()
    return [each.grad.clone() for each in trainer.model.parameters() if each.grad is not None]


def make_alike(other: Trainer, one: Trainer) -> None:
    """Copy the weights and the state of `one` to `other`, so that both compute equal steps."""
    other.model.load_state_dict(one.model.state_dict())
    if hasattr(one.called, "state"):  # a recurrent state, passed from batch to batch
        other.called.state = copy.deepcopy(one.called.state)


def is_unlimited(limited: Trainer, budget: int) -> bool:
    """Return True if the gradients equal, bit for bit, those of a plan without evictions."""
    free = Trainer(limited.workload, "cpu")
    plan = rekindle.plan(
        free.model, (free.batch[0],), budget=budget, planner=KeepAll(), check=False, compile=True
    )
    free.called = plan.apply()
    make_alike(free, limited)
    pairs = zip(gradients(limited), gradients(free), strict=True)
    return all(torch.equal(found, wanted) for found, wanted in pairs)


def differs(plain: Trainer, other: Trainer) -> float:
    make_alike(other, plain)
    pairs = [*zip(gradients(other), gradients(plain), strict=True)]
    largest = max(float(wanted.abs().max()) for _, wanted in pairs)
    return max(float((found - wanted).abs().max()) for found, wanted in pairs) / largest


def drawing_as_eager(workload: Workload) -> Trainer:
    """Return a model compiled by torch.compile that draws random numbers as eager PyTorch does.

    Drawing them in this way is slower.
    """
    torch._dynamo.reset()
    trainer = Trainer(workload, "cpu")
    trainer.called = torch.compile(trainer.model, options={"fallback_random": True})
    return trainer


def measure(workload: Workload, way: str, fraction: float, rounds: int) -> dict[str, Any]:
    plain, other = Trainer(workload, "cpu"), Trainer(workload, "cpu")
    for _ in range(2):
        plain.step()
    constants = plain.constants()
    peak = constants + activations(plain, "cpu")
    budget = constants + int(fraction * (peak - constants))
    reported = changed(way, other, budget, plain.state())
    print(json.dumps(reported), flush=True)  # printed now, in case the rest fails
    used = constants + activations(other, "cpu")
    count = max(2, int(SECONDS / block(plain, 1)))
    pairs = [(block(plain, count), block(other, count)) for _ in range(rounds)]
    if way == "compiled plan":
        reported["equal_to_unlimited"] = is_unlimited(other, 4 * peak)
    if way == "torch.compile":
        other = drawing_as_eager(workload)
    return reported | {
        "memory": round((used - constants) / (peak - constants), 4),
        "over_budget": round(used / budget, 4),
        "time": spread([taken / free for free, taken in pairs], 3),
        "differs": differs(plain, other),
    }


def worker(name: str, way: str, fraction: float, rounds: int) -> dict[str, Any]:
    try:
        return measure(WORKLOADS[name], way, fraction, rounds)
    except MemoryError as error:
        return {"infeasible": str(error).splitlines()[0][:200]}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def depth(layers: int) -> dict[str, Any]:
    """Return how long it takes to build a compiled plan of a GPT, within half of the activations.

    Args:
        layers: The number of the GPT's blocks.
    """
    from dataclasses import replace

    sizes = {**WORKLOADS["gpt"].cpu, "batch": 2, "time": 64, "width": 64, "layers": layers}
    trainer = Trainer(replace(WORKLOADS["gpt"], cpu=sizes), "cpu")
    trainer.step()
    constants = trainer.constants()
    budget = constants + activations(trainer, "cpu") // 2
    return changed("compiled plan", trainer, budget, trainer.state())


def show(row: dict[str, Any]) -> None:
    print({key: value for key, value in row.items() if key != "commit"}, flush=True)


def fresh(command: list[str]) -> dict[str, Any]:
    """Run a process with empty caches.

    Returns:
        The figures that the process printed, and the reason if it failed.
    """
    row: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for said in answers([sys.executable, __file__, *command], MOST_SECONDS):
            row |= said
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt", "bert", "resnet50", "densenet",
                                                        "unet", "lstm"])  # fmt: skip
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--fractions", nargs="+", type=float, default=[*FRACTIONS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled.json")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        prices = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "prices"
        _prices.cache_folder = lambda: prices  # pyright: ignore[reportPrivateImportUsage]
        name, way, fraction = options.worker
        done = depth(int(fraction)) if name == "depth" else worker(
            name, way, float(fraction), options.rounds
        )  # fmt: skip
        print(json.dumps(done))
        return
    now = conditions()
    rows: dict[tuple[Any, ...], dict[str, Any]] = {**earlier_by(options.out, KEY)}
    points = [
        (name, way, fraction)
        for name in options.models
        for way in options.ways
        for fraction in ([1.0] if way == "torch.compile" else options.fractions)
    ]
    if options.depths:
        points = [("depth", "compiled plan", float(layers)) for layers in DEPTHS]
    for key in points:
        command = ["--worker", *map(str, key), "--rounds", str(options.rounds)]
        if key[0] == "depth":
            command[3] = str(int(key[2]))
        row = dict(zip(KEY, key, strict=True)) | fresh(command)
        row |= {"commit": now["commit"], "load": round(os.getloadavg()[0], 1)}
        rows[key] = row
        show(row)
        write("compiled", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
