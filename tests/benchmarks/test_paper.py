"""Tests of benchmarks/paper.py."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changed import ROOT


def _chain(length: int) -> str:
    """Return the log of a chain of operators and of its backward pass."""
    lines: list[dict[str, object]] = []

    def call(name: str, result: str, args: list[str]) -> None:
        lines.append(
            {"INSTRUCTION": "CALL", "NAME": name, "RESULT": [result], "ARGS": args, "TIME": "5"}
        )
        lines.append({"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": "1000"})
        lines.append({"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": "-1"})

    for i in range(length):
        call("f", f"x{i}", [f"x{i - 1}"] * bool(i))
    call("g", f"g{length}", [])
    for i in reversed(range(length)):
        call("g", f"g{i}", [f"x{i}", f"g{i + 1}"])
        names = (f"x{i}", f"g{i + 1}")
        lines.extend({"INSTRUCTION": "RELEASE", "NAME": name} for name in names)
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.slow
def test_paper_benchmark_writes_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "short.log.gz").write_bytes(gzip.compress(_chain(16).encode()))
    words = [sys.executable, ROOT / "benchmarks/paper.py", tmp_path, tmp_path / "to", "--jobs", "2"]
    subprocess.run(words, check=True, timeout=200)
    found = {path.name for path in (tmp_path / "to").iterdir()}
    assert {"overhead.csv", "overhead.svg", "ablation.svg", "deallocation.svg"} <= found
    assert {"scores.svg", "linear.svg", "switch.svg", "adversary.svg"} <= found
