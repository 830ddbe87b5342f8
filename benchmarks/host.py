"""Measure how much CPU work a budget adds: instructions and device queries per operator call.

BERT-base with tiny tensors in bfloat16 (autocast, fused AdamW) trains in three ways: in plain
PyTorch, in a budget without a limit, and within half of its activations. On a CPU, callgrind counts
the instructions of each pass if valgrind is installed; otherwise the smallest processor time of
several steps is measured. The tests' stand-in for a CUDA device counts calls of device functions.
benchmarks/README.md has the claims.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from _common import answers, conditions, write

Device = Literal["cpu", "stand-in"]
#: The passes of a step (forward, backward, optimizer), and the number of the optimizer's tensors.
Program = tuple[tuple[tuple[str, Callable[[], object]], ...], int]
_WARM_STEPS = 6  # Rekindle times three calls of each operator; Python's caches need more steps
_WEIGHTS = 300
_UNIT = ("instructions", "nanoseconds of processor time")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=2, help="that are counted")
    arguments.add_argument("--device", choices=("cpu", "stand-in"), action="append")
    arguments.add_argument("--timed", action="store_true", help="even where valgrind is there")
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        _work(options.worker[0], options.worker[1], options.steps)
        return
    results = conditions() | {"counted": _UNIT[options.timed or not shutil.which("valgrind")]}
    devices: list[Device] = options.device or ["cpu", "stand-in"]
    results["rows"] = [
        row for device in devices for row in _rows(device, options.steps, options.timed)
    ]
    write("host", results, options.out)


def _rows(device: Device, steps: int, timed: bool) -> list[dict[str, Any]]:
    """Return one row for each program and mode (plain PyTorch or a budget), for one step."""
    extension = ""
    if device == "stand-in":
        from tests.standin.process import compiled  # imports torch, so not before the stand-in

        extension = str(compiled(shutil.which("g++") or "g++"))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--steps", str(steps)]
        command += ["--worker", device, extension or "-"]
        if device == "cpu" and not timed and shutil.which("valgrind"):
            out = f"--callgrind-out-file={folder}/counts"
            command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", out, *command]
        rows = list(answers(command, 3600))
        counted = _instructions(Path(folder))
    for row in rows:
        names = list(row.get("passes", {})) if counted else []
        for name in names:
            row["passes"][name] = 0
        for name in names * steps:
            row["passes"][name] += counted.pop(0) // steps
    return _with_differences(rows)


def _instructions(folder: Path) -> list[int]:
    """Return the number of instructions in each dump that callgrind wrote to the folder."""
    parts = sorted(folder.glob("counts.*"), key=lambda path: int(path.suffix[1:]))
    found = []
    for part in parts:
        total = re.search(r"^(?:totals|summary): (\d+)", part.read_text(), re.MULTILINE)
        found.append(int(total[1]) if total else 0)
    return found


def _with_differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row the cost that its mode adds to plain PyTorch, per operator call."""
    plain = {row["program"]: row for row in rows if row.get("mode") == "plain"}
    for row in rows:
        base = plain.get(row.get("program", ""))
        if base is None or row is base:
            continue
        calls = sum(base["calls"].values())
        if "asked" in row:
            later, before = row["asked"]["later step"], base["asked"]["later step"]
            row["asked more, a call"] = {
                what: round((count - before[what]) / calls, 3) for what, count in later.items()
            }
            continue
        row["added"] = {
            name: round((count - base["passes"][name]) / base["calls"][name])
            for name, count in row["passes"].items()
        }
        added = sum(row["passes"].values()) - sum(base["passes"].values())
        row["added"]["a call"] = round(added / calls)
        of_optimizer = row["passes"]["optimizer"] - base["passes"]["optimizer"]
        row["added"]["a parameter"] = round(of_optimizer / base["weights"])
    return rows


# -- in the counted process -----------------------------------------------------------------------


def _work(device: str, extension: str, steps: int) -> None:
    """Print a row for each program and mode (plain PyTorch or a budget)."""
    standin = None
    if device == "stand-in":
        from tests.standin.device import install

        standin = install(Path(extension))
    import torch

    torch.set_num_threads(1)
    where = "cpu" if device == "cpu" else "cuda"
    for name, make in (("BERT-base", _bert), (f"AdamW over {_WEIGHTS} tensors", _adamw)):
        half = None
        for mode in ("plain", "watched", "within"):
            if mode == "within" and half is None:
                continue
            torch.manual_seed(0)
            program = make(where)
            with _context(mode, where, half) as run:
                row = {"device": device, "program": name, "mode": mode}
                row |= _counted(mode, program, steps, standin)
                if run is not None:
                    row["recomputed"] = run.recomputations
                    if mode == "watched" and name == "BERT-base":
                        half = (run.memory + run.peak) // 2
            _say(row)
            del program, run
            gc.collect()


def _say(row: dict[str, Any]) -> None:
    import json

    print(json.dumps(row), flush=True)


def _context(mode: str, where: str, half: int | None) -> AbstractContextManager[Any]:
    import rekindle

    if mode == "plain":
        return nullcontext()
    amount = None if mode == "watched" else half
    return rekindle.budget(amount, device=where, learn=False)


def _counted(mode: str, program: Program, steps: int, standin: Any) -> dict[str, Any]:
    """Return the cost of each pass, and the device queries of the first and of a later step."""
    import torch

    passes, weights = program

    def settled() -> None:
        if standin is not None:
            torch.cuda.synchronize()

    asked: dict[str, dict[str, int]] = {}
    for step in range(_WARM_STEPS):
        settled()
        if standin is not None:
            standin.asked()
        for _, act in passes:
            act()
        if standin is not None and step in (0, _WARM_STEPS - 1):
            asked["first step" if step == 0 else "later step"] = standin.asked()
    spent = dict.fromkeys((name for name, _ in passes), float("inf"))
    gc.disable()
    for _ in range(steps if "valgrind" not in os.environ.get("LD_PRELOAD", "") else 0):
        for name, act in passes:
            settled()
            began = time.process_time_ns()
            act()
            spent[name] = min(spent[name], time.process_time_ns() - began)
    if "valgrind" in os.environ.get("LD_PRELOAD", ""):
        spent = dict.fromkeys(spent, 0.0)
        for _, act in [*passes] * steps:
            settled()
            torch._C._valgrind_toggle()
            act()
            settled()
            torch._C._valgrind_toggle()
            torch._C._valgrind_toggle()
            torch._C._valgrind_toggle_and_dump_stats()
    gc.enable()
    row: dict[str, Any] = {"passes": {name: int(count) for name, count in spent.items()}}
    if mode == "plain":
        row["weights"] = weights
        row["calls"] = {}
        for name, act in passes:
            with _Count() as count:
                act()
            row["calls"][name] = count.calls
    # Worker threads of the stand-in device do much of the work, so times would mean nothing.
    if standin is not None:
        del row["passes"]
        row["asked"] = asked
    return row


class _Count:
    """Counts operators below autograd and autocast."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        outer = self
        self.calls = 0

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                outer.calls += 1
                return func(*args, **(kwargs or {}))

        self._mode = Mode()

    def __enter__(self) -> _Count:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)


def _bert(where: str) -> Program:
    import torch
    import torch.nn.functional as F
    from tests.pytorch.networks import Encoder

    model = Encoder(vocabulary=50, width=32, layers=12, context=16).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(50, (8, 16)).to(where)
    loss: list[Any] = []

    def forward() -> None:
        with torch.autocast(where, torch.bfloat16):
            out = model(tokens)
        loss.append(F.cross_entropy(out.float().flatten(0, 1), tokens.flatten()))

    def backward() -> None:
        loss.pop().backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    passes = (("forward", forward), ("backward", backward), ("optimizer", step))
    return passes, len(list(model.parameters()))


def _adamw(where: str) -> Program:
    import torch

    weights = [torch.nn.Parameter(torch.randn(64).to(where)) for _ in range(_WEIGHTS)]
    for weight in weights:
        weight.grad = torch.randn(64).to(where)
    optimizer = torch.optim.AdamW(weights, fused=True)
    return (("optimizer", optimizer.step),), _WEIGHTS


if __name__ == "__main__":
    main()
