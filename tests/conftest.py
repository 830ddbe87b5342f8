"""What a test learns is kept from the user's cache, and from the next run of the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.helpers import own_cache


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give the tests a cache of their own, which the processes that they start inherit."""
    os.environ["REKINDLE_CACHE"] = str(own_cache(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def prices_of_plans(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators are priced once for all tests that plan."""
    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path_factory.getbasetemp() / "prices")))


@pytest.fixture
def kernels(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor compiles is kept for the tests that compile, and from the user's cache."""
    folder = tmp_path_factory.getbasetemp() / "kernels"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))


@pytest.fixture
def nothing_left_compiled() -> Iterator[None]:
    """What others have compiled is gone before a test, and what it has compiled after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
