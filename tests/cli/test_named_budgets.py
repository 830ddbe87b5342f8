"""Tests that each budget which `rekindle run --profile` suggests suffices for a second run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from rekindle._units import parse_bytes
from tests.cli.test_public_scripts import ALL, COMPILED, LANGUAGE, PLAIN, SCRIPTS, Script
from tests.cli.test_run import python, run
from tests.helpers import WHOLE, sampled

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
    """Return the budgets that a profile suggests, by phase, and the peak memory of that run."""
    options = ("--budget=none", "--profile", "--report", "json", "free.json")
    reported = run(*options, *words, cwd=folder)
    assert reported.returncode == 0, reported.stderr
    named = dict(NAMED.findall(reported.stderr))
    assert reported.stderr.rstrip().endswith(f"smallest budget: --budget {named['the whole run']}")
    return named, json.loads((folder / "free.json").read_text())["peak"]


def within(budget: str, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run("--budget", budget, "-q", *words, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [*(ALL if WHOLE else (PLAIN, LANGUAGE)), *sampled(SAMPLING, 2)],
    ids=lambda script: " ".join((script.name, *script.words))[:40],
)
def test_budget_that_profile_suggests_suffices_for_whole_run(
    script: Script, tmp_path: Path
) -> None:
    pytest.importorskip(script.needs)
    words = (SCRIPTS / f"{script.name}.py", *script.words)
    named, peak = profiled(tmp_path, *words)
    unit = 1 << 10 if peak < 16 << 20 else 1 << 20  # suggestions are rounded up to whole units
    assert parse_bytes(named["the whole run"]) - peak < unit
    tight = within(named["the whole run"], tmp_path, *words)
    assert tight.returncode == 0, tight.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "most"),
    [
        (COMPILED, "12MiB"),  # without a limit 21 MiB, and 10 MiB suffice
        (Script("two_models", ("--teacher",), 1.0, ""), "26MiB"),  # 69 MiB, 18 MiB
        (Script("two_models", ("--adversary",), 1.0, ""), "30MiB"),  # 120 MiB, 20 MiB
    ],
    ids=lambda value: " ".join((value.name, *value.words)) if isinstance(value, Script) else value,
)
def test_profiled_script_prints_same_and_names_small_budget(
    script: Script, most: str, tmp_path: Path
) -> None:
    words = (SCRIPTS / f"{script.name}.py", *script.words)
    expected = python(*words, cwd=tmp_path)
    assert expected.returncode == 0, expected.stderr
    profile = run("--profile", "-q", *words, cwd=tmp_path)
    assert profile.stdout == expected.stdout
    named = dict(NAMED.findall(profile.stderr))["the whole run"]
    assert parse_bytes(named) <= parse_bytes(most)
    tight = within(named, tmp_path, *words)
    assert (tight.stdout, tight.stderr) == (expected.stdout, "")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--by-hand",)], ids=["optimizer", "by hand"])
def test_budget_that_profile_suggests_suffices_for_training(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """The script's evaluation needs seven times the memory of its training.

    The budget that the profile suggests for training alone must not include the evaluation.
    """
    script = SCRIPTS / "sampling.py"
    named, _ = profiled(tmp_path, script, *words)
    assert 4 * parse_bytes(named["training"]) < parse_bytes(named["evaluation"])
    assert within(named["training"], tmp_path, script, "--phases=training", *words).returncode == 0
    refused = within(named["training"], tmp_path, script, *words)
    assert "OutOfBudget" in refused.stderr


def test_profile_of_script_without_model_measures_operators(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "weight = torch.ones(1000, requires_grad=True)\n"
        "weight.exp().sin().tanh().sum().backward()\n"
    )
    named, _ = profiled(tmp_path, "train.py")
    assert within(named["the whole run"], tmp_path, "train.py").returncode == 0


def test_profile_of_script_without_operators_prints_explanation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('nothing')")
    reported = run("--profile", "-q", "train.py", cwd=tmp_path)
    assert reported.returncode == 0
    assert "nothing was measured, because no operator ran within the budget" in reported.stderr
