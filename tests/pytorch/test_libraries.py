"""Tests of how programs of other libraries are compared with and without budgets.

It reports results that differ, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rekindle.pytorch.native import is_seen
from tests.differ.judge import Outcome, Plain, complaint, judge
from tests.differ.modes import Setting
from tests.pytorch.libraries.programs import LIBRARIES, PROGRAMS, perceptron, size_of, trained
from tests.pytorch.libraries.trained import MODES, Train, Trained


def program() -> Sequence[Tensor]:
    model = perceptron(32, 64, 64, 64, 32)
    return trained(model, lambda: size_of(model(torch.randn(512, 32))))


def judged(train: Train) -> Outcome:
    return judge(Trained("", train), [(mode, 1.0) for mode in MODES.values()])


def test_library_program_with_equal_results_is_judged_right() -> None:
    found = judged(program)
    assert found.kind == "same", found
    assert found.modes.total() == 3


def test_library_program_within_part_of_its_peak_evicts() -> None:
    trained = Trained("", program)
    unlimited, tight = (Setting(mode, None, tracked=False) for mode in (MODES["unlimited"],) * 2)
    trained.run(unlimited)
    tight.amount = int(unlimited.runs[0].peak * 0.7)
    trained.run(tight)
    assert tight.runs[0].evictions > 0
    assert tight.peak <= tight.amount


@pytest.mark.parametrize("mode", MODES)
def test_library_program_with_differing_results_is_judged_wrong(mode: str) -> None:
    def other() -> Sequence[Tensor]:
        return [*program(), torch.tensor(is_seen())]

    differs = Trained("", other)
    plain = Plain(differs)
    plain.unlimited = 1 << 20
    found = complaint(differs, plain, MODES[mode])
    assert found is not None
    assert found.text.startswith("differing: ['result[11]']")


def test_library_program_above_its_budget_is_judged_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = Trained("", program)
    monkeypatch.setattr(Setting, "most", 1 << 10)
    found = complaint(trained, Plain(trained), MODES["unlimited"])
    assert found is not None
    assert "the peak was" in found.text


def test_nondeterministic_library_program_is_not_judged_wrong() -> None:
    drawn = iter(range(100))

    def random() -> Sequence[Tensor]:
        return [*program(), torch.tensor(next(drawn))]

    found = judged(random)
    assert found.kind == "undetermined"
    assert found.modes.total() == 3


def test_each_library_program_lists_packages_to_install() -> None:
    assert PROGRAMS.keys() == LIBRARIES.keys()
    assert all(LIBRARIES.values())
    assert len(PROGRAMS) > 40
