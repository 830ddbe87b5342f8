"""Tests of a training step of architectures by a plan: equal bit for bit, or refused with reason.

Here run those that once differed and one of each of some families; all run by
`scripts/bench zoo --planned`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import sampled
from tests.zoo.architectures import ALL_ARCHITECTURES, Architecture
from tests.zoo.planned import FRACTION, by_plan, plainly

#: Each for a cause of its own: a mask, a result without a gradient, another path for compilers.
ONCE_DIFFERENT = ("UNet2DModel", "segformer ForSemanticSegmentation", "mamba ForCausalLM")
BY_NAME = {each.name: each for each in ALL_ARCHITECTURES}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled"),
    pytest.mark.filterwarnings("default"),  # warnings of the networks are their own
]


@pytest.mark.parametrize("name", ONCE_DIFFERENT)
def test_trains_the_same_by_a_plan(name: str) -> None:
    plain = plainly(BY_NAME[name])
    found = by_plan(BY_NAME[name], plain, None)
    assert (found.verdict, found.reason) == ("same", "")
    assert found.peak < found.budget


def _of_some_families() -> list[Any]:
    families = {each.family: each for each in reversed(ALL_ARCHITECTURES)}
    return [pytest.param(each, id=each.name) for each in sampled(families.values(), 4)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", _of_some_families())
def test_trains_the_same_or_is_refused_with_the_reason(architecture: Architecture) -> None:
    plain = plainly(architecture)
    for fraction in (None, FRACTION):
        found = by_plan(architecture, plain, fraction)
        assert found.verdict in ("same", "refused")
        assert (found.verdict == "refused") == ("cannot be planned ahead" in found.reason)
        assert found.peak <= found.budget
