"""How far back recipes reach: what a program carries along does not carry along all it was.

An RNN's state goes from batch to batch, a running mean from step to step. Each could be computed
again from the one before, and so from everything that ever was. An optimizer's step ends that, for
it writes over what recipes read; where none comes, or where they read something else (a mean of
losses), it ends here, and the value stays instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

import torch

from rekindle.engine import Engine, Storage
from rekindle.pytorch.tensors import Table

#: Calls that may hang on each other before one result is kept, and the next chain begins with it.
LONGEST_CHAIN = 1_000


def carried_along(storages: Iterable[Storage], held: Container[Storage]) -> Iterator[Storage]:
    """Those that the program holds at the end of long chains of which autograd asks for nothing.

    `storages`: all, oldest first. What is yielded is to be sealed before the next is asked for.
    """
    in_use: set[Storage] = set()  # something that they are made from is asked for
    depths: dict[Storage, int] = {}
    for storage in storages:
        parents = [parent for parent in storage.parents() if parent.replayable]
        if any(parent.references or parent in in_use for parent in parents):
            in_use.add(storage)
            continue
        depth = 1 + max((depths[parent] for parent in parents if parent in depths), default=0)
        if depth > LONGEST_CHAIN and storage.resident and storage in held and may_forget(storage):
            yield storage
            depth = 0
        depths[storage] = depth


def made_in_vain(
    storages: Iterable[Storage], is_held: Callable[[Storage], bool]
) -> Iterator[Storage]:
    """Those in the program's hands for whose sake alone sources stay in memory: batches, losses.

    They are there and stay there, so that nobody would compute them again; what could be computed
    again from their sources beside them, nobody asks for. What is yielded is to be sealed.
    """
    for source in storages:
        if source.consumers and source.resident and not (source.replayable or source.references):
            found = None if is_held(source) else _ends(source)
            yield from (end for end in found or () if may_forget(end))


def _ends(source: Storage) -> set[Storage] | None:
    """What is asked for and could be computed again from `source`, if all of it is there and in
    the hands of the program alone."""
    ends: set[Storage] = set()
    passed: set[Storage] = set()
    stack = [source]
    while stack:
        for child in stack.pop().children():
            if not child.dead:
                if child.references or not (child.resident and child.held):
                    return None
                ends.add(child)
            elif child not in passed:
                passed.add(child)
                stack.append(child)
    return ends


def may_forget(storage: Storage) -> bool:
    """Whether nobody waits for what else the operators made that made `storage`."""
    siblings = [made for call in storage.makers for made in call.storages()]
    return all(made.resident or (made.dead and not made.consumers) for made in siblings)


class Forgetful(Protocol):
    """What a driver must be able to do here."""

    engine: Engine
    table: Table
    whole: Any
    recorder: Any
    _held: dict[Storage, None]

    def use(self, storage: Storage) -> None: ...

    def seal(self, storage: Storage) -> None: ...

    def settle(self) -> None: ...


def _is_written_down(driver: Forgetful) -> bool:
    """A trace cannot say until when something could be computed again."""
    return driver.whole is not None or driver.recorder is not None


def forget_history(driver: Forgetful) -> None:
    """What the program carries along from graph to graph is kept, not how it came about."""
    if not _is_written_down(driver):
        for storage in carried_along(driver.engine.storages, driver._held):
            driver.seal(storage)
    forget_sources(driver)


def forget_sources(driver: Forgetful) -> bool:
    """What is kept for nothing but to compute again what is there goes; whether anything did."""
    if _is_written_down(driver):
        return False
    before = driver.engine.memory
    for storage in list(made_in_vain(driver.engine.storages, driver.table.is_held)):
        if storage.replayable and may_forget(storage) and driver.table.is_held(storage):
            driver.seal(storage)
    driver.settle()
    return driver.engine.memory < before


def keep_from_now_on(driver: Forgetful, homes: Iterable[torch.UntypedStorage]) -> None:
    """An optimizer will write what is in `homes`, step after step: those are constants (R4), or
    each could be computed again from all steps before."""
    for home in homes:
        watch = driver.table.watch_at(home._cdata)
        storage = None if watch is None else watch.storage
        if storage is not None and storage.replayable:
            if not storage.resident:
                driver.use(storage)
            returned = storage.returns
            driver.engine.let_return(storage, False)
            if may_forget(storage) and not (returned and _is_written_down(driver)):
                driver.seal(storage)  # else it may have been computed again before


def knowing(engine: Engine) -> Iterator[Storage]:
    """All that may know a tensor of the program: what is in the graph or was overwritten."""
    for storage in engine.storages:
        yield storage
        for call in storage.makers:
            yield from (source.storage for _, source in call.overwrites)
