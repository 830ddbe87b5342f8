"""What variables hold goes on the core that a test asks for, which for `evict="anything"` "auto"
does not take yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.pytorch.context import _cores


@pytest.fixture(autouse=True)
def _natively() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cores, "PREFERRED_FOR_ANYTHING", "native")
        yield
