"""Run other projects' tests within budgets: `scripts/sweep strangers FILE.py ...`.

The files are not part of this project. PyTorch's are in the folder test/ of its repository, at the
tag of the installed version. Others come with the source distributions of their packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from tests.pytorch.strangers.ways import Found, Way

ROOT = Path(__file__).parents[3]
EXPECTED = Path(__file__).parent / "expected"
SECONDS = 7200  # seconds for a file in one way, on a busy machine
TEST_SECONDS = 600  # seconds for one test
MOST_RESTARTS = 40


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--way", "ways", multiple=True, type=click.Choice([w.value for w in Way]))
@click.option("-k", "chosen", default="", help="Only tests whose names have this in them.")
@click.option("--write", is_flag=True, help="Write the failures into the list of expected ones.")
def main(files: tuple[Path, ...], ways: tuple[str, ...], chosen: str, write: bool) -> None:
    """Run each test in plain PyTorch, and then in three ways within a budget.

    The ways are a budget without a limit, one that evicts everything before each operator, and one
    of 60 % of the test's peak. Tests that pass in plain PyTorch must pass in each way. Known
    exceptions are listed with a reason in tests/pytorch/strangers/expected, which may only shrink.
    """
    there = [file for file in files if file.is_file()]
    if not there:
        click.echo("skipped: no such file. Get test_autograd.py from PyTorch's repository, folder "
                   "test/, and write scripts/sweep strangers PATH/TO/test_autograd.py")  # fmt: skip
        return
    asked = [Way(way) for way in ways] or [Way.WITHIN, Way.EVICTED, Way.TIGHT]
    swept = [_swept(file.resolve(), asked, chosen, write) for file in there]
    sys.exit(any(swept))


def _swept(file: Path, ways: list[Way], chosen: str, write: bool) -> list[str]:
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
            lines, told = Path(folder) / "found", Path(folder) / "told"
            lines.touch()
            told.write_text(json.dumps({"peaks": peaks, "done": [*found]}), encoding="utf-8")
            status = _pytest(file, way, chosen, lines, told)
            begun = ""
            for line in lines.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                begun = row.get("begins", begun)
                if "test" in row:
                    found[row["test"]] = Found(**row)
        # exit codes of a complete run of pytest
        if status in (0, 1, 5) or not begun or begun in found:
            return found
        found[begun] = Found(begun, "ended", why=f"the process ended with {status}")
    return found


def _pytest(file: Path, way: Way, chosen: str, lines: Path, told: Path) -> int:
    command = [sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "tests.pytorch.strangers.plugin", "-c", os.devnull, "--rootdir", file.parent]
    command += ["-p", "no:cacheprovider", "-W", "ignore", f"--timeout={TEST_SECONDS}", str(file)]
    command += ["-k", chosen] if chosen else []
    environment = {
        "STRANGERS_WAY": way.value,
        "STRANGERS_FOUND": str(lines),
        "STRANGERS_TOLD": str(told),  # an environment variable may have 128 KiB
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    try:
        done = subprocess.run(
            [*map(str, command)], env=os.environ | environment, cwd=file.parent,
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1
    # exit codes of pytest: interrupted, internal error, wrong arguments
    if done.returncode in (2, 3, 4):
        raise click.ClickException(f"{file.name} cannot be run:\n{done.stdout[-2000:]}")
    return done.returncode


if __name__ == "__main__":
    main()
