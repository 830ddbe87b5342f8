"""Tests of the output and files of `rekindle simulate`."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rekindle.cli import main
from rekindle.trace import chain
from rekindle.trace.formats import save


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    save(chain(16, nbytes=1000, cost=5), folder / "short.jsonl")
    save(chain(24, nbytes=1000, cost=5), folder / "long.jsonl.gz")
    return folder


def _run(*words: object, fails: bool = False) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert (result.exit_code != 0) == fails, result.output
    return result


def test_simulate_runs_on_system_without_sched_getaffinity(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # this function does not exist on macOS and Windows
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    _run("simulate", logs / "short.jsonl", "--policy", "dtr-eq", "--budget", "9kB")


def test_simulate_json_has_one_object_per_run(logs: Path) -> None:
    result = _run(
        "simulate", logs / "short.jsonl", "--policy", "dtr-eq", "--budget", "9kB", "--json"
    )
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found["log"] == "short"
    assert found["policy"] == "dtr-eq"
    assert found["ratio"] is None
    assert found["budget_bytes"] == 9000
    assert found["status"] == "pass"
    assert found["overhead"] > 1
    assert found["peak_bytes"] <= 9000
    assert found["evictions"] > 0
    assert found["rematerializations"] > 0
    assert found["seconds"] > 0


def test_simulate_with_allocator_option_reports_reserved_bytes(logs: Path) -> None:
    words = ("simulate", logs / "short.jsonl", "--budget", "9kB", "--allocator", "expandable")
    found = json.loads(_run(*words, "--json").stdout)
    assert found["reserved_bytes"] == 2 * 2**20
    assert 9000 < found["allocated_bytes"] <= 9 * 1024
    assert "2.0 MiB" in _run(*words).stdout
    small = json.loads(_run(*words, "--device-memory", "1MiB", "--json").stdout)
    assert (small["status"], small["reserved_bytes"]) == ("oom", 0)
    alone = _run(*words[:4], "--device-memory", "1MiB", fails=True)
    assert "--device-memory needs --allocator" in alone.output


def test_simulate_of_folder_writes_ordered_table(logs: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    words = ("--policy", "dtr", "--policy", "lru", "--ratio", 0.5, "--ratio", 0.1, "--jobs", 2)
    result = _run("simulate", logs, "--sweep", *words, "--json", "--csv", table)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    names = [(row["log"], row["policy"], row["ratio"]) for row in found]
    assert names == sorted(names, key=lambda name: (name[0], name[1], -name[2]))
    assert len(found) == 8
    assert {row["status"] for row in found} == {"pass", "oom"}
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["overhead"] for row in rows] == [str(row["overhead"]) for row in found]


def test_simulate_prints_table_with_one_line_for_each_run(logs: Path) -> None:
    result = _run("simulate", logs, "--policy", "h-sm-local", "--policy", "random:3")
    assert len(result.stdout.splitlines()) == 1 + 4
    assert "h-sm-local" in result.stdout


def test_simulate_with_plot_option_writes_plots(logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _run("simulate", logs, "--ratio", 0.6, "--ratio", 0.3, "--plots", tmp_path / "plots")
    assert (tmp_path / "plots" / "overhead.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--policy", "best"), "no policy 'best'; wanted one of: dtr, dtr-eq"),
        (("--budget", "1GiB", "--ratio", "0.5"), "write only one"),
        (("--budget", "plenty"), "--budget"),
    ],
)
def test_simulate_with_wrong_options_is_refused(
    logs: Path, words: tuple[str, ...], complaint: str
) -> None:
    assert complaint in _run("simulate", logs, *words, fails=True).output


def test_simulate_of_malformed_trace_names_its_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"rekindle": "trace", "version": 2}\n')
    result = _run("simulate", bad, fails=True)
    assert f"Error: {bad}:1: version: expected 1, got 2" in result.output
    (tmp_path / "empty").mkdir()
    assert "no traces (.jsonl files)" in _run("simulate", tmp_path / "empty", fails=True).output


def test_simulate_with_fast_swap_recomputes_less(logs: Path) -> None:
    words = ("simulate", logs / "short.jsonl", "--budget", "5kB", "--limit", 100, "--json")
    alone = json.loads(_run(*words).stdout)
    fast = json.loads(_run(*words, "--swap", "100TB").stdout)
    assert alone["waiting_ns"] == 0
    assert fast["rematerializations"] < alone["rematerializations"]
    assert fast["overhead"] < alone["overhead"]


def test_simulate_runs_each_budget_that_is_given(logs: Path) -> None:
    words = ("--budget", "9kB", "--budget", "12kB", "--policy", "dtr-eq", "--json")
    lines = _run("simulate", logs / "short.jsonl", *words).stdout.splitlines()
    assert [json.loads(line)["budget_bytes"] for line in lines] == [9000, 12000]


def test_simulate_with_repair_and_no_allocator_is_refused(logs: Path) -> None:
    result = _run("simulate", logs / "short.jsonl", "--repair", "score", fails=True)
    assert "--allocator native --repair score" in result.stderr
