"""Tests of the device script on the CPU: all of its stages run, and each can report a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import sampled
from tests.on_device.page import failed, page
from tests.on_device.stages import STAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rehearsal_of_device_script_passes_stages(tmp_path: Path) -> None:
    """CI runs five of the stages, and `scripts/sweep tests` runs all."""
    here = [name for name, stage in STAGES.items() if stage.on_cpu]
    here = sorted(sampled(here, 5), key=here.index)
    command = ["scripts/on_device", "--device", "cpu", "--tiny", "--slower", "20", "--jobs", "2"]
    command += ["--out", str(tmp_path), *(f"--stage={name}" for name in here)]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "on_device.json").read_text())
    assert [each["stage"] for each in found["stages"]] == here
    assert found["failed"] == []
    for each in found["stages"]:
        if each["stage"] not in ("facts", "calls", "hosts"):
            assert any(line.get("ok") for line in each["lines"]), each["stage"]
    html = (tmp_path / "on_device.html").read_text()
    assert all(f"<h2>{name}" in html for name in here)


def test_error_without_device_suggests_cpu_option() -> None:
    command = [sys.executable, "-m", "tests.on_device"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 0:
        pytest.skip("there is a device")
    assert "--device cpu --tiny" in result.stderr


def test_device_page_lists_failed_checks_and_unfinished_runs() -> None:
    findings = [
        {"stage": "bits", "setting": "", "ended": "", "seconds": 1, "stderr": "", "lines": [
            {"check": "bits: one", "ok": True}, {"check": "bits: <other>", "ok": False}]},
        {"stage": "speed", "setting": "", "ended": "not over after 3 s", "seconds": 3,
         "stderr": "", "lines": [{"ms": 3}]},
    ]  # fmt: skip
    assert failed(findings) == ["speed: not over after 3 s", "bits: <other>"]
    html = page(findings)
    assert '<tr class="no"><td>bits: &lt;other&gt;</td>' in html
    assert "1 of 2 checks hold" in html
    assert '<li class="no">speed: not over after 3 s</li>' in html


def test_time_limits_of_device_stages_sum_to_ten_minutes() -> None:
    """Untimed stages run in parallel, with a process for each setting of the allocator."""
    beside = max(stage.seconds for stage in STAGES.values() if not stage.timed)
    timed = sum(stage.seconds * len(stage.settings) for stage in STAGES.values() if stage.timed)
    assert beside + timed <= 600
