"""A training step of each architecture within 30 % of its activation memory: equal, bit for bit.

Run here: some of each family always, a sample by seed among the slow ones, and all of them with
`scripts/sweep tests` or by `scripts/bench zoo`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.helpers import WHOLE
from tests.zoo.architectures import ALL_ARCHITECTURES, Architecture
from tests.zoo.runs import compare, training_step

#: Not the same when run twice in plain PyTorch, and why. Whatever becomes stable leaves this list.
UNSTABLE = {
    "reformer ForMaskedLM": "every layer takes a new seed from the system, by torch.seed()",
}
SAMPLED = 24  # in CI, of those that are stable

pytestmark = pytest.mark.filterwarnings("default")  # warnings of the networks are their own


def _stable() -> list[Architecture]:
    stable = [each for each in ALL_ARCHITECTURES if each.name not in UNSTABLE]
    return random.Random(20).sample(stable, len(stable))


def _marked() -> list[object]:
    """The first of each family as they are drawn, then slow ones."""
    families: set[str] = set()
    chosen: list[object] = []
    slow: list[object] = []
    for each in _stable():
        marks = [pytest.mark.slow] if each.family in families else []
        families.add(each.family)
        (slow if marks else chosen).append(pytest.param(each, id=each.name, marks=marks))
    return chosen + (slow if WHOLE else slow[: SAMPLED - len(chosen)])


@pytest.mark.parametrize("architecture", _marked())
def test_trains_the_same(architecture: Architecture) -> None:
    row = compare(training_step(architecture))
    assert row.unstable == ()
    assert row.differing == ()
    assert row.peak <= row.budget
    assert row.recomputations > 0


@pytest.mark.parametrize("name", UNSTABLE)
def test_the_unstable_are_unstable(name: str) -> None:
    (architecture,) = (each for each in ALL_ARCHITECTURES if each.name == name)
    assert compare(training_step(architecture), fraction=1.0).unstable != ()


def test_the_zoo_is_large_and_its_names_are_distinct() -> None:
    names = Counter(each.name for each in ALL_ARCHITECTURES)
    assert len(names) >= 100
    assert names.most_common(1)[0][1] == 1
    assert UNSTABLE.keys() <= names.keys()
