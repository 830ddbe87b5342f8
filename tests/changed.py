"""Print the test files that belong to the files changed since main: `python -m tests.changed`.

`Landing` chooses the slow tests that continuous integration runs for a commit.

`tests/` has the folders of `src/rekindle/`: the tests of a module are in the folder of the same
name, or in files that have its name. Tests of conventions always belong to the changed files.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from tests.durations import file_of, function_of

ROOT = Path(__file__).parents[1]
CONVENTIONS = ("architecture", "architecture_native", "files", "public_api", "tooling")
#: Parts of the package, with all folders in them, whose tests are not in the folder of that name.
ELSEWHERE = {
    "src/rekindle/native/base": ("tests/native",),
    "src/rekindle/native/engine": ("tests/native",),
    "src/rekindle/native/replay": ("tests/native",),
    **{
        f"src/rekindle/native/{room}": ("tests/pytorch/native", "tests/pytorch/online")
        for room in ("allocator", "torch", "ops", "memory", "steps", "dispatch", "python")
    },
    "benchmarks": ("tests/benchmarks",),
    "docs": ("tests/test_docs.py",),
    "examples": ("tests/test_examples.py",),
}


#: Of the slow tests that do not belong to changed files, a landing runs one in this many.
SHARES = 4
#: On main itself, the commits of so many seconds before the last one are what landed with it.
_LANDING_S = 3 * 3600
#: Helpers that all tests use. A landing that changes them runs a share of the slow tests all the
#: same; the tests of every folder would take three times as long.
_HELPERS = re.compile(r"tests/(?!test_)[^/]*\.py")


@dataclass(frozen=True, slots=True)
class Landing:
    """The slow tests to run for one commit: those of changed files, and a share of the others."""

    files: frozenset[str]  #: test files that belong to changed files
    share: int  #: which share of the other tests, from 0 to `SHARES` - 1

    @classmethod
    def of_head(cls, since: str = "", root: Path = ROOT) -> Self:
        """Choose for the commit that is checked out.

        The commit's hash chooses the share, so that a failure can be repeated.

        Args:
            since: The last commit that landed before. Default: where this branch left main; on main
                itself, the last commit that is three hours older than the newest.
            root: The repository.
        """
        commit, *_ = _git(root, "rev-parse", "HEAD")
        differing = _differing(root, since or _landed(root))
        changed = [each for each in differing if not _HELPERS.fullmatch(each)]
        return cls(frozenset(mirror(changed, _texts(root))), int(commit[:8], 16) % SHARES)

    def runs(self, test: str) -> bool:
        """Return True if the slow test with this node id is chosen."""
        chosen = zlib.crc32(function_of(test).encode()) % SHARES == self.share
        return chosen or file_of(test) in self.files


def changed_files(root: Path = ROOT) -> list[str]:
    """Return the files that differ from the commit where this branch left main.

    Uncommitted changes count as well.
    """
    return _differing(root, _fork_of(root))


def _differing(root: Path, commit: str) -> list[str]:
    return [
        *_git(root, "diff", "--name-only", commit),
        *_git(root, "ls-files", "--others", "--exclude-standard"),
    ]


def _fork_of(root: Path) -> str:
    """Return the commit where this branch left main."""
    for main in ("main", "origin/main"):
        found = _git(root, "merge-base", main, "HEAD")
        if found:
            return found[0]
    raise SystemExit("tests.changed: there is no branch main; write git fetch origin main:main")


def _landed(root: Path) -> str:
    """Return the commit that landed before the one that is checked out."""
    head, time = _git(root, "log", "-1", "--format=%H%n%ct")
    fork = _fork_of(root)
    if fork != head:
        return fork
    for line in _git(root, "log", "--first-parent", "--format=%H %ct"):
        commit, _, committed = line.partition(" ")
        if int(committed) < int(time) - _LANDING_S:
            return commit
    raise SystemExit("tests.changed: the history is cut off; write git fetch --unshallow")


def mirror(changed: Iterable[str], tests: Mapping[str, str]) -> list[str]:
    """Return the test files for the changed files.

    Args:
        changed: Paths from the root of the repository.
        tests: The text of each Python file under `tests/`, by its path.
    """
    found = {path for each in changed for path in _tests_of(PurePosixPath(each), tests)}
    if found:
        found |= {path for name in CONVENTIONS if (path := f"tests/test_{name}.py") in tests}
    return sorted(found)


def _tests_of(path: PurePosixPath, tests: Mapping[str, str]) -> Iterable[str]:
    folder = str(path.parent)
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        return {str(path)} & tests.keys()
    if path.parts[0] == "tests" and path.name == "conftest.py":
        return _inside(folder, tests)
    if path.parts[0] == "tests" and path.suffix == ".py":
        return _importers(path, tests)
    found = {
        each
        for source, places in ELSEWHERE.items()
        if path.is_relative_to(source)
        for place in places
        for each in _inside(place, tests)
    }
    if path.is_relative_to("src/rekindle"):
        name = path.stem.strip("_")
        mirrored = PurePosixPath("tests", *path.parts[2:-1])
        found |= {
            each
            for each in _inside("tests", tests)
            if re.match(rf"test_{re.escape(name)}(_|\.)", PurePosixPath(each).name)
            or (str(mirrored) != "tests" and PurePosixPath(each).parent == mirrored)
        }
    return found or {"tests/test_tooling.py", "tests/test_docs.py"} & tests.keys()


def _inside(place: str, tests: Mapping[str, str]) -> set[str]:
    """Return the test files in a folder and its subfolders, or the one test file."""
    return {
        each
        for each in tests
        if PurePosixPath(each).is_relative_to(place)
        and PurePosixPath(each).name.startswith("test_")
    }


def _importers(path: PurePosixPath, tests: Mapping[str, str]) -> set[str]:
    """Return the test files that import the test helper at `path`."""
    package, name = re.escape(".".join(path.parent.parts)), path.stem
    whole, part = rf"(from|import) {package}\.{name}\b", rf"from {package} import .*\b{name}\b"
    wanted = re.compile(rf"^({whole}|{part})", re.MULTILINE)
    return {each for each in _inside("tests", tests) if wanted.search(tests[each])}


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def _texts(root: Path = ROOT) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in (root / "tests").rglob("*.py")
    }


if __name__ == "__main__":
    sys.stdout.writelines(f"{path}\n" for path in mirror(changed_files(), _texts()))
