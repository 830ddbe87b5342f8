"""Tests of `rekindle capture`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rekindle.cli import main
from rekindle.trace import check_trace, keep_all_peak
from rekindle.trace.formats import load

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
