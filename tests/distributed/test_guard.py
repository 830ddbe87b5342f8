"""Tests of `distributed.guard`: if one rank runs out of budget, all ranks end within seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rekindle

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "train.py"


def launched(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Return exit code and output of a job; kill all processes of a job that hangs."""
    everything = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    job = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=everything,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    return job.returncode, output


@pytest.mark.parametrize("kind", ["plain", "slow exit", "stuck"])
def test_guard_under_torchrun_records_error_of_failed_rank(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--log-dir={log}", str(SCRIPT), str(tmp_path), kind]
    code, output = launched(command, {})
    assert code == 1, output
    assert "rank 1 failed: OutOfBudget" in output
    (error_file,) = log.rglob("1/error.json")
    error = json.loads(error_file.read_text())["message"]
    assert error["message"].startswith("OutOfBudget: ")
    assert "train.py" in error["extraInfo"]["py_callstack"]


def test_guard_without_torchrun_ends_ranks_if_one_fails(tmp_path: Path) -> None:
    everything = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    meeting = f"file://{tmp_path}/meeting?world_size=2&rank="
    arguments = [sys.executable, str(SCRIPT), str(tmp_path), "stuck"]
    ranks = [
        subprocess.Popen(
            arguments,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=everything | {"RANK": rank, "MEETING": meeting + rank},
        )
        for rank in "01"
    ]
    try:
        said = {rank: process.communicate(timeout=200)[1] for rank, process in enumerate(ranks)}
    finally:
        for process in ranks:
            process.kill()
    ended = time.time()
    assert [process.returncode for process in ranks] == [1, 1]
    assert "rank 1 failed: OutOfBudget" in said[1]
    assert "rank 1 failed: OutOfBudget" in said[0]
    assert "Rank 0 waited for it, and ends" in said[0]
    failed = float((tmp_path / "left-1").read_text())
    assert ended - failed < 30  # 4 s on a busy machine; a collective would wait for five minutes


def test_guard_without_process_group_raises_same_error() -> None:
    with pytest.raises(ZeroDivisionError), rekindle.distributed.guard():
        raise ZeroDivisionError
