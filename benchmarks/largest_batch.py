"""Find the largest batch that each method trains within a memory limit, and its throughput.

    scripts/bench largest_batch [--models gpt ...] [--methods checkpoint ...] [--quick]
                                [--seconds 5] [--device cuda]

The limit is the peak of plain PyTorch at a base batch, constants and inputs included, measured as
in `peers`. The script tries one, two and three times the base batch, then finds the largest batch
by doubling and bisection. Each batch is tried with a new model. A batch fits if the measured peak
of one of the method's settings is within the limit. Settings are tried from the one that saves the
least memory, or from the one that a smaller batch needed.

Throughput (samples per second) is divided by that of plain PyTorch at the base batch. Both train
alternately, in blocks of steps (A B A B). Plain PyTorch is also timed at batches that exceed the
limit, to show the effect of larger batches alone. Published for DTR, on GPUs: 2x at 94.3 %
(BERT-base) and 96.5 % (BERT-large), 3x at 93.2 % (GPT-2): marisa.moe/dtr.html, in the compiler Raf.

Writes results/largest_batch.json, .csv and one plot into docs/images/.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, answers, conditions, earlier_by, spread, write_table
from _methods import Point, points
from _trainer import Trainer, activations, block, in_turn, nbytes, warm
from _workloads import WORKLOADS, Workload

from rekindle import _facade
from rekindle._predict import largest
from rekindle._units import format_bytes
from rekindle.pytorch.learned import _background, _step_plans
from rekindle.report import _plot

RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "images"
KEY = ("model", "method", "at")  #: columns that identify a row of the results
COLUMNS = (*KEY, "batch", "multiple", "setting")
LARGEST = "largest"

#: Smaller sizes than those of `peers` for a CPU, so that the script takes a quarter of an hour.
SMALL = {
    "gpt": {"batch": 4, "width": 128, "layers": 4},
    "bert": {"batch": 4, "width": 128, "layers": 4},
    "resnet50": {"batch": 8, "size": 64, "width": 16},
    "unet": {"batch": 4, "size": 64, "width": 16},
}
METHODS = (
    "plain",
    "rekindle online",
    "rekindle learned",
    "rekindle planned",
    "checkpoint",
    "selective",
)
#: Budgets as fractions of the activations. If the measured peak exceeds a budget a little, such as
#: by a workspace at the first call of an operator, a lower budget leaves room for that.
SHARES = (1.0, 0.97, 0.85, 0.7)
PUBLISHED = {"gpt": ((3, 0.932),), "bert": ((2, 0.943), (2, 0.965))}
MOST = 16  #: largest batch to try, in multiples of the base batch
SECONDS = 0.5  # time of a block of steps
MOST_SECONDS = 900.0  # time limit for one method at one model


Tell = Callable[[dict[str, Any]], None]

# -- one method at one model, in a process of its own ----------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes that plain PyTorch needs at the base batch.

    `state` is the memory of the optimizer's state, which is also part of `constants`.
    """

    constants: int
    inputs: int
    activations: int
    state: int

    @property
    def limit(self) -> int:
        return self.constants + self.inputs + self.activations


@dataclass(frozen=True)
class Tried:
    """An attempt at a batch.

    Attributes:
        used: Bytes at the peak, if the step ended.
        figures: The throughput, if it was timed.
        failure: The reason why the batch does not fit, or None.
    """

    batch: int
    point: Point
    used: int | None = None
    failure: str | None = None
    figures: dict[str, Any] | None = None


class Search:
    """Tries batches of one model with one method. Each attempt has a new model, freed after it."""

    def __init__(self, workload: Workload, method: str, device: str, tell: Tell) -> None:
        self.workload, self.device, self._tell = workload, device, tell
        self.plain = Trainer(workload, device)
        for _ in range(2):
            self.plain.step()
        self.memory = Memory(
            self.plain.constants(),
            nbytes(self.plain.batch),
            activations(self.plain, device),
            self.plain.state(),
        )
        self.base = workload.sizes(device)["batch"]
        self.settings = settings(workload, method)
        self._tried: dict[int, Tried] = {}

    def fits(self, batch: int) -> bool:
        return self.tried(batch).failure is None

    def tried(self, batch: int, rounds: int = 0) -> Tried:
        """Try the settings of the method in order, until the batch fits.

        Args:
            batch: The batch size.
            rounds: Number of times to time the batch, if it fits or the method is plain PyTorch.

        Returns:
            The attempt that fits, or the last one.
        """
        known = self._tried.get(batch)
        if known is None or (rounds and known.failure is None and known.figures is None):
            found = self._try(batch, rounds, [known.point] if known else self._open(batch))
            self._tried[batch] = found
            if known is None:
                self._tell({"tried": batch, "failure": found.failure})
        return self._tried[batch]

    def _open(self, batch: int) -> list[Point]:
        """Return the settings to try for `batch`.

        Settings that were insufficient for a smaller batch are left out.
        """
        needed = [
            self.settings.index(tried.point)
            for tried in self._tried.values()
            if tried.batch < batch
        ]
        return self.settings[max(needed, default=0) :]

    def _try(self, batch: int, rounds: int, settings: list[Point]) -> Tried:
        found = Tried(batch, settings[0])
        for point in settings:
            try:
                found = self._measure(point, batch, rounds)
            except ImportError:
                raise
            except MemoryError as error:  # later settings would fail too
                return Tried(batch, point, failure=_first_line(error))
            except Exception as error:
                found = Tried(batch, point, failure=f"{type(error).__name__}: {_first_line(error)}")
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
            if found.failure is None:
                break
        return found

    def _measure(self, point: Point, batch: int, rounds: int) -> Tried:
        others = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        # On CUDA a budget counts all memory that is in use when it is entered.
        beside = others + self.memory.constants, others + self.memory.limit
        changed = self._changed(point, batch)
        with warm(point, changed, *beside):
            peak = activations(changed, self.device)
        used = self.memory.constants + nbytes(changed.batch) + peak
        over = used > self.memory.limit
        timed = rounds and (point.method == "plain" or not over)
        return Tried(
            batch,
            point,
            used,
            f"takes {format_bytes(used)} of {format_bytes(self.memory.limit)}" if over else None,
            self._throughput(point, changed, beside, rounds) if timed else None,
        )

    def _changed(self, point: Point, batch: int) -> Trainer:
        sizes = self.workload.sizes(self.device) | {"batch": batch}
        changed = Trainer(replace(self.workload, **{self.device: sizes}), self.device)
        memory = self.memory
        about = {"constants": memory.constants, "peak": memory.limit, "reserve": memory.state}
        about["inputs"] = changed.batch
        changed.called = point.prepare(changed.model, self.workload, about)
        return changed

    def _throughput(
        self, point: Point, changed: Trainer, beside: tuple[int, int], rounds: int
    ) -> dict[str, Any]:
        """Return the samples per second, and their ratio to those of plain PyTorch."""
        batch = changed.workload.sizes(self.device)["batch"]
        count = max(2, int(SECONDS / block(self.plain.step, 1, self.device)))
        pairs = in_turn(
            (self.plain, count),
            (changed, max(2, count * self.base // batch)),
            (point, *beside),
            rounds=rounds,
            device=self.device,
        )
        more = batch / self.base
        return {
            "throughput": spread([more * free / taken for free, taken in pairs], 3),
            "samples_per_second": spread([batch / taken for _, taken in pairs], 1),
        }


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def settings(workload: Workload, method: str) -> list[Point]:
    """Return the settings of a method, from the one that needs the most memory down."""
    if method == "plain":
        return [Point("plain", "")]
    return [point for point in points(workload, SHARES) if point.method == method]


def measure(
    workload: Workload,
    method: str,
    device: str,
    tell: Tell,
    quick: bool,
) -> None:
    """Measure one method at one model. Pass to `tell` each attempt and each row of the results."""
    search = Search(workload, method, device, tell)
    base, rounds = search.base, 1 if quick else 3
    unit = base if quick else max(1, base // 2)

    def row(at: str, tried: Tried) -> dict[str, Any]:
        found: dict[str, Any] = {"at": at, "batch": tried.batch, "setting": tried.point.setting}
        found["multiple"] = round(tried.batch / base, 3)
        if tried.used is not None:
            found |= {"used": tried.used, "limit": search.memory.limit}
        if tried.failure is not None:
            found["infeasible"] = tried.failure
        return found | (tried.figures or {})

    for multiple in (2,) if quick else (1, 2, 3):
        tell(row(f"{multiple}x", search.tried(multiple * base, rounds)))
    units = largest(lambda n: search.fits(n * unit), MOST * base // unit)
    found = row(LARGEST, search.tried(max(1, units) * unit, rounds))
    if units * unit < MOST * base:
        beyond = search.tried((units + 1) * unit)
        found["next"] = {"batch": beyond.batch, "infeasible": beyond.failure}
    tell(found)


# -- one process for each method and model ---------------------------------------------------------


def run(model: str, method: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows and attempts of a method and a model, as soon as they are measured."""
    command = [sys.executable, __file__, "--worker", model, method, "--device", options.device]
    command += ["--seconds", str(options.seconds), *(["--quick"] if options.quick else [])]
    for answer in answers(command, MOST_SECONDS):
        if "failed" in answer or "missing" in answer:
            answer["at"] = LARGEST
        yield {"model": model, "method": method} | answer


def show(row: dict[str, Any]) -> None:
    head = f"{row['model']:9} {row['method']:17} "
    if "tried" in row:
        print(f"{head} tried {row['tried']:4}  {row['failure'] or 'fits'}"[:110], flush=True)
        return
    reason = next((row[key] for key in ("infeasible", "failed", "missing") if key in row), "")
    text = f"{head}{row['at']:>8}"
    if "multiple" in row:
        text += f"  batch {row['batch']:4} ({row['multiple']:5.2f}x) {row['setting']:>7}"
    if "throughput" in row:
        times = row["throughput"]
        text += f"  throughput {times['median']:.3f} ({times['min']:.3f}-{times['max']:.3f})"
    print(f"{text}  {reason}"[:150], flush=True)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot throughput over batch, with a panel for each model and a curve for each method."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, panels = _plot.grid(len(models), columns=2, width=5.5, height=3.8)
    for model, axes in zip(models, panels, strict=True):
        for number, method in enumerate(methods):
            curve = sorted(
                {
                    (row["multiple"], row["throughput"]["median"])
                    for row in rows
                    if (row["model"], row["method"]) == (model, method) and "throughput" in row
                }
            )
            if curve:
                label = "plain, without a limit" if method == "plain" else method
                style = "-" if method.startswith("rekindle") else "--"
                x, y = zip(*curve, strict=True)
                _plot.line(axes, x, y, label=label, number=number - 1, style=style)
        for multiple, share in PUBLISHED.get(model, ()):
            axes.plot([multiple], [share], "*", color="gold", mec="black", ms=14, zorder=5)
        axes.set_title(model)
        axes.set_xlabel("batch / plain's largest (star: published for DTR)")
        axes.set_ylabel("throughput / plain")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8, loc="lower left")
    _plot.save(figure, path)


def smaller(workload: Workload) -> Workload:
    """Return the workload in its size for a CPU."""
    return replace(workload, cpu=workload.cpu | SMALL[workload.name])


def worker(model: str, method: str, options: argparse.Namespace) -> None:
    def tell(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)

    torch.set_default_device(options.device)
    _step_plans.SECONDS = _facade.TIME_LIMIT = options.seconds  # type: ignore[misc]
    _background.NICENESS = 0  # type: ignore[misc]  # waited for: nobody to stand back from
    try:
        measure(smaller(WORKLOADS[model]), method, options.device, tell, options.quick)
    except ImportError as error:
        tell({"missing": str(error)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*SMALL], default=[*SMALL])
    parser.add_argument("--methods", nargs="+", default=[*METHODS])
    parser.add_argument("--quick", action="store_true", help="2x and the largest, in whole bases")
    parser.add_argument("--seconds", type=float, default=5.0, help="to improve a plan in")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/largest_batch.json")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        model, method = options.worker
        worker(model, method, options)
        return
    now = conditions()
    suffix = "" if options.device == "cpu" else f"_{options.device}"
    out = options.out or RESULTS / f"largest_batch{suffix}.json"
    rows = earlier_by(out, KEY)
    for model in options.models:
        for method in options.methods:
            for row in run(model, method, options):
                show(row)
                if "tried" not in row:
                    origin = {"commit": now["commit"], "cpu": now["machine"]["cpu"]}
                    rows[model, method, row["at"]] = row | origin
            results = now | {"seconds_for_a_plan": options.seconds}
            write_table(results, [*rows.values()], out, columns=COLUMNS, figure="throughput")
        picture = out.with_suffix(".png") if options.out else PICTURES / f"{out.stem}.png"
        plot([*rows.values()], picture)


if __name__ == "__main__":
    main()
