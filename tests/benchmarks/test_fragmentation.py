"""Tests of simulated allocators on the programs of the benchmark, and against a GPU's figures.

The DTR paper's logs and the traces of training steps on a GPU are not part of this repository. The
tests use a folder of them next to the repository.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from _dtr_logs import load as load_log

from rekindle.policies import Thrifty
from rekindle.simulator import Device, replay
from rekindle.trace import Trace, TraceBuilder, keep_all_peak
from rekindle.trace.formats import load, save

MIB = 2**20
FOLDER = Path(__file__).parents[3] / "shared" / "reference"

needs_logs = pytest.mark.skipif(
    not (FOLDER / "logs").is_dir(), reason=f"the authors' logs are not in {FOLDER}"
)
needs_traces = pytest.mark.skipif(
    not (FOLDER / "gpu_traces").is_dir(), reason=f"the traces of a GPU's steps are not in {FOLDER}"
)


@pytest.fixture(scope="module")
def models() -> ModuleType:
    import _allocator_models

    return _allocator_models


def test_comparison_without_traces_names_missing_files(
    models: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [*models.comparisons(tmp_path)] == []
    assert f"left out: {tmp_path / 'GPT-2-8-fp32.jsonl.gz'} is missing" in capsys.readouterr().out


def test_comparison_adds_bytes_that_trace_lacks(models: ModuleType, tmp_path: Path) -> None:
    """The device had 9,808 MiB in use and 10,812 MiB reserved; the trace has only 30 MiB."""
    builder = TraceBuilder()
    builder.source(30 * MIB)
    save(builder.build(), tmp_path / "BERT-base-16-fp32.jsonl.gz")
    (row,) = models.comparisons(tmp_path)
    assert (row["method"], row["rows"], row["allocator"]) == ("plain", 16, "")
    assert (row["device"], row["simulated"]) == (10812, 9808)
    assert row["off"] == round(9808 / 10812 - 1, 4)


def time_over_sums(trace: Trace, budget: int, memory: int) -> float:
    """Return the time of a step on a device of pages over that with an allocator by sums."""
    sums = replay(trace, budget=budget, policy=Thrifty())
    pages = replay(trace, budget=budget, policy=Thrifty(), device=Device("pages", memory))
    return (1 + pages.overhead) / (1 + sums.overhead)


@needs_logs
@pytest.mark.parametrize("log", ["unet", "resnet32", "transformer", "treelstm"])
@pytest.mark.parametrize("ratio", [0.9, 0.7, 0.5, 0.4, 0.3])
def test_pages_take_time_of_sums_within_2_percent(log: str, ratio: float) -> None:
    from fragmentation import enlarged

    trace = enlarged(load_log(FOLDER / "logs" / f"{log}.log.gz"), 8 * 10**9)
    budget = int(ratio * keep_all_peak(trace))
    assert time_over_sums(trace, budget, int(1.05 * budget)) <= 1.02


@needs_traces
@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("BERT-base-32-fp32", 10772),
        ("BERT-large-16-fp32", 13352),
        ("GPT-2-24-fp32", 22442),
        ("BERT-base-32-bf16", 8234),
        ("BERT-large-16-bf16", 10658),
    ],
)
def test_pages_of_gpu_take_time_of_sums_within_2_percent(name: str, reserved: int) -> None:
    """The device has the MiB that the smaller batch had reserved, without cuBLAS's workspaces."""
    trace = load(FOLDER / "gpu_traces" / f"{name}.jsonl.gz")
    memory = (reserved - 75) * MIB
    assert time_over_sums(trace, memory, memory) <= 1.02
