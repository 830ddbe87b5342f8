"""Runs the stages, each in a process of its own with a limit; findings as JSON and as a page.

An error of CUDA stays with a process for good, so none shares one. What a stage has found is
written down line by line: where its time is up, what it found stands.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.on_device.page import failed, page
from tests.on_device.stages import STAGES

ROOT = Path(__file__).parents[2]
ALLOCATORS = ("", "expandable_segments:True", "backend:cudaMallocAsync")


def found_by(name: str, arguments: argparse.Namespace, seconds: float, setting: str = "") -> Any:
    """What one stage found, and how it ended."""
    command = [sys.executable, "-m", "tests.on_device.stages", name, arguments.device]
    command += ["--tiny"] if arguments.tiny else []
    # cuBLAS adds up in one order only with a workspace of this kind (stages that compare bits).
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
    core = os.environ.get("REKINDLE_TEST_CORE", "auto")
    return {"stage": name, "core": core, "setting": setting, "ended": ended, "seconds": took,
            "lines": lines, "stderr": said}  # fmt: skip


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
    parser.add_argument("--seconds", type=float, default=570, help="for all stages together")
    parser.add_argument("--out", type=Path, default=Path("on_device"), help="a folder")
    parser.add_argument("--stage", action="append", choices=[*STAGES], help="only this one")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; for a rehearsal: --device cpu --tiny")
    arguments.out.mkdir(parents=True, exist_ok=True)
    findings: list[dict[str, Any]] = []
    share = arguments.seconds / sum(limit for _, limit in STAGES.values())
    left = 0.0  # by the stages before: who starts slowly, or beside others, gets it
    for name in arguments.stage or STAGES:
        settings = ALLOCATORS if name == "memory" and arguments.device == "cuda" else ("",)
        for setting in settings:
            limit = share * STAGES[name][1] / len(settings) + left
            findings.append(found_by(name, arguments, limit, setting))
            left = max(0.0, limit - findings[-1]["seconds"])
            text = json.dumps({"stages": findings, "failed": failed(findings)}, indent=1)
            (arguments.out / "on_device.json").write_text(text + "\n", encoding="utf-8")
            (arguments.out / "on_device.html").write_text(page(findings), encoding="utf-8")
            checks = [line for line in findings[-1]["lines"] if "check" in line]
            good = sum(line["ok"] for line in checks)
            ended = findings[-1]["ended"] or "done"
            say(f"{name} {setting}: {good} of {len(checks)} checks hold, {ended}")
    for each in failed(findings):
        say(f"FAILED {each}")
    return 1 if failed(findings) else 0


if __name__ == "__main__":
    sys.exit(main())
