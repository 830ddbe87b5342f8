"""Keep the fast tests fast: list the tests measured to be slow, and limit the others.

Times are processor times of the test's process and of the children that it waited for. Wall-clock
times would depend on other work of the machine. `tests/slow.txt` lists the slow tests;
`scripts/test --measure` writes it. `tests/conftest.py` calls this module.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("slow.txt")
#: A test is slow if it takes this many processor seconds or more.
SLOW = 0.6
#: Processor seconds above which a test fails that is not marked as slow. It is far above `SLOW`,
#: because other machines are slower, and the first test of a process pays for imports.
LIMIT = 12.0

_HEADER = (
    f"# Tests that take {SLOW} s of processor time or more: scripts/test leaves them out.\n"
    "# Files, functions and single tests, written by scripts/test --measure.\n"
)


def processor_seconds() -> float:
    """Return the processor seconds of this process and of the children that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def read_slow(path: Path = FILE) -> frozenset[str]:
    """Return the entries of the file: node ids of files, functions and single tests."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def write_slow(entries: Iterable[str], path: Path = FILE) -> None:
    path.write_text(_HEADER + "".join(f"{each}\n" for each in sorted(entries)), encoding="utf-8")


def is_slow(test: str, entries: Collection[str]) -> bool:
    """Return True if the test, its function or its file is listed."""
    return not {test, function_of(test), file_of(test)}.isdisjoint(entries)


def find_slow(
    seconds: Mapping[str, float], before: Collection[str], marked: Collection[str] = ()
) -> set[str]:
    """Return the entries for tests that took at least `SLOW` processor seconds.

    A listed test stays until it takes less than half of `SLOW`, so that two measurements of the
    same tests give the same file. A function or a file whose tests are all slow is one entry.

    Args:
        seconds: Processor seconds of each test, for whole files. Entries of other files stay.
        before: The entries so far.
        marked: Tests with `@pytest.mark.slow`, which are not listed one by one.
    """
    slow = {
        test
        for test, taken in seconds.items()
        if taken >= (SLOW / 2 if is_slow(test, before) else SLOW)
    }
    measured = _by_file_and_function(seconds)
    entries = {each for each in before if file_of(each) not in measured}
    for file, functions in measured.items():
        everything = [test for tests in functions.values() for test in tests]
        if all(test in slow or test in marked for test in everything):
            entries.add(file)
            continue
        for function, tests in functions.items():
            listed = [test for test in tests if test in slow and test not in marked]
            if listed and all(test in slow or test in marked for test in tests):
                entries.add(function)
            else:
                entries.update(listed)
    return entries


def report(seconds: Mapping[str, float], most: int = 10) -> list[str]:
    """Return lines for a person: processor seconds in all, by folder, and of the slowest tests."""
    folders: dict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        folders["/".join(file_of(test).split("/")[1:-1][:2]) or "."] += taken
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:most]
    by_folder = sorted(folders, key=folders.__getitem__, reverse=True)
    return [
        f"{sum(seconds.values()):.0f} s of processor time in {len(seconds)} tests:",
        "  " + ", ".join(f"{folder} {folders[folder]:.0f}" for folder in by_folder),
        f"the slowest {len(slowest)} took:",
        *(f"  {seconds[test]:6.1f} s  {test}" for test in slowest),
    ]


def judge(report: pytest.TestReport, taken: float, limit: float) -> None:
    """Fail a passed test that took more processor seconds than `limit`.

    A limit of 0 means no limit.
    """
    if report.passed and 0 < limit < taken:
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} took {taken:.1f} s of processor time; a test that is not slow may "
            f"take {limit:g}. Make it shorter, or run: "
            f"scripts/test --measure {file_of(report.nodeid)}"
        )


def function_of(test: str) -> str:
    return test.partition("[")[0]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def _by_file_and_function(tests: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test in tests:
        found[file_of(test)][function_of(test)].append(test)
    return found
