"""Tests of one training step of planned models of the zoo: equal bits, or an error with a reason.

The tests run the architectures that once differed, and the first one of some families.
`scripts/bench zoo --planned` runs all.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import sampled
from tests.zoo.architectures import ALL_ARCHITECTURES, Architecture
from tests.zoo.planned import FRACTION, by_plan, plainly

#: Architectures whose plans once gave other bits, each for another reason: a mask, a result without
#: a gradient, another code path for compilers.
ONCE_DIFFERENT = ("UNet2DModel", "segformer ForSemanticSegmentation", "mamba ForCausalLM")
BY_NAME = {each.name: each for each in ALL_ARCHITECTURES}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prices_of_plans", "nothing_left_compiled"),
    pytest.mark.filterwarnings("default"),  # warnings of the networks themselves
]


@pytest.mark.parametrize("name", ONCE_DIFFERENT)
def test_planned_zoo_model_matches_pytorch(name: str) -> None:
    plain = plainly(BY_NAME[name])
    found = by_plan(BY_NAME[name], plain, None)
    assert (found.verdict, found.reason) == ("same", "")
    assert found.peak < found.budget


def _of_some_families() -> list[Any]:
    families = {each.family: each for each in reversed(ALL_ARCHITECTURES)}
    return [pytest.param(each, id=each.name) for each in sampled(families.values(), 4)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", _of_some_families())
def test_planned_zoo_model_matches_pytorch_or_is_refused(architecture: Architecture) -> None:
    plain = plainly(architecture)
    for fraction in (None, FRACTION):
        found = by_plan(architecture, plain, fraction)
        assert found.verdict in ("same", "refused")
        assert (found.verdict == "refused") == ("cannot be planned ahead" in found.reason)
        assert found.peak <= found.budget
