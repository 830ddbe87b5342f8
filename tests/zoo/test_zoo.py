"""Tests of a training step of each architecture within 30 % of its activation memory: equal bits.

The first architecture of each family always runs. A random sample runs among the slow tests. All
run with `scripts/sweep tests` or `scripts/bench zoo`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.helpers import WHOLE
from tests.zoo.architectures import ALL_ARCHITECTURES, Architecture
from tests.zoo.runs import compare, training_step

#: Architectures that give different bits when run twice in plain PyTorch, and why. Remove one when
#: it becomes deterministic.
UNSTABLE = {
    "reformer ForMaskedLM": "every layer takes a new seed from the system, by torch.seed()",
}
SAMPLED = 24  # number of deterministic architectures in CI

pytestmark = pytest.mark.filterwarnings("default")  # warnings of the networks themselves


def _stable() -> list[Architecture]:
    stable = [each for each in ALL_ARCHITECTURES if each.name not in UNSTABLE]
    return random.Random(20).sample(stable, len(stable))


def _marked() -> list[object]:
    """Return the first architecture of each family, and then other ones as slow tests."""
    families: set[str] = set()
    chosen: list[object] = []
    slow: list[object] = []
    for each in _stable():
        marks = [pytest.mark.slow] if each.family in families else []
        families.add(each.family)
        (slow if marks else chosen).append(pytest.param(each, id=each.name, marks=marks))
    return chosen + (slow if WHOLE else slow[: SAMPLED - len(chosen)])


@pytest.mark.parametrize("architecture", _marked())
def test_zoo_model_within_budget_matches_pytorch(architecture: Architecture) -> None:
    row = compare(training_step(architecture))
    assert row.unstable == ()
    assert row.differing == ()
    assert row.peak <= row.budget
    assert row.recomputations > 0


@pytest.mark.parametrize("name", UNSTABLE)
def test_zoo_model_listed_as_unstable_differs_between_plain_runs(name: str) -> None:
    (architecture,) = (each for each in ALL_ARCHITECTURES if each.name == name)
    assert compare(training_step(architecture), fraction=1.0).unstable != ()


def test_zoo_has_many_architectures_with_distinct_names() -> None:
    names = Counter(each.name for each in ALL_ARCHITECTURES)
    assert len(names) >= 100
    assert names.most_common(1)[0][1] == 1
    assert UNSTABLE.keys() <= names.keys()
