"""Both cores under the same tests: which of them "auto" means, and what only the native one knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest

from rekindle.pytorch.context import _cores
from rekindle.pytorch.native import NativeDriver, core, why_not

Name = Literal["python", "native"]
BOTH: tuple[Name, ...] = ("python", "native")

_made: list[NativeDriver] = []  # since the test began


@contextmanager
def taken(name: Name) -> Iterator[None]:
    """Inside, a budget that does not say has this core; native drivers count what runs again."""
    if name == "native" and core() is None:
        pytest.skip(f"no native core: {why_not()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cores, "PREFERRED", name)
        make = NativeDriver.__init__

        def counted(driver: NativeDriver, *args: object) -> None:
            make(driver, *args)  # type: ignore[arg-type]
            driver.core.count_again(driver.handle)
            _made.append(driver)

        patch.setattr(NativeDriver, "__init__", counted)
        try:
            yield
        finally:
            _made.clear()


def count_drivers() -> int:
    """How many native drivers there were so far."""
    return len(_made)


def ran_again(since: int) -> Counter[str]:
    """The operators that ran again in native drivers made since then, by name."""
    return Counter(
        name.removeprefix("aten::")
        for driver in _made[since:]
        for name in driver.core.again(driver.handle)
    )
