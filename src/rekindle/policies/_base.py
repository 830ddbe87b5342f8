"""The interface between the engine and a policy.

A policy is frozen configuration. Its method `bind()` makes the state for one run, a `Chooser`. The
engine tells the chooser which storages become candidates for eviction, are evicted, and return to
memory. It calls `choose` when a storage must be evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from rekindle._types import Bytes, Nanoseconds


class Candidate(Protocol):
    """A storage that may be evicted, as a policy sees it.

    Attributes:
        nbytes: The size of the storage in bytes.
        cost: The cost (ns) of the operator that made the storage.
        last_access: The time of the last use, on the engine's clock (ns).
        resident: True if the storage is in memory.
        order: A number that grows each time a storage becomes a candidate. Use it to break ties.
    """

    nbytes: Bytes
    cost: Nanoseconds
    last_access: Nanoseconds
    resident: bool
    order: int

    def parents(self) -> Iterable[Candidate]:
        """Return the other storages that the operators which made this storage read."""
        ...

    def children(self) -> Iterable[Candidate]:
        """Return the other storages that were made by operators which read this storage."""
        ...


class Chooser(ABC):
    """The state of a policy during one run: tracks the candidates, and chooses one to evict."""

    #: True if `choose` depends on earlier events, and not only on the current state of the
    #: storages.
    remembers = False

    @abstractmethod
    def add(self, storage: Candidate) -> None:
        """Record that `storage` may be evicted from now on."""

    @abstractmethod
    def remove(self, storage: Candidate) -> None:
        """Record that `storage` is no candidate for eviction any more.

        The storage was evicted, an operator reads it, a variable of the program holds it, or the
        program cannot reach it any more.
        """

    @abstractmethod
    def choose(self, now: Nanoseconds) -> Candidate | None:
        """Choose the storage to evict.

        Args:
            now: The engine's clock (ns).

        Returns:
            A candidate, or None if there is none.
        """

    def recompute_ns(self, storage: Candidate) -> Nanoseconds:
        """Return the policy's estimate of the time (ns) to recompute `storage`."""
        return storage.cost

    def loss(self, storage: Candidate, now: Nanoseconds) -> float:
        """Return the cost of evicting `storage`, regardless of its size.

        To free one contiguous piece of memory, the engine's caller adds up and compares these
        costs. Default: the cost of recomputation divided by the time since the last use.

        Args:
            storage: A candidate.
            now: The engine's clock (ns).
        """
        return storage.cost / max(1, now - storage.last_access)

    def evicted(self, storage: Candidate) -> None:  # noqa: B027  (most policies need no memory)
        """Record that `storage` was evicted. It can be recomputed or swapped in."""

    def returned(self, storage: Candidate) -> None:  # noqa: B027
        """Record that the evicted `storage` is in memory again."""

    def forgotten(self, storage: Candidate) -> None:  # noqa: B027
        """Record that the evicted `storage` will never be needed again."""

    def touched(self, storage: Candidate) -> None:  # noqa: B027
        """Record that the last access of the candidate `storage` changed."""

    def repriced(self, storage: Candidate) -> None:  # noqa: B027
        """Record that the cost or the parents of `storage` changed."""


class Policy(ABC):
    """A rule that decides which storage to evict next.

    A policy is frozen configuration, and `bind()` makes the state of one run. Subclass it to write
    a policy of your own: the guide "Write a policy or a planner" shows how.
    """

    @abstractmethod
    def bind(self) -> Chooser:
        """Return the state for one run. The same events must give the same choices."""
