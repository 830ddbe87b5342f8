"""Sources that are about to be written (R4): what needs them is saved first, and stays."""

from __future__ import annotations

from typing import Any

from rekindle.engine import Storage


def forget(driver: Any, source: Storage) -> None:
    """Brings back what only `source` can bring back; it is kept from then on, as `source` was.

    driver: a `Driver`, which calls this itself: it cannot be imported here.
    """
    driver.poll()
    made = source.made_through()
    driver.perform(driver.engine.forget(source))
    for each in made:
        if each.resident and each.consumers and not each.replayable:
            driver.own(each)  # others are made from it, whether the program has it or not
