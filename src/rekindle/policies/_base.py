"""What a policy sees and what it must say.

A policy is a frozen record of configuration. `bind()` makes the state that follows one run: the
engine reports what becomes a candidate, what is evicted and what comes back, and asks `choose`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from rekindle._types import Bytes, Nanoseconds


class Candidate(Protocol):
    """A storage as a policy sees it. `order` grows each time it becomes a candidate."""

    nbytes: Bytes
    cost: Nanoseconds
    last_access: Nanoseconds
    resident: bool
    order: int

    def parents(self) -> Iterable[Candidate]:
        """The other storages that the operators which made this one read."""
        ...

    def children(self) -> Iterable[Candidate]:
        """The other storages made by operators that read this one."""
        ...


class Chooser(ABC):
    """The state of a policy during one run."""

    #: Whether what came and went before the first choice matters to it, not only what is there.
    remembers = False

    @abstractmethod
    def add(self, storage: Candidate) -> None:
        """`storage` may be evicted from now on."""

    @abstractmethod
    def remove(self, storage: Candidate) -> None:
        """`storage` may not be evicted any more (it is locked, held, evicted or dead)."""

    @abstractmethod
    def choose(self, now: Nanoseconds) -> Candidate | None:
        """The storage to let go at clock `now`; nothing if there is no candidate."""

    def recompute_ns(self, storage: Candidate) -> Nanoseconds:
        """The time that it would take to compute `storage` again, as far as the policy knows."""
        return storage.cost

    def loss(self, storage: Candidate, now: Nanoseconds) -> float:
        """What letting go of `storage` at clock `now` would cost, whatever its size.

        The score without the bytes, for who asks for certain memory and not for some amount. By
        default its own cost over its staleness.
        """
        return storage.cost / max(1, now - storage.last_access)

    def expected(self, storage: Candidate) -> None:  # noqa: B027  (most policies need no memory)
        """Quirk: a call in progress will make `storage`, which counts as evicted until then."""

    def evicted(self, storage: Candidate) -> None:  # noqa: B027
        """`storage` left memory and can be recomputed."""

    def returned(self, storage: Candidate) -> None:  # noqa: B027
        """`storage` is in memory again, or as expected."""

    def forgotten(self, storage: Candidate) -> None:  # noqa: B027
        """The evicted `storage` will never be asked for again."""

    def watch(self, priced: Callable[[Candidate], None]) -> None:  # noqa: B027
        """From now on calls `priced` with every storage whose score is computed."""

    def touched(self, storage: Candidate) -> None:  # noqa: B027
        """The last access of the candidate `storage` changed."""

    def repriced(self, storage: Candidate) -> None:  # noqa: B027
        """The cost or the parents of `storage` changed (a view of it is made)."""


class Policy(ABC):
    """Chooses what to let go. Concrete policies are final and hold configuration only."""

    @abstractmethod
    def bind(self) -> Chooser:
        """The state for one run; two runs of the same events choose alike."""
