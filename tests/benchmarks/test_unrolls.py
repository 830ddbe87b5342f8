"""Tests of the programs of `scripts/bench unrolls`, with few steps."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

FEW = {"normalized": 50, "lstm": 40, "maml": 8, "burgers": 120, "ode": 20}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import unrolls

    return unrolls


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW])
def test_unrolled_program_has_same_gradients_by_each_method(
    benchmark: ModuleType, name: str
) -> None:
    rows = list(benchmark.measure(benchmark.PROGRAMS[name](FEW[name]), rounds=1))
    found = {row["method"]: row for row in rows if "time" in row}
    assert {"plain", "rekindle"} <= found.keys()
    for row in rows:
        if row["method"] in ("plain", "rekindle") and "time" in row:
            assert row["difference"] == 0.0, row
        assert row.get("difference", 0.0) < 1e-4, row


@pytest.mark.parametrize("slots", [0, 1, 2, 5])
def test_binomial_checkpointing_runs_fewest_steps(benchmark: ModuleType, slots: int) -> None:
    from _unrolls import advance_by

    def written(length: int, slots: int) -> int:
        if length == 1:
            return 0
        ahead = advance_by(length, slots)
        return ahead + written(length - ahead, max(0, slots - 1)) + written(ahead, slots)

    def fewest(length: int, slots: int) -> int:
        if length == 1:
            return 0
        if not slots:
            return length * (length - 1) // 2
        return min(
            ahead + fewest(length - ahead, slots - 1) + fewest(ahead, slots)
            for ahead in range(1, length)
        )

    assert [written(n, slots) for n in range(1, 11)] == [fewest(n, slots) for n in range(1, 11)]


def test_unrolls_picture_has_curve_for_each_method(benchmark: ModuleType, tmp_path: Path) -> None:
    row = {"program": "lstm", "steps": 2000, "time": {"median": 1.5}, "memory": 0.1}
    rows = [row | {"method": method} for method in ("plain", "rekindle", "checkpoint", "revolve")]
    benchmark.plot(rows, tmp_path / "unrolls.png")
    assert (tmp_path / "unrolls.png").stat().st_size > 1000
