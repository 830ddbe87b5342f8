"""Tests of choosing the test files for source files that differ from the main branch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.changed import CONVENTIONS, changed_files, mirror

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
            "src/rekindle/native/memory/driver.h",
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


def test_changed_files_are_those_that_differ_from_main_branch(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q", "-b", "main")
    (tmp_path / "old.py").write_text("")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    git("checkout", "-q", "-b", "mine")
    (tmp_path / "committed.py").write_text("")
    git("add", "-A")
    git("commit", "-q", "-m", "two")
    (tmp_path / "old.py").write_text("x = 1\n")
    (tmp_path / "new.py").write_text("")
    assert sorted(changed_files(tmp_path)) == ["committed.py", "new.py", "old.py"]


def test_changed_files_without_main_branch_raises(tmp_path: Path) -> None:
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q", "-b", "other"], check=True)
    with pytest.raises(SystemExit, match="no branch main"):
        changed_files(tmp_path)
