"""Tests of choosing the test files for source files that differ from the main branch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.changed import CONVENTIONS, SHARES, Landing, changed_files, mirror

TESTS = {
    "tests/conftest.py": "",
    "tests/helpers.py": "",
    "tests/test_tooling.py": "",
    "tests/test_units.py": "",
    "tests/trace/helpers.py": "",
    "tests/trace/test_trace.py": "from tests.trace.helpers import traced\n",
    "tests/trace/formats/test_formats.py": "from tests import helpers, strategies\n",
    "tests/native/test_equality.py": "from rekindle import native\n",
    "tests/pytorch/native/test_core.py": "",
    "tests/pytorch/online/test_rules_once.py": "",
    "tests/pytorch/swap/test_swap_store.py": "",
}
ALWAYS = {"tests/test_tooling.py"}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("src/rekindle/trace/_model.py", {"tests/trace/test_trace.py"}),
        ("src/rekindle/_units.py", {"tests/test_units.py"}),
        ("src/rekindle/pytorch/swap/_store.py", {"tests/pytorch/swap/test_swap_store.py"}),
        ("src/rekindle/native/engine/rank.cpp", {"tests/native/test_equality.py"}),
        (
            "src/rekindle/native/memory/room/room.h",
            {"tests/pytorch/native/test_core.py", "tests/pytorch/online/test_rules_once.py"},
        ),
        ("tests/test_units.py", {"tests/test_units.py"}),
        ("tests/trace/helpers.py", {"tests/trace/test_trace.py"}),
        ("tests/helpers.py", {"tests/trace/formats/test_formats.py"}),
        ("pyproject.toml", set()),
    ],
)
def test_changed_source_file_selects_tests_of_same_folder(changed: str, wanted: set[str]) -> None:
    assert {*mirror([changed], TESTS)} == wanted | ALWAYS


def test_changed_conftest_selects_tests_of_its_folder() -> None:
    everything = {path for path in TESTS if "test_" in path}
    assert {*mirror(["tests/conftest.py"], TESTS)} == everything


def test_no_test_file_is_selected_without_changes() -> None:
    assert mirror([], TESTS) == []
    assert mirror(["tests/test_that_is_gone.py"], TESTS) == []


def test_each_test_file_of_conventions_exists() -> None:
    for name in CONVENTIONS:
        assert Path(__file__).with_name(f"test_{name}.py").is_file(), name


class Repository:
    """A repository with one commit, on the branch main."""

    def __init__(self, root: Path) -> None:
        self.root, self.hours = root, 0
        self.git("init", "-q", "-b", "main")
        self.commit("old.py")

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        date = f"2026-01-01T{self.hours:02}:00:00Z"
        subprocess.run(
            ["git", "-C", str(self.root), *identity, *arguments],
            check=True,
            env=os.environ | {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date},
        )

    def commit(self, name: str, hours: int = 0) -> None:
        """Commit a new file, `hours` after the last commit."""
        self.hours += hours
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", name)


def test_landing_runs_slow_tests_of_changed_files_and_share(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    for name in ("tests/test_units.py", "tests/test_cache.py"):
        repository.commit(name)
    repository.commit("src/rekindle/_units.py", hours=9)
    repository.commit("README.md", hours=1)
    landing = Landing.of_head(root=tmp_path)
    assert landing.files == {"tests/test_units.py"}
    assert landing.runs("tests/test_units.py::test_anything[1]")
    assert Landing.of_head("HEAD^", tmp_path).files == frozenset()  # README.md alone
    repository.git("checkout", "-q", "-b", "mine")
    repository.commit("src/rekindle/_cache.py")
    assert Landing.of_head(root=tmp_path).files == {"tests/test_cache.py"}


def test_landing_of_changed_helper_of_all_tests_selects_no_file(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    for name in ("tests/test_units.py", "tests/pytorch/test_models.py", "src/rekindle/_units.py"):
        repository.commit(name)
    repository.commit("tests/conftest.py", hours=9)
    assert Landing.of_head(root=tmp_path).files == frozenset()
    repository.commit("tests/pytorch/conftest.py")
    assert Landing.of_head(root=tmp_path).files == {"tests/pytorch/test_models.py"}


def test_each_slow_test_is_in_exactly_one_share() -> None:
    tests = [f"tests/test_a.py::test_{number}" for number in range(1000)]
    shares = [
        {test for test in tests if Landing(frozenset(), share).runs(test)}
        for share in range(SHARES)
    ]
    assert set().union(*shares) == {*tests}
    assert sum(map(len, shares)) == len(tests)
    assert all(180 < len(share) < 320 for share in shares)


def test_landing_on_shallow_history_raises(tmp_path: Path) -> None:
    Repository(tmp_path)
    with pytest.raises(SystemExit, match="git fetch --unshallow"):
        Landing.of_head(root=tmp_path)


def test_changed_files_are_those_that_differ_from_main_branch(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.git("checkout", "-q", "-b", "mine")
    repository.commit("committed.py")
    (tmp_path / "old.py").write_text("x = 1\n")
    (tmp_path / "new.py").write_text("")
    assert sorted(changed_files(tmp_path)) == ["committed.py", "new.py", "old.py"]


def test_changed_files_without_main_branch_raises(tmp_path: Path) -> None:
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q", "-b", "other"], check=True)
    with pytest.raises(SystemExit, match="no branch main"):
        changed_files(tmp_path)
