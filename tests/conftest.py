"""What a test learns is kept from the user's cache, and from the next run of the tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache folder of their own, which the processes that tests start inherit."""
    os.environ["REKINDLE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
