"""How far back recipes reach: what a program carries along does not carry along all it was.

An RNN's state goes from batch to batch, a running mean from step to step. Each could be computed
again from the one before, and so from everything that ever was. An optimizer's step ends that, for
it writes over what recipes read; where none comes, it ends here, and the value stays instead.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from rekindle.engine import Storage

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


def may_forget(storage: Storage) -> bool:
    """Whether nobody waits for what else the operators made that made `storage`."""
    siblings = [made for call in storage.makers for made in call.storages()]
    return all(made.resident or (made.dead and not made.consumers) for made in siblings)
