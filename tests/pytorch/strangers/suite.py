"""Run a file of another project's tests in plain PyTorch and within budgets.

The files are not part of this project. PyTorch's are in the folder test/ of its repository, at the
tag of the installed version. Others come with the source distributions of their packages.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from tests.differ.workers import ROOT, Ended, run
from tests.pytorch.strangers.ways import Found, Way

EXPECTED = Path(__file__).parent / "expected"
SECONDS = 7200  # seconds for a file in one way, on a busy machine
TEST_SECONDS = 600  # seconds for one test
MOST_RESTARTS = 40


def swept(file: Path, ways: Sequence[Way], chosen: str, write: bool) -> list[str]:
    """Run one file in all ways; return a line for each unexpected outcome."""
    plain = _run(file, Way.PLAIN, chosen, {})
    passing = {test for test, found in plain.items() if found.outcome == "passed"}
    click.echo(f"{file.name}: {len(passing)} of {len(plain)} tests pass plainly")
    expected = expected_failures(file.stem)
    peaks: dict[str, int] = {}
    failing: dict[str, str] = {}
    wrong: list[str] = []
    for way in ways:
        found = _run(file, way, chosen, peaks)
        counts = Counter(each.outcome for test, each in found.items() if test in passing)
        click.echo(f"{file.name}, {way.value}: {dict(counts)}")
        if way is Way.WITHIN:
            peaks = {test: each.peak for test, each in found.items()}
        for test in sorted(passing):
            each = found.get(test, Found(test, "ended", why="the process ended before it"))
            if each.outcome in ("failed", "ended"):
                failing.setdefault(test, each.why)
                if test not in expected:
                    wrong.append(f"{file.stem}::{test}, {way.value}: {each.outcome}, {each.why}")
                    click.echo(wrong[-1])
    if len(ways) == 3 and not chosen:
        passes = sorted((expected.keys() & passing) - failing.keys())
        for test in passes:
            wrong.append(f"{file.stem}::{test} passes now: take it from the list")
            click.echo(wrong[-1])
    if write:
        lines = [f"{test}  # {expected.get(test, why)}" for test, why in sorted(failing.items())]
        EXPECTED.mkdir(exist_ok=True)
        (EXPECTED / f"{file.stem}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return wrong


def expected_failures(name: str) -> dict[str, str]:
    """Return the tests of a suite that are known to fail, each with its reason."""
    path = EXPECTED / f"{name}.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = (line.partition("#") for line in lines if line.strip())
    return {test.strip(): reason.strip() for test, _, reason in rows}


def _run(file: Path, way: Way, chosen: str, peaks: dict[str, int]) -> dict[str, Found]:
    """Run a file in one way; if a test ends the process, continue with the next test."""
    found: dict[str, Found] = {}
    for _ in range(MOST_RESTARTS):
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told"
            told.write_text(json.dumps({"peaks": peaks, "done": [*found]}), encoding="utf-8")
            ended = _pytest(file, way, chosen, told)
        found |= {row["test"]: Found(**row) for row in ended.rows if "test" in row}
        begun = ended.begun
        # exit codes of a complete run of pytest
        if ended.status in (0, 1, 5) or not begun or begun in found:
            return found
        found[begun] = Found(begun, "ended", why=f"the process ended with {ended.status or -1}")
    return found


def _pytest(file: Path, way: Way, chosen: str, told: Path) -> Ended:
    command = ["-m", "pytest", "-q", "-p", "tests.pytorch.strangers.plugin", "-c", os.devnull]
    command += ["--rootdir", file.parent, "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--timeout={TEST_SECONDS}", file, *(["-k", chosen] if chosen else [])]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    # an environment variable may have 128 KiB
    environment = {"STRANGERS_WAY": way.value, "STRANGERS_TOLD": str(told), "PYTHONPATH": path}
    ended = run(command, SECONDS, environment, file.parent)
    # exit codes of pytest: interrupted, internal error, wrong arguments
    if ended.status in (2, 3, 4):
        raise click.ClickException(f"{file.name} cannot be run:\n{ended.output[-2000:]}")
    return ended
