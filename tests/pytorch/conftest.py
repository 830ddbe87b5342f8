"""Count and tune what runs in each test; one thread, so that the bits are the same each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rekindle.pytorch.held import can_make_placeholders
from rekindle.pytorch.learned._step_plans import forget_plans
from tests.pytorch import cores
from tests.pytorch.left import behind, settings

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    with cores.counting():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what asks for `evict="anything"` where torch, before 2.12, has no such storages."""
    if asks_for_anything(item) and not can_make_placeholders():
        pytest.skip('evict="anything" needs torch 2.12')


def asks_for_anything(item: pytest.Item) -> bool:
    """Return True if a test is in `held/`, is marked so, or has it among its parameters."""
    callspec = getattr(item, "callspec", None)
    parameters = () if callspec is None else callspec.params.values()
    return (
        item.path.parent.name == "held"
        or item.get_closest_marker("evicts_anything") is not None
        or any(each in ("anything", {"evict": "anything"}) for each in parameters)
    )


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = settings()
    yield
    forget_plans()
    assert behind(before) == []
