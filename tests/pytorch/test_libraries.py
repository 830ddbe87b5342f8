"""Tests of `libraries.judge`, which compares programs of other libraries with and without budgets.

It reports results that differ, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rekindle.pytorch.native import is_seen
from tests.pytorch.libraries.judge import judge
from tests.pytorch.libraries.programs import LIBRARIES, PROGRAMS, perceptron, size_of, trained


def program() -> Sequence[Tensor]:
    model = perceptron(32, 64, 64, 64, 32)
    return trained(model, lambda: size_of(model(torch.randn(512, 32))))


def test_library_program_with_equal_results_is_judged_right() -> None:
    found = judge("perceptron", program)
    assert found.deterministic
    assert not found.wrong
    assert sum(each["evictions"] for each in found.budgets) > 0


def test_library_program_with_differing_results_is_judged_wrong() -> None:
    def other() -> Sequence[Tensor]:
        return [*program(), torch.tensor(is_seen())]

    wrong = judge("other", other).wrong
    assert len(wrong) == 3
    assert wrong[0] == "unlimited: 1 of 12 results differ"


def test_nondeterministic_library_program_is_not_judged_wrong() -> None:
    drawn = iter(range(100))

    def random() -> Sequence[Tensor]:
        return [*program(), torch.tensor(next(drawn))]

    found = judge("random", random)
    assert not found.deterministic
    assert not found.wrong


def test_each_library_program_lists_packages_to_install() -> None:
    assert PROGRAMS.keys() == LIBRARIES.keys()
    assert all(LIBRARIES.values())
    assert len(PROGRAMS) > 40
