"""Tests of `strangers`, which runs other projects' tests within budgets.

It handles tests that pass, fail, or end the process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rekindle.pytorch.native import core as native_core
from tests.differ.__main__ import main
from tests.pytorch.strangers import suite as strangers

SUITE = """
import os
import unittest
import torch


def inside():
    return os.environ["STRANGERS_WAY"] != "plain"


class TestSome(unittest.TestCase):
    def test_passes(self):
        x = torch.ones(100, requires_grad=True)
        x.exp().sin().sum().backward()
        assert x.grad.isfinite().all()

    def test_fails_plainly(self):
        assert False

    def test_fails_within(self):
        assert not inside()

    def test_ends_within(self):
        if inside():
            os._exit(7)

    def test_runs_behind_it(self):
        pass

    def test_draws_from_a_seed(self):
        seeded = torch.Generator().manual_seed(0)
        assert torch.rand(3).equal(torch.rand(3, generator=seeded))

    def test_runs_each_operator_once(self):
        with torch.autograd.profiler.profile() as profile:
            torch.ones(100, requires_grad=True).exp().sin().sum().backward()
        assert [event.name for event in profile.function_events].count("aten::exp") == 1
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if native_core() is None:
        pytest.skip("no native core")
    monkeypatch.setattr(strangers, "EXPECTED", tmp_path / "expected")
    file = tmp_path / "test_some.py"
    file.write_text(SUITE)
    return file


def _sweep(*words: object) -> Result:
    return CliRunner().invoke(main, ["strangers", *map(str, words)])


@pytest.mark.slow
def test_sweep_of_other_projects_lists_tests_that_fail(suite: Path) -> None:
    done = _sweep(suite, "--way", "within", "--write")
    assert done.exit_code == 1, done.output
    assert "6 of 7 tests pass plainly" in done.output
    assert "test_some::test_ends_within, within: ended, the process ended with 7" in done.output
    assert "test_some::test_fails_within, within: failed" in done.output
    assert "passes" not in done.output.partition("plainly")[2].replace("'passed'", "")
    assert [*strangers.expected_failures("test_some")] == ["test_ends_within", "test_fails_within"]
    again = _sweep(suite, "--way", "within")  # the listed failure, as expected
    assert again.exit_code == 0, again.output


@pytest.mark.slow
def test_sweep_of_other_projects_evicts_at_every_operator(suite: Path) -> None:
    done = _sweep(suite, "--way", "evicted", "-k", "once")
    assert "test_some::test_runs_each_operator_once, evicted: failed" in done.output


@pytest.mark.slow
def test_sweep_of_other_projects_reports_exception_that_passes(suite: Path) -> None:
    strangers.EXPECTED.mkdir()
    (strangers.EXPECTED / "test_some.txt").write_text("test_passes  # it did not\n")
    done = _sweep(suite)
    assert done.exit_code == 1
    assert "test_some::test_passes passes now: take it from the list" in done.output


def test_sweep_of_missing_file_of_other_project_is_skipped(tmp_path: Path) -> None:
    done = _sweep(tmp_path / "test_autograd.py")
    assert done.exit_code == 0
    assert done.output.startswith("skipped: no such file.")
