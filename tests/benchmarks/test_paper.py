"""Tests of benchmarks/paper.py."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.test_dtr_logs import LOG
from tests.changed import ROOT


@pytest.mark.slow
def test_paper_benchmark_writes_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "short.log.gz").write_bytes(gzip.compress(LOG.encode()))
    words = [sys.executable, ROOT / "benchmarks/paper.py", tmp_path, tmp_path / "to", "--jobs", "2"]
    subprocess.run(words, check=True, timeout=200)
    found = {path.name for path in (tmp_path / "to").iterdir()}
    assert {"overhead.csv", "overhead.svg", "ablation.svg", "deallocation.svg"} <= found
    assert {"scores.svg", "linear.svg", "switch.svg", "adversary.svg"} <= found
