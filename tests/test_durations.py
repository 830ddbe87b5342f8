"""Tests of the list of slow tests, and of the failure of a test that becomes too slow."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings

from tests import durations
from tests.strategies import examples

ROOT = Path(__file__).parents[1]
SLOW, QUICK = durations.SLOW, durations.SLOW / 2


def _report(outcome: Literal["passed", "failed", "skipped"]) -> pytest.TestReport:
    return pytest.TestReport("tests/test_a.py::test_b", ("", 0, ""), {}, outcome, None, "call")


def test_passing_test_above_time_limit_fails_with_advice() -> None:
    report = _report("passed")
    durations.judge(report, 12.5, 12)
    assert report.failed
    assert report.longrepr == (
        "tests/test_a.py::test_b took 12.5 s of processor time; a test that is not slow may take "
        "12. Make it shorter, or run: scripts/test --measure tests/test_a.py"
    )


@pytest.mark.parametrize(
    ("outcome", "taken", "limit"),
    [("passed", 11, 12), ("passed", 13, 0), ("failed", 13, 12), ("skipped", 13, 12)],
)
def test_passing_test_within_time_limit_still_passes(
    outcome: Literal["passed", "failed", "skipped"], taken: float, limit: float
) -> None:
    report = _report(outcome)
    durations.judge(report, taken, limit)
    assert (report.outcome, report.longrepr) == (outcome, None)


def test_slow_list_finds_slow_tests_functions_and_files() -> None:
    seconds = {
        "a.py::one[x]": SLOW, "a.py::one[y]": QUICK, "a.py::two[x]": SLOW, "a.py::two[y]": SLOW,
        "b.py::one": SLOW, "b.py::two": SLOW, "c.py::one": QUICK,
    }  # fmt: skip
    assert durations.find_slow(seconds, ()) == {"a.py::one[x]", "a.py::two", "b.py"}


def test_slow_list_leaves_out_tests_with_slow_mark() -> None:
    seconds = {"a.py::one": SLOW, "a.py::two": SLOW, "a.py::three": QUICK, "b.py::one": QUICK}
    found = durations.find_slow(seconds, (), marked={"a.py::one", "b.py::one"})
    assert found == {"a.py::two", "b.py"}


def test_slow_list_keeps_test_until_it_is_much_quicker() -> None:
    before = {"a.py::one", "a.py::two[x]", "b.py"}
    seconds = {"a.py::one": QUICK, "a.py::two[x]": QUICK * 0.9, "a.py::three": QUICK}
    assert durations.find_slow(seconds, before) == {"a.py::one", "b.py"}
    assert durations.find_slow(seconds, {"a.py::one", "b.py"}) == {"a.py::one", "b.py"}


def test_slow_list_drops_entries_of_removed_tests() -> None:
    before = {"a.py::gone", "b.py::one"}
    assert durations.find_slow({"a.py::one": QUICK}, before) == {"b.py::one"}


def test_slow_list_is_equal_after_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "slow.txt"
    entries = {"b.py", "a.py::one[x y # z]", "a.py::two"}
    durations.write_slow(entries, path)
    assert durations.read_slow(path) == entries
    assert path.read_text().splitlines()[-3:] == sorted(entries)


@pytest.mark.parametrize("test", ["a.py::one[x]", "a.py::two[z]", "b.py::one"])
def test_slow_list_entry_matches_test_function_or_file(test: str) -> None:
    assert durations.is_slow(test, {"a.py::one[x]", "a.py::two", "b.py"})
    assert not durations.is_slow("a.py::one[y]", {"a.py::one[x]", "a.py::two", "b.py"})


def missing(entries: frozenset[str], root: Path = ROOT) -> list[str]:
    """Return the entries of the slow list whose file or function does not exist."""
    gone = []
    for entry in sorted(entries):
        path = root / durations.file_of(entry)
        name = durations.function_of(entry).rpartition("::")[2]
        if not path.is_file() or ("::" in entry and f"def {name}(" not in path.read_text()):
            gone.append(entry)
    return gone


def test_committed_slow_list_names_only_existing_tests() -> None:
    assert missing(durations.read_slow()) == []


def test_slow_list_entry_of_missing_test_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def one():\n    pass\n")
    entries = frozenset({"a.py", "a.py::one[x]", "a.py::two", "b.py"})
    assert missing(entries, tmp_path) == ["a.py::two", "b.py"]


def test_number_of_hypothesis_examples_follows_active_profile() -> None:
    before = settings.get_current_profile_name()
    try:
        settings.load_profile("whole")
        assert examples(60).max_examples == 60
        settings.load_profile("ci")
        assert examples(60).max_examples == 30
        settings.load_profile("fast")
        assert examples(60).max_examples == 12
        assert examples(1).max_examples == 1
    finally:
        settings.load_profile(before)
