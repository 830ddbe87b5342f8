"""Tests of `rekindle profile` and `rekindle report`: text, JSON and HTML show equal figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rekindle.cli import main
from rekindle.pytorch.online import _explain
from rekindle.pytorch.online._budget_history import BudgetHistory

SCRIPT = """
import sys
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.Tanh()] * 6)
def step():
    model(torch.randn(256, 64)).sum().backward()
if __name__ == "__main__":
    assert sys.argv[1:] in ([], ["--steps", "2"]), sys.argv
    step()
"""


@pytest.fixture
def script(folder: Path) -> Path:
    path = folder / "tiny_training.py"
    path.write_text(SCRIPT)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_profile_of_step_function_writes_report(script: Path) -> None:
    result = run("profile", "tiny_training.py:step", "--repeats", 1, "--slowdown", 50)
    assert result.exit_code == 0, result.output
    assert "Sequential." in result.stdout
    assert "tiny_training.py:6" in result.stdout
    assert "predicted time of a step within a budget" in result.stdout
    assert "slowdown 50.00: rekindle.budget(" in result.stdout


def test_profile_with_swap_shows_bytes_on_host(script: Path, tmp_path: Path) -> None:
    folder = ("--swap-directory", tmp_path)
    result = run("profile", "tiny_training.py:step", "--repeats", 1, "--swap", "1GiB", *folder)
    assert result.exit_code == 0, result.output
    assert "measured time of a step within a budget" in result.stdout
    assert "on the host" in result.stdout
    assert 'evict="anything", swap=1073741824)' in result.stdout


@pytest.mark.parametrize("words", [(), ("--repeats", 0), ("--budget", "1GiB")])
def test_profile_with_swap_of_one_run_is_refused(script: Path, words: tuple[object, ...]) -> None:
    program = "tiny_training.py:step" if words else "tiny_training.py"
    result = run("profile", program, "--swap", "1GiB", *words)
    assert result.exit_code == 2
    assert "rekindle profile --swap 64GiB train.py:step" in result.stderr


def test_profile_of_script_passes_arguments_to_script(script: Path) -> None:
    result = run("profile", "tiny_training.py", "--json", "--", "--steps", 2)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["peak"] > 6 * 256 * 64 * 4
    assert len(report["choices"]) > 3


def test_profile_of_script_says_run_instead_of_step(script: Path) -> None:
    result = run("profile", "tiny_training.py")
    assert result.exit_code == 0, result.output
    assert "\nplain run  " in result.stdout
    assert "predicted time of a run within a budget" in result.stdout
    assert "plain step" not in result.stdout


def test_report_of_saved_profile_shows_same_figures(script: Path) -> None:
    words = ("-o", "step.json", "--html", "step.html")
    result = run("profile", "tiny_training.py:step", "--repeats", 1, *words)
    assert result.exit_code == 0, result.output
    again = run("report", "step.json")
    assert again.exit_code == 0
    assert result.stdout.startswith(again.stdout)
    assert run("report", "step.json", "--json").stdout == Path("step.json").read_text() + "\n"
    assert run("report", "step.json", "--html", "again.html").stdout == ""
    assert Path("again.html").read_text() == Path("step.html").read_text()


def test_profile_fits_option_exits_1_if_step_exceeds_budget(script: Path) -> None:
    words = ("profile", "tiny_training.py:step", "--repeats", 0, "--fits")
    assert run(*words, "1GiB").exit_code == 0
    result = run(*words, "10KiB")
    assert result.exit_code == 1
    assert "it does not fit into 10.0 KiB" in result.stdout


def test_profile_within_too_small_budget_exits_1(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_explain, "too_small", BudgetHistory())  # no budget was too small before
    result = run("profile", "tiny_training.py:step", "--budget", "10KiB")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "The smallest budget with which this operator can run" in result.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("profile", "tiny_training.py:stop"), "has no function 'stop'"),
        (("profile", "nowhere.py"), "there is no file nowhere.py"),
        (("profile", "tiny_training.py", "--budgte", "1GiB"), "--budget"),
        (("proflie", "tiny_training.py"), "did you mean 'rekindle profile'?"),
        (("profile", "tiny_training.py", "--budget", "6 Gigs"), '--budget "6GiB"'),
        (("report", "nowhere.json"), "nowhere.json"),
    ],
)
def test_profile_with_wrong_command_line_exits_2_with_hint(
    script: Path, words: tuple[str, ...], hint: str
) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.mark.parametrize("content", [b"a song", b"{}", b"\xff\xfe\x00"])
def test_report_command_refuses_file_that_is_not_a_report(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "song.json"
    path.write_bytes(content)
    result = run("report", path)
    assert result.exit_code == 1
    assert str(path) in result.stderr


def test_profile_of_script_that_ends_with_sys_exit_is_shown(folder: Path) -> None:
    (folder / "ends.py").write_text(
        "import sys, torch\ntorch.ones(9).exp()\nsys.exit(int(sys.argv[1]))"
    )
    result = run("profile", "ends.py", "0")
    assert result.exit_code == 0, result.output
    assert "peak" in result.stdout
    assert run("profile", "ends.py", "3").exit_code == 3


@pytest.mark.parametrize(
    "words",
    [
        ("profile", "tiny_training.py:step", "--html", "nowhere/p.html"),
        ("profile", "tiny_training.py:step", "-o", "nowhere/p.json"),
        ("simulate", ".", "--csv", "nowhere/p.csv"),
        ("simulate", ".", "--plots", "nowhere/plots"),
        ("plan", "trace.jsonl", "--plot", "nowhere/p.svg"),
    ],
)
def test_file_in_missing_folder_is_refused_before_the_work(
    script: Path, words: tuple[str, ...]
) -> None:
    (script.parent / "trace.jsonl").touch()
    result = run(*words)
    assert result.exit_code == 2
    assert "there is no folder nowhere" in result.stderr


@pytest.mark.parametrize(
    "words", [("simulate", ".", "--plots", "plots"), ("plan", "trace.jsonl", "--plot", "p.svg")]
)
def test_plot_without_matplotlib_is_refused_before_the_work(
    script: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (script.parent / "trace.jsonl").touch()
    monkeypatch.setattr("rekindle.cli._options.find_spec", lambda name: None)
    result = run(*words)
    assert result.exit_code == 1
    assert "needs matplotlib" in result.stderr


def test_profile_with_json_and_slowdown_is_refused(script: Path) -> None:
    result = run("profile", "tiny_training.py:step", "--json", "--slowdown", "2")
    assert result.exit_code == 2
    assert "leave one of them out" in " ".join(result.stderr.split())


def test_profile_with_swap_directory_alone_is_refused(script: Path) -> None:
    result = run("profile", "tiny_training.py:step", "--swap-directory", ".")
    assert result.exit_code == 1
    assert "got no swap=" in result.stderr
