"""Tests with samples of PyTorch's own operator databases, and of the verdicts of `sweep`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from tests.differ.__main__ import main
from tests.differ.tally import Tally
from tests.helpers import WHOLE
from tests.pytorch.planted import wrong_again
from tests.pytorch.sweep import DATABASES, _exceptions, entries_of
from tests.pytorch.sweep._everything import Evict
from tests.pytorch.sweep._sample import Program, Sample, copy_leaves
from tests.pytorch.sweep._tally import tally
from tests.pytorch.sweep._verdict import Case, Verdict


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", DATABASES)
def test_sample_of_op_db_operators_matches_pytorch(database: str) -> None:
    """`scripts/sweep` runs all operators. The samples run in processes without pytest's threads."""
    sample = ("--few", "1", "--shard", "1/1" if WHOLE else SHARDS[database])
    command = [sys.executable, "-m", "tests.differ", database, *sample]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


ROOT = Path(__file__).parents[2]
#: CI runs every fourth of the many operators; the nightly sweeps run all.
SHARDS = {"opinfo": "1/4", "modules": "1/2", "optimizers": "1/1"}
EXEMPT = [
    (database, entry) for database in DATABASES for entry in getattr(_exceptions, database.upper())
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of PyTorch's own samples
@pytest.mark.parametrize(("database", "entry"), EXEMPT)
def test_each_exception_of_operator_sweep_is_still_needed(database: str, entry: str) -> None:
    """If a listed case passes, remove its exception."""
    exempt = getattr(_exceptions, database.upper())[entry]
    # Only the first sample is differentiated twice. Which one is first depends on how many are
    # drawn.
    drawn = [case for few in (None, 1, 3, 4) for case in entries_of(database)[entry](few)]
    drawn.sort(key=lambda case: case.name != exempt.shown_by)  # the named case first
    assert any(case.judge().kind == exempt.kind for case in drawn)


def _sample(call: Callable[..., Any], *arguments: Tensor) -> Sample:
    return Sample("entry", "sample", lambda: Program(call, copy_leaves(arguments)))


def test_operator_sweep_verdict_for_equal_results_is_same() -> None:
    verdict = _sample(torch.sin, torch.rand(5, requires_grad=True)).judge()
    assert verdict.kind == "same"
    assert verdict.again["sin"] > 0


def test_operator_sweep_verdict_for_wrong_result_is_different() -> None:
    with wrong_again():
        verdict = _sample(torch.tanh, torch.rand(5, requires_grad=True)).judge()
    assert verdict.kind == "different"
    assert "gradient 1" in verdict.detail


def test_operator_sweep_verdict_for_replay_error_is_different() -> None:
    def fails(result: Tensor) -> Tensor:
        raise ValueError("no")

    with wrong_again(fails):
        verdict = _sample(torch.tanh, torch.rand(5, requires_grad=True)).judge()
    assert verdict == Verdict("different", "ValueError: no")


def test_operator_sweep_verdict_if_random_is_undetermined() -> None:
    numbers = itertools.count()
    verdict = _sample(lambda x: x * next(numbers), torch.rand(5, requires_grad=True)).judge()
    assert verdict.kind == "undetermined"


def test_operator_sweep_verdict_for_pytorch_error_is_refused() -> None:
    verdict = _sample(lambda x: x.acosh_(), torch.rand(5, requires_grad=True)).judge()
    assert verdict.kind == "refused"
    assert "acosh" in verdict.detail


class _Known(Case):
    """A case whose outcome its name states."""

    def judge(self, evict: Evict = "saved") -> Verdict:
        return Verdict(self.name)


def _tally(*kinds: str) -> Tally:
    exempt = {"entry": _exceptions.Exempt("undetermined", "", "a reason")}
    return tally("entry", [_Known("entry", kind) for kind in kinds], exempt)


def test_operator_sweep_summary_counts_each_verdict() -> None:
    found = _tally("same", "refused", "undetermined", "as in any mode", "different")
    assert found.tried == 4
    assert found.failures == [
        "entry: as in any mode: as in any mode: ",
        "entry: different: different: ",
        "entry: nothing was ever recomputed",
    ]
    assert found.idle == ["entry"]
    assert found.refused == []
    found += _tally("refused")
    assert found.refused == ["entry"]
    assert found.as_data()["excepted"] == {"as in any mode": 1, "undetermined": 1}


def test_operator_sweep_command_prints_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = CliRunner().invoke(main, ["opinfo", "--only", "sin", "--few", "1", "--processes", "1"])
    assert result.exit_code == 0, result.output
    assert "different                        0" in result.output
    assert "entries                          1 of" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["opinfo", "--only", "sine"], "sine is no entry of opinfo"),
        (["modules", "--shard", "3/2"], "write --shard 1/8"),
        (["networks"], "No such command"),
    ],
)
def test_operator_sweep_with_wrong_options_is_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert complaint in result.output
