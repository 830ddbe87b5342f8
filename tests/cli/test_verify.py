"""Tests of `rekindle verify`: exit codes, JSON, and errors that say what to write instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rekindle.cli import main

SCRIPT = """
import torch

torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
batch = torch.randn(256, 32)


def step():
    model(batch).square().mean().backward()


def unsteady(calls=[0]):
    calls[0] += 1
    (model(batch) * calls[0]).sum().backward()


if __name__ == "__main__":
    raise SystemExit("not as a program")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr("sys.path", ["/", *__import__("sys").path])
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(main, ["verify", *arguments])


def test_verify_of_deterministic_step_exits_0(script: str) -> None:
    result = run(script, "--budget", "300KiB")
    assert result.exit_code == 0, result.output
    assert "the same as plain PyTorch, bit for bit" in result.output


@pytest.mark.slow
def test_verify_json_option_prints_all_results(script: str) -> None:
    """`verify` compares all tensors of its process, so it runs in a process of its own here."""
    program = "from rekindle.cli import main; main()"
    arguments = ["verify", f"{script}:step", "--budget", "300KiB", "--json"]
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    assert found["ok"] is True
    assert found["budget"] == 300 * 1024
    assert found["recomputations"] > 0
    assert found["compared"]["gradients"] == 12


def test_verify_accepts_step_of_importable_module(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(script).parent)
    monkeypatch.delitem(__import__("sys").modules, "train", raising=False)
    assert run("train:step", "--budget", "1MiB").exit_code == 0


def test_verify_of_nondeterministic_step_exits_1(script: str) -> None:
    result = run(f"{script}:unsteady", "--budget", "300KiB")
    assert result.exit_code == 1
    assert "plain PyTorch itself differs between two runs" in result.output
    assert "train.py:" in result.output


def test_verify_within_too_small_budget_suggests_larger_budget(script: str) -> None:
    result = run(script, "--budget", "100KiB")
    assert result.exit_code == 1
    assert re.search(r"On this command line: --budget \d+KiB\n", result.output)
    assert "rehearse" not in result.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py", "there is no file nowhere.py"),
        ("no_such_module:step", "No module named 'no_such_module'; write SCRIPT.py:FUNCTION"),
    ],
)
def test_verify_of_missing_file_exits_2(target: str, message: str) -> None:
    result = run(target, "--budget", "1MiB")
    assert result.exit_code == 2
    assert message in result.output


def test_verify_of_missing_function_exits_2_and_lists_functions(script: str) -> None:
    result = run(f"{script}:stepp", "--budget", "1MiB")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "has no function 'stepp'; its functions are: step, unsteady; write " in said
    assert said.endswith(":step")


def test_verify_gives_script_its_own_arguments(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    path = Path(script).with_name("reads.py")
    path.write_text(f"import sys\nassert sys.argv[1:] == ['--rows', '8'], sys.argv\n{SCRIPT}")
    result = run(str(path), "--budget", "1MiB", "--", "--rows", "8")
    assert result.exit_code == 0, result.output
