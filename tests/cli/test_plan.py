"""Tests of `rekindle plan`: tables, JSON, plots, and errors with the line to write."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rekindle._planners import PLANNERS
from rekindle.cli import main
from rekindle.trace import chain
from rekindle.trace.formats.checkmate import write

KEYS = {"planner", "ratio", "budget_bytes", "status", "overhead", "lower_bound", "gap"}
KEYS |= {"peak_bytes", "seconds"}


@pytest.fixture
def graph(tmp_path) -> str:
    path = tmp_path / "chain.json"
    path.write_text("".join(write(chain(8, nbytes=100, cost=1000))))
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_plan_without_options_prints_table(graph: str) -> None:
    result = run(graph, "--ratio", "0.6")
    assert result.exit_code == 0, result.output
    assert "cuts" in result.output
    assert "optimal" in result.output


def test_plan_json_has_one_object_per_plan(graph: str) -> None:
    result = run(graph, "--ratio", "0.6", "--budget", "500B", "--planner", "dtr", "--json")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [thing["budget_bytes"] for thing in objects] == [500, 480]
    assert all(thing.keys() >= KEYS for thing in objects)
    assert [thing["planner"] for thing in objects] == ["dtr", "dtr"]


def test_plan_compare_runs_all_planners_and_writes_plot(graph: str, tmp_path) -> None:
    plot = tmp_path / "plot.png"
    budgets = ("--ratio", "0.7", "--ratio", "0.5", "--time-limit", "2")
    result = run(graph, "--compare", *budgets, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in PLANNERS)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_plan_whose_swaps_overlap_compute_has_no_overhead(graph: str) -> None:
    arguments = ("--ratio", "0.6", "--swap", "1GB", "--time-limit", "2")
    (line,) = run(graph, *arguments, "--json").stdout.splitlines()
    plan = json.loads(line)
    assert (plan["planner"], plan["overhead"], plan["waiting_ns"]) == ("cuts", 0, 0)
    assert plan["swapped_out_bytes"] > 0
    result = run(graph, *arguments, "--compare")
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("cuts", "dtr", "swapped", "waiting"))
    assert "rotor" not in result.output


def test_plan_with_too_small_budget_exits_1_and_names_smallest(graph: str) -> None:
    result = run(graph, "--budget", "100B")
    assert result.exit_code == 1
    assert "no schedule fits" in result.output
    assert "the smallest budget with a known plan is 300 bytes" in result.output


def test_plan_budget_of_half_a_kilobyte_is_500_bytes(graph: str) -> None:
    result = run(graph, "--budget", "0.5KB", "--planner", "dtr", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["budget_bytes"] == 500


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--planner", "best"], "no planner 'best'; wanted one of: cuts, checkmate"),
        (["--budget", "0.5"], "write --ratio 0.5"),
        (["--budget", ".5"], "write --ratio 0.5"),
        (["--budget", "50%"], "write --ratio 0.5"),
        (["--time-limit", "0"], "0"),
        (["--swap", "fast"], "--swap"),
        (
            ["--swap", "1GB", "--planner", "rotor"],
            "rotor cannot swap values to the host; write --planner cuts or --planner dtr",
        ),
    ],
)
def test_plan_with_wrong_options_is_refused(
    graph: str, arguments: list[str], complaint: str
) -> None:
    result = run(graph, *arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


def test_plan_of_unreadable_file_fails_with_name_of_file(tmp_path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"nodes": [{"id": 0, "name": "x", "cost": -1, "mem": 1, "deps": []}]}')
    result = run(str(path))
    assert result.exit_code == 1
    assert "node 0 (x) has the cost -1" in result.output
