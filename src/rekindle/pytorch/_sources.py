"""Sources that are about to be written (R4): what needs them is saved first, and stays."""

from __future__ import annotations

from typing import Any

from rekindle.engine import Storage


def forget(driver: Any, source: Storage) -> None:
    """Brings back what only `source` can bring back; it is kept from then on, as `source` was.

    driver: a `Driver`, which calls this itself: it cannot be imported here.
    """
    driver.poll()
    driver.perform(driver.engine.forget(source))
