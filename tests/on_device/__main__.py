"""Run the stages (groups of device tests) and write their findings as JSON and as an HTML page.

Each stage has a process of its own with a time limit, because a CUDA error cannot be undone within
its process. Findings are written line by line, so findings of a stage that runs out of time are
kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch

from rekindle.pytorch.native import core as rekindle_core
from rekindle.pytorch.native import why_not
from tests.on_device.page import failed, page
from tests.on_device.stages import STAGES

ROOT = Path(__file__).parents[2]


def found_by(name: str, arguments: argparse.Namespace, seconds: float, setting: str = "") -> Any:
    """Run one stage. Return its findings and how it ended."""
    command = [sys.executable, "-m", "tests.on_device.stages", name, arguments.device]
    command += ["--tiny"] if arguments.tiny else []
    command += ["--quick"] if arguments.quick else []
    # With this workspace, cuBLAS sums in a fixed order, so that runs can be compared bit by bit.
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if setting:
        environment["PYTORCH_ALLOC_CONF"] = setting
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            result = subprocess.run(
                command, stdout=out, stderr=err, timeout=seconds, cwd=ROOT, env=environment
            )
            ended = "" if result.returncode == 0 else f"exit code {result.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"not over after {seconds:.0f} s"
        out.seek(0)
        err.seek(0)
        lines = [_parsed(line) for line in out.read().splitlines() if line.startswith("{")]
        said = err.read()[-4000:] if ended else ""
    took = round(time.perf_counter() - began, 1)
    return {"stage": name, "setting": setting, "ended": ended, "seconds": took,
            "lines": lines, "stderr": said}  # fmt: skip


def _has_something(name: str, arguments: argparse.Namespace) -> bool:
    return STAGES[name].on_cpu or arguments.device == "cuda"


def _jobs(name: str, arguments: argparse.Namespace) -> list[tuple[Any, ...]]:
    """Return the arguments of `found_by` for a stage, once for each allocator setting."""
    stage = STAGES[name]
    settings = stage.settings if arguments.device == "cuda" else ("",)
    limit = stage.seconds * arguments.slower
    return [(name, arguments, limit, setting) for setting in settings]


@final
class _Findings:
    """The findings of all stages so far, written to the files after each stage."""

    def __init__(self, folder: Path) -> None:
        self.all: list[dict[str, Any]] = []
        self._folder = folder

    def add(self, found: dict[str, Any]) -> None:
        self.all.append(found)
        text = json.dumps({"stages": self.all, "failed": failed(self.all)}, indent=1)
        (self._folder / "on_device.json").write_text(text + "\n", encoding="utf-8")
        (self._folder / "on_device.html").write_text(page(self.all), encoding="utf-8")
        checks = [line for line in found["lines"] if "check" in line]
        good = sum(line["ok"] for line in checks)
        say(
            f"{found['stage']} {found['setting']}: {good} of {len(checks)} checks hold, "
            f"{found['ended'] or 'done'}, {found['seconds']} s"
        )


def _parsed(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:
        return {"cut off": line}


def say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser("scripts/on_device", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small programs: a rehearsal")
    parser.add_argument("--quick", action="store_true", help="time only what memory decides about")
    parser.add_argument("--slower", type=float, default=1.0, help="times the limits of stages")
    parser.add_argument("--jobs", type=int, default=1, help="stages at once, of those not timed")
    parser.add_argument("--out", type=Path, default=Path("on_device"), help="a folder")
    parser.add_argument("--stage", action="append", choices=[*STAGES], help="only this one")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; for a rehearsal: --device cpu --tiny")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if rekindle_core() is None:  # compile the native core before any stage is timed
        parser.error(f"there is no native core: {why_not()}")
    findings = _Findings(arguments.out)
    names = [name for name in arguments.stage or STAGES if _has_something(name, arguments)]
    together = [each for name in names if not STAGES[name].timed for each in _jobs(name, arguments)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for found in pool.map(lambda job: found_by(*job), together):
            findings.add(found)
    for name in names:
        for job in _jobs(name, arguments) if STAGES[name].timed else ():
            findings.add(found_by(*job))
    for each in failed(findings.all):
        say(f"FAILED {each}")
    return 1 if failed(findings.all) else 0


if __name__ == "__main__":
    sys.exit(main())
