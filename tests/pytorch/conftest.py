"""Set up each test of the PyTorch runtime: one thread, so that results have equal bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from rekindle.pytorch.held import can_make_placeholders
from rekindle.pytorch.native import core, why_not
from tests.pytorch import cores
from tests.pytorch.left import behind, settings
from tests.pytorch.plans import forget_plans

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    with cores.counting():
        yield


@pytest.fixture
def workspaces_unknown() -> Iterator[None]:
    """Forget all measured operators, with their workspaces, before and after the test."""
    module = core()
    if module is None:
        pytest.skip(f"no native core: {why_not()}")
    if not module.count_allocations():
        pytest.skip("another allocator insists on being the one")
    gc.collect()  # tensors of earlier tests must not be freed while allocations are counted
    cores.forget_signatures()
    yield
    cores.forget_signatures()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests with `evict="anything"` before torch 2.12, which cannot evict user-held values."""
    if asks_for_anything(item) and not can_make_placeholders():
        pytest.skip('evict="anything" needs torch 2.12')


def asks_for_anything(item: pytest.Item) -> bool:
    """Return True if a test needs `evict="anything"`: by folder `held/`, marker or parameter."""
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
