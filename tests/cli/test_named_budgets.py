"""`rekindle run --profile` names budgets, and a second run within each of them succeeds."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_public_scripts import ALL, SCRIPTS, Script
from tests.cli.test_run import run

SAMPLING = [
    Script("sampling", (), 1.0, ""),
    Script("sampling", ("--by-hand",), 1.0, ""),
    Script("sampling", ("--phases=training",), 1.0, ""),
    Script("sampling", ("--phases=training", "--by-hand"), 1.0, ""),
    Script("sampling", ("--phases=training", "--steps=1"), 1.0, ""),
    Script("sampling", ("--phases=evaluation", "--steps=1"), 1.0, ""),
]
NAMED = re.compile(r"^  (training|evaluation|the whole run) .* --budget (\S+)$", re.MULTILINE)


def profiled(folder: Path, *words: object) -> tuple[dict[str, str], int]:
    """Return the budgets that a profile names, by phase, and the peak of that run."""
    options = ("--budget=none", "--profile", "--report", "json", "free.json")
    told = run(*options, *words, cwd=folder)
    assert told.returncode == 0, told.stderr
    named = dict(NAMED.findall(told.stderr))
    assert told.stderr.rstrip().endswith(f"smallest budget: --budget {named['the whole run']}")
    return named, json.loads((folder / "free.json").read_text())["peak"]


def within(budget: str, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run("--budget", budget, "-q", *words, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("script", [*ALL, *SAMPLING], ids=lambda script: " ".join(script.words))
def test_budget_named_for_the_whole_run_holds(script: Script, tmp_path: Path) -> None:
    pytest.importorskip(script.needs)
    words = (SCRIPTS / f"{script.name}.py", *script.words)
    named, peak = profiled(tmp_path, *words)
    assert int(named["the whole run"]) <= peak
    tight = within(named["the whole run"], tmp_path, *words)
    assert tight.returncode == 0, tight.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--by-hand",)], ids=["optimizer", "by hand"])
def test_budget_named_for_training_holds_for_training(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """Evaluation needs seven times as much, and training alone does not pay for that."""
    script = SCRIPTS / "sampling.py"
    named, _ = profiled(tmp_path, script, *words)
    assert 4 * int(named["training"]) < int(named["evaluation"])
    assert within(named["training"], tmp_path, script, "--phases=training", *words).returncode == 0
    refused = within(named["training"], tmp_path, script, *words)
    assert "OutOfBudget" in refused.stderr


def test_profile_without_a_model_measures_its_operators(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "weight = torch.ones(1000, requires_grad=True)\n"
        "weight.exp().sin().tanh().sum().backward()\n"
    )
    named, _ = profiled(tmp_path, "train.py")
    assert within(named["the whole run"], tmp_path, "train.py").returncode == 0


def test_profile_without_operators_reports_no_measurement(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('nothing')")
    told = run("--profile", "-q", "train.py", cwd=tmp_path)
    assert told.returncode == 0
    assert "no operator ran within the budget: nothing was measured" in told.stderr
