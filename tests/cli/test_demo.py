"""Tests of `rekindle demo` with a small model, and of `rekindle --help` and unknown commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from rekindle.cli import _demo_training as demo
from rekindle.cli import main
from rekindle.cli._demo_training import Settings, Step, Trained
from rekindle.cli.demo import command
from rekindle.pytorch.tensors._meter import Meter

TINY = ["--layers", "2", "--width", "16", "--context", "32", "--batch", "4", "--steps", "3"]


def call(*arguments: str) -> Result:
    runner = CliRunner(
        env={"OMP_WAIT_POLICY": "passive"}
    )  # `env` lets click restore the environment variables that the command sets
    return runner.invoke(main, arguments, prog_name="rekindle")


def figures(*arguments: str) -> dict[str, Any]:
    result = call("demo", *TINY, "--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


# Runs that succeed.


def test_demo_json_has_all_figures_of_both_runs() -> None:
    data = figures()
    free, tight = data["free"], data["tight"]
    assert data["identical"] == {"losses": True, "weights": True}
    assert data["settings"] == {
        "layers": 2, "width": 16, "context": 32, "batch": 4, "steps": 3, "seed": 0
    }  # fmt: skip
    assert free["losses"] == tight["losses"]
    assert len(free["losses"]) == 3
    assert (free["budget"], free["evictions"], free["recomputations"]) == (None, 0, 0)
    assert tight["budget"] == free["constants"] + int(0.4 * (free["peak"] - free["constants"]))
    assert tight["peak"] <= tight["budget"] < free["peak"]
    assert tight["evictions"] >= 1
    assert tight["recomputations"] >= 1
    assert min(free["step_ns"], tight["step_ns"], tight["recompute_ns"]) > 0


def test_demo_with_budget_in_bytes_uses_exactly_that_budget() -> None:
    data = figures("--budget", "1GiB")
    assert data["tight"]["budget"] == 1024**3
    assert data["tight"]["evictions"] == 0


@pytest.mark.slow
def test_demo_losses_depend_only_on_the_seed() -> None:
    one, other = figures("--budget", "1GiB"), figures("--budget", "1GiB", "--seed", "1")
    assert one["free"]["losses"] != other["free"]["losses"]
    assert one["free"]["losses"] == figures("--fraction", "0.7")["free"]["losses"]


def test_demo_table_is_aligned_and_shows_equal_results() -> None:
    result = call("demo", *TINY)
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("without a budget", "peak memory", "time per step", "recomputations per step"):
        assert words in result.stdout
    lines = [line for line in result.stdout.splitlines() if "identical" in line]
    assert [line.split()[:2] for line in lines] == [["final", "weights"], ["all", "losses"]]
    assert len({line.index("identical") for line in lines}) == 1
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


# Runs that fail.


@pytest.mark.parametrize("what", ["losses", "weights"])
def test_demo_with_different_results_exits_1_and_shows_them(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(one: Trained, other: Trained) -> demo.Identical:
        return demo.Identical(losses=True, weights=True)._replace(**{what: False})

    monkeypatch.setattr(demo, "compare", compare)
    result = call("demo", *TINY, "--budget", "1GiB")
    assert result.exit_code == 1
    assert "different" in result.stdout


def test_demo_with_too_small_budget_suggests_budget_option() -> None:
    result = call("demo", *TINY, "--budget", "1KB")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "rekindle demo --budget " in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "6 Gigs"], 'write --budget "6GiB"'),
        (["--budget", "0"], "--budget '0': got 0 bytes, wanted more than 0 bytes"),
        (["--budget", "-5MB"], 'write --budget "5MB"'),
        (["--budget", "1GiB", "--fraction", "0.5"], "write only one"),
        (["--fraction", "0"], "0.0 is not in the range"),
        (["--fraction", "1.5"], "1.5 is not in the range"),
        (["--layers", "0"], "0 is not in the range"),
        (["--layers", "many"], "'many' is not a valid integer"),
        (["--width", "30"], "--width 30: wanted a multiple of 4; write --width 32"),
        (["--width", "1"], "--width 1: wanted a multiple of 4; write --width 4"),
        (["--layer", "3"], "--layers"),
        (["extra"], "extra"),
    ],
)
def test_demo_with_bad_option_exits_2(arguments: list[str], message: str) -> None:
    result = call("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_demo_with_too_little_text_is_refused(tmp_path: Path) -> None:
    result = call("demo", *TINY, "--context", "9000000")
    assert result.exit_code == 1
    assert "wanted more than the 9000000 that the model sees at once" in result.stderr
    (tmp_path / "a.py").write_text("caf\u00e9", encoding="utf-8")
    assert bytes(demo.ALPHABET[i] for i in demo.read_text(2, tmp_path)) == b"caf"
    with pytest.raises(ValueError, match="got 3 characters of source from"):
        demo.read_text(3, tmp_path)


# The command group `rekindle`.


def test_help_lists_all_commands_without_importing_torch() -> None:
    program = (
        "import sys\nfrom rekindle.cli import main\n"
        "main(['{}', '--help'] if '{}' else ['--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    for name in ("", "demo"):
        code = program.replace("{}", name)
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.stderr == ""
        assert "demo" in result.stdout


def test_help_of_demo_explains_each_option() -> None:
    assert all(getattr(parameter, "help", None) for parameter in command.params)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("dmeo", "No such command 'dmeo'; did you mean 'rekindle demo'?"),
        ("xyzzy", "No such command 'xyzzy'; there is: build, capture, demo"),
        ("_options", "No such command '_options'"),
    ],
)
def test_unknown_command_error_names_similar_command(asked: str, message: str) -> None:
    result = call(asked)
    assert result.exit_code == 2
    assert message in result.stderr


def test_each_file_in_cli_folder_is_a_command_with_help_text() -> None:
    for name in main.list_commands(None):
        assert main.get_command(None, name).help


# The parts of the demo: text, memory meter, comparison of results.


def test_demo_batch_of_one_number_has_same_text_each_time() -> None:
    text = demo.read_text(100)
    assert text.dtype == torch.uint8
    assert int(text.max()) < len(demo.ALPHABET)
    settings = Settings(context=8, batch=3)
    pieces, following = demo.batch_of(text, settings, 5)
    assert pieces.shape == following.shape == (3, 8)
    assert torch.equal(pieces[:, 1:], following[:, :-1])
    assert torch.equal(demo.batch_of(text, settings, 5)[0], pieces)
    assert not torch.equal(demo.batch_of(text, settings, 6)[0], pieces)


def test_demo_memory_meter_counts_the_same_as_test_tracker() -> None:
    from tests.pytorch.tracker import Tracker

    with Tracker() as tracker, Meter() as meter:
        x = torch.ones(1000, requires_grad=True)
        (x[:500] * 2).exp().sum().backward()
        torch._foreach_mul_([x.detach()], 2)
    assert (meter.alive, meter.peak) == (tracker.alive, tracker.peak)
    assert meter.peak > 8_000


def test_demo_memory_meter_counts_storage_after_resize() -> None:
    with Meter() as meter:
        x = torch.ones(1000)
        x.untyped_storage().resize_(16_000)
        assert meter.alive == 4_000
        x.add_(1)
        assert (meter.alive, meter.peak) == (16_000, 16_000)
        x.untyped_storage().resize_(0)
        meter.count(x)
        assert (meter.alive, meter.peak) == (0, 16_000)
        y = torch.ones(1000)
        meter.disregard(y)
        y.add_(1)
        assert meter.alive == 0
        del x, y
        assert meter.alive == 0


def run_with(loss: float, weight: torch.Tensor) -> Trained:
    return Trained(None, (Step(0, loss, 1, 1),), {"w": weight}, peak=1, constants=0)


def test_demo_comparison_detects_difference_in_one_bit() -> None:
    one = run_with(1.0, torch.tensor([0.0]))
    assert demo.compare(one, run_with(1.0, torch.tensor([0.0]))) == demo.Identical(True, True)
    near = run_with(1.0 + 2**-52, torch.tensor([-0.0]))
    assert demo.compare(one, near) == demo.Identical(False, False)
    double = run_with(1.0, torch.tensor([0.0], dtype=torch.float64))
    assert demo.compare(one, double) == demo.Identical(True, False)
