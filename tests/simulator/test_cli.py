"""Tests of the output and files of `rekindle simulate` and `rekindle paper`."""

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


def test_simulate_needs_no_affinity_of_the_system(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS and Windows
    _run("simulate", logs / "short.jsonl", "--policy", "dtr-eq", "--budget", "9kB")


def test_json_has_one_object_per_run(logs: Path) -> None:
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


def test_allocator_option_reports_reserved_bytes(logs: Path) -> None:
    words = ("simulate", logs / "short.jsonl", "--budget", "9kB", "--allocator", "expandable")
    found = json.loads(_run(*words, "--json").stdout)
    assert found["reserved_bytes"] == 2 * 2**20
    assert 9000 < found["allocated_bytes"] <= 9 * 1024
    assert "2.0 MiB" in _run(*words).stdout
    small = json.loads(_run(*words, "--device-memory", "1MiB", "--json").stdout)
    assert (small["status"], small["reserved_bytes"]) == ("oom", 0)
    alone = _run(*words[:4], "--device-memory", "1MiB", fails=True)
    assert "--device-memory wants --allocator" in alone.output


def test_sweep_over_folder_is_ordered_and_writes_table(logs: Path, tmp_path: Path) -> None:
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


def test_the_table_for_people_has_a_line_a_run(logs: Path) -> None:
    result = _run("simulate", logs, "--policy", "h-sm-local", "--policy", "random:3")
    assert len(result.stdout.splitlines()) == 1 + 4
    assert "h-sm-local" in result.stdout


def test_plots_are_written(logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _run("simulate", logs, "--ratio", 0.6, "--ratio", 0.3, "--plots", tmp_path / "plots")
    assert (tmp_path / "plots" / "overhead.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_the_paper_is_regenerated(logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _run("paper", logs, tmp_path / "paper", "--jobs", 2)
    found = {path.name for path in (tmp_path / "paper").iterdir()}
    assert {"overhead.csv", "overhead.svg", "ablation.svg", "deallocation.svg"} <= found
    assert {"scores.svg", "linear.svg", "switch.svg", "adversary.svg"} <= found


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--policy", "best"), "no policy 'best'; there is: dtr, dtr-eq"),
        (("--budget", "1GiB", "--ratio", "0.5"), "write only one"),
        (("--budget", "plenty"), "--budget"),
    ],
)
def test_mistakes_are_refused(logs: Path, words: tuple[str, ...], complaint: str) -> None:
    assert complaint in _run("simulate", logs, *words, fails=True).output


def test_a_malformed_log_is_an_error_with_its_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.log"
    bad.write_text('{"INSTRUCTION":"CONSTANT","NAME":"x"}\n')
    result = _run("simulate", bad, fails=True)
    assert f"Error: {bad}:2: INSTRUCTION: expected MEMORY of x, got the end" in result.output
    (tmp_path / "empty").mkdir()
    assert "no .log or .jsonl files" in _run("simulate", tmp_path / "empty", fails=True).output


def test_a_host_can_be_faster_than_computing_again(logs: Path) -> None:
    words = ("simulate", logs / "short.jsonl", "--budget", "5kB", "--limit", 100, "--json")
    alone = json.loads(_run(*words).stdout)
    fast = json.loads(_run(*words, "--swap", "100TB").stdout)
    assert alone["waiting_ns"] == 0
    assert fast["rematerializations"] < alone["rematerializations"]
    assert fast["overhead"] < alone["overhead"]


def test_swap_with_dead_option_is_refused(logs: Path) -> None:
    result = _run("simulate", logs, "--swap", "1GB", "--dead", "banish", fails=True)
    assert "leave one out" in result.output
