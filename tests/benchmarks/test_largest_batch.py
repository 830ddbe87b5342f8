"""Tests of the search for the largest batch (`scripts/bench largest_batch`), with tiny batches."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TINY = {"vocabulary": 17, "batch": 2, "time": 24, "width": 32, "layers": 3}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import largest_batch

    monkeypatch.setattr(largest_batch, "SECONDS", 0.0)
    monkeypatch.setattr(largest_batch, "MOST", 8)
    return largest_batch


def measured(
    benchmark: ModuleType, method: str, *, quick: bool = False
) -> tuple[dict[str, Any], set[int]]:
    """Return the rows by multiple of the reference batch ("2x"), and the batches that fit."""
    workload = replace(benchmark.WORKLOADS["gpt"], cpu=TINY)
    reported: list[dict[str, Any]] = []
    benchmark.measure(workload, method, "cpu", reported.append, quick)
    rows = {row["at"]: row for row in reported if "at" in row}
    assert list(rows) == (["2x", "largest"] if quick else ["1x", "2x", "3x", "largest"])
    return rows, {row["tried"] for row in reported if "tried" in row and row["failure"] is None}


@pytest.mark.slow
def test_largest_batch_of_plain_program_is_reference_batch(benchmark: ModuleType) -> None:
    rows, fitting = measured(benchmark, "plain")
    assert fitting == {1, 2}
    assert rows["1x"]["used"] == rows["1x"]["limit"]
    assert rows["largest"]["batch"] == 2
    assert rows["largest"]["next"]["batch"] == 3
    assert rows["2x"]["infeasible"].startswith("takes ")
    assert rows["2x"]["throughput"]["median"] > 0  # timed although plain PyTorch does not fit it


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rekindle online", "checkpoint"])
def test_each_benchmarked_method_fits_larger_batch_than_plain(
    benchmark: ModuleType, method: str
) -> None:
    rows, fitting = measured(benchmark, method, quick=True)
    largest = rows["largest"]
    assert largest["batch"] == max(fitting) > 2
    assert largest["next"]["batch"] == largest["batch"] + 2
    assert largest["next"]["infeasible"]
    for row in rows.values():
        if "infeasible" not in row:
            assert row["used"] <= row["limit"]
            assert row["throughput"]["min"] <= row["throughput"]["median"]
        else:
            assert row["batch"] not in fitting
            assert "throughput" not in row


def test_largest_batch_search_uses_setting_that_saves_least(benchmark: ModuleType) -> None:
    workload = replace(benchmark.WORKLOADS["gpt"], cpu=TINY)
    search = benchmark.Search(workload, "checkpoint", "cpu", lambda row: None)
    assert search.tried(2).point.setting == "1 in 3"
    saving = search.tried(4)
    assert saving.failure is None
    assert saving.figures is None  # figures are computed only when needed
    sparser = search.settings[: search.settings.index(saving.point)]
    assert sparser
    search.settings = sparser
    search._tried.clear()
    assert not search.fits(4)


def test_largest_batch_of_failed_process_shows_its_error(benchmark: ModuleType) -> None:
    program = "print('{\"at\": \"1x\"}'); print('chatter'); raise SystemExit('no room')"
    reported = list(benchmark.answers([sys.executable, "-c", program], 60.0))
    assert reported == [{"at": "1x"}, {"failed": "no room"}]
    (late,) = benchmark.answers([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert "more than" in late["failed"]


def test_benchmark_keeps_stored_rows_not_measured_again(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    row = {"model": "gpt", "method": "plain", "at": "1x", "batch": 2, "multiple": 1.0}
    row |= {"setting": "", "throughput": {"median": 1.0, "min": 1.0, "max": 1.0}}
    out, columns = tmp_path / "rows.json", benchmark.COLUMNS
    benchmark.write_table({"commit": "abc"}, [row], out, columns=columns, figure="throughput")
    again = benchmark.earlier_by(out, benchmark.KEY)
    assert again == {("gpt", "plain", "1x"): {"commit": "abc"} | row}
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == [row]
    assert (tmp_path / "rows.csv").read_text().splitlines()[1] == "gpt,plain,1x,2,1.0,,1.0,1.0,1.0"
    benchmark.plot([row], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000
