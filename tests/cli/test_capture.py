"""Tests of `rekindle capture` (from program to trace) and `rekindle convert` (trace formats)."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rekindle.cli import main
from rekindle.trace import TraceBuilder, check_trace, keep_all_peak
from rekindle.trace.formats import load, save

SCRIPT = """
import sys
import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh())
def step():
    model(torch.randn(16, 32)).sum().backward()
if __name__ == "__main__":
    assert sys.argv[1:] in ([], ["--steps", "2"]), sys.argv
    step()
"""


@pytest.fixture
def script(folder: Path) -> Path:
    path = folder / "train_tiny.py"
    path.write_text(SCRIPT)
    return path


def _run(*words: object, fails: bool = False) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert (result.exit_code != 0) == fails, result.output
    return result


@pytest.mark.parametrize("program", ["train_tiny.py", "train_tiny.py:step", "train_tiny:step"])
def test_capture_of_program_writes_trace(script: Path, program: str) -> None:
    output = script.parent / "step.jsonl"
    printed = _run("capture", program, "-o", output).output
    trace = check_trace(load(output))
    names = [op.name for op in trace.ops]
    assert "aten::tanh" in names
    assert "aten::tanh_backward" in names
    assert f"{len(names)} operators" in printed
    assert keep_all_peak(trace) > 0


def test_capture_of_script_passes_arguments_to_script(script: Path) -> None:
    _run("capture", "-o", "step.jsonl", "train_tiny.py", "--", "--steps", "2")
    assert (script.parent / "step.jsonl").is_file()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["missing.py"], "there is no file missing.py"),
        (["train_tiny.py:stop"], "train_tiny.py has no function 'stop'"),
        (["no_such_module:step"], "No module named 'no_such_module'"),
        (["train_tiny"], "write SCRIPT.py or MODULE:FUNCTION"),
    ],
)
def test_capture_of_unrunnable_target_is_refused(
    script: Path, words: list[str], complaint: str
) -> None:
    assert complaint in _run("capture", *words, "-o", "step.jsonl", fails=True).output
    assert not (script.parent / "step.jsonl").exists()


def test_capture_to_missing_folder_does_not_run_program(script: Path) -> None:
    script.write_text("raise AssertionError")
    result = _run("capture", "train_tiny.py", "-o", "no/step.jsonl", fails=True)
    assert "there is no folder no" in result.output


def test_convert_to_other_format_writes_equal_trace(script: Path) -> None:
    folder = script.parent
    _run("capture", "train_tiny.py", "-o", folder / "step.jsonl")
    _run("convert", folder / "step.jsonl", folder / "step.jsonl.gz")
    wanted, same = load(folder / "step.jsonl"), load(folder / "step.jsonl.gz")
    assert (same.ops, same.events) == (wanted.ops, wanted.events)


def test_convert_to_dtr_log_and_back_gives_equal_trace(tmp_path: Path) -> None:
    builder = TraceBuilder()
    x = builder.source(100)
    (y,) = builder.call("aten::exp", 2_000, [x], [100])
    builder.release(x)
    builder.pin(y)
    save(builder.build(), tmp_path / "exp.jsonl")
    _run("convert", tmp_path / "exp.jsonl", tmp_path / "exp.log")
    assert "INSTRUCTION" in (tmp_path / "exp.log").read_text().splitlines()[0]
    _run("convert", tmp_path / "exp.log", tmp_path / "again.jsonl")
    wanted, again = load(tmp_path / "exp.jsonl"), load(tmp_path / "again.jsonl")
    assert keep_all_peak(again) == keep_all_peak(wanted) == 200
    assert [op.name for op in again.ops if op.inputs] == ["aten::exp"]


def test_convert_of_file_without_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("hello\n")
    result = _run("convert", tmp_path / "a.jsonl", tmp_path / "b.jsonl", fails=True)
    assert "expected a trace in the format" in result.output
    assert not (tmp_path / "b.jsonl").exists()
