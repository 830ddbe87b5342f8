"""One thread: the same bits each time, and no quarrel over the cores. Both cores, where both are
meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pytorch import cores
from tests.pytorch.left import behind, settings

torch.set_num_threads(1)

#: The tests of these modules run once for each core.
_FOR_BOTH = (
    "test_rules_", "test_invertible", "test_kinds_of_tensors", "test_models", "test_trade",
    "test_collectives", "test_positions", "test_steps_are_whole", "test_warm_optimizers",
)  # fmt: skip
#: All others have this one, wherever it does what they ask for.
_OTHERS: Any = os.environ.get("REKINDLE_TEST_CORE", "python")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if "core" in metafunc.fixturenames and name.startswith(_FOR_BOTH):
        alone = metafunc.definition.get_closest_marker("python_core")
        names = ("python",) if alone is not None else cores.BOTH
        metafunc.parametrize("core", names, indirect=True)


@pytest.fixture(autouse=True)
def core(request: pytest.FixtureRequest) -> Iterator[cores.Name]:
    """The core that a budget has which does not say."""
    alone = request.node.get_closest_marker("python_core")
    name: cores.Name = getattr(request, "param", "python" if alone is not None else _OTHERS)
    with cores.taken(name):
        yield name


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = settings()
    yield
    assert behind(before) == []
