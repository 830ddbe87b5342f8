"""Tests of the choice of test parameters in CI: the same each time, and all on request."""

from __future__ import annotations

import pytest

from tests import helpers
from tests.helpers import combined, sampled


def test_combined_test_parameters_cover_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "WHOLE", False)
    assert combined("abc", (1, 2)) == [("a", 1), ("b", 2), ("c", 1)]
    monkeypatch.setattr(helpers, "WHOLE", True)
    assert combined("ab", (1, 2)) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_sampled_test_parameters_are_equal_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "WHOLE", False)
    drawn = sampled(range(100), 5)
    assert drawn == sampled(range(100), 5)
    assert len({*drawn}) == 5
    assert sampled(range(3), 5) != []
    monkeypatch.setattr(helpers, "WHOLE", True)
    assert sampled(range(100), 5) == [*range(100)]
