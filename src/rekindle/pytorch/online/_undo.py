"""What an optimizer's step wrote is put back if it runs out of budget half way.

For steps of which nobody can say ahead what they take: those that call the program between two
writes (LBFGS), and those of optimizers that are not PyTorch's own. A weight is copied just before
the step writes it; the copies count, and go when the step is over.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from rekindle._errors import OutOfBudget
from rekindle.pytorch.online._contents import PutBack, put_back
from rekindle.pytorch.operators import Operator, written_by
from rekindle.pytorch.tensors import homes_of, whole

_CLONE, _COPY = torch.ops.aten.clone.default, torch.ops.aten.copy_.default


@final
class Undo:
    """In the place of the runtime while one optimizer steps: it hears of every operator."""

    def __init__(
        self, runtime: Any, optimizer: Any, *, copies: bool, at_once: bool = False
    ) -> None:
        """Without `copies` nothing is put back; an error then says so. `at_once`: who does not hear
        of every operator copies all that the step might write, before it begins."""
        self.driver = runtime.driver
        self.running = True
        self._runtime = runtime
        self._name = type(optimizer).__name__
        self._copies = copies
        self._at_once = at_once
        self._depth = 1  # of ranges of the profiler: one is around every step
        self._homes: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._contents: list[PutBack] = []
        self.protect(optimizer)

    def protect(self, optimizer: Any) -> None:
        """What `optimizer` may write goes back as well, from what it is now."""
        if self._copies:
            self._contents.append(put_back(vars(optimizer), {}))
            for home in homes_of(tensors_kept_by(optimizer)):
                self._homes.setdefault(home._cdata, weakref.ref(home))
                if self._at_once:
                    self._about_to_write(home)

    def run(self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if facts.writes and self._copies and self.running:
            for home in homes_of(written_by(facts, args, kwargs)):
                self._about_to_write(home)
        return self._runtime.run(facts, args, kwargs)

    def run_whole(
        self, higher: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._runtime.run_whole(higher, args, kwargs)

    def set_memory(self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._runtime.set_memory(facts, args, kwargs)

    def mark(self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.marked(entering="enter" in facts.name)
        return self._runtime.mark(facts, args, kwargs)

    def marked(self, *, entering: bool) -> None:
        """A range of the profiler begins or ends: the outermost one when the step is over, also
        by an error, which no hook of an optimizer hears of."""
        self._depth += 1 if entering else -1
        if self.running and not self._depth:
            error = sys.exc_info()[1]
            if isinstance(error, OutOfBudget):
                self._failed(error)
            self.end()

    def end(self) -> None:
        """The step is over, and stays as it is."""
        self.running = False
        self._before.clear()
        self._contents.clear()

    def _failed(self, error: OutOfBudget) -> None:
        if not self._copies:
            error.add_note(
                f"This was amid {self._name}.step(), which took more than the time before: some "
                "weights have moved and others not. Load them and the optimizer's state anew"
            )
            return
        for home, copy in self._before.values():
            self._write_back(home, copy)
        for refill in self._contents:
            refill()

    def _write_back(self, home: torch.UntypedStorage, copy: Tensor) -> None:
        engine = self.driver.engine
        budget = engine.budget
        try:
            self._runtime.unseen(_COPY, whole(home), copy)
        except OutOfBudget:  # to have back what was made amid the step; here that must not matter
            engine.budget = float("inf")
            self._runtime.unseen(_COPY, whole(home), copy)
        finally:
            engine.budget = budget

    def _about_to_write(self, home: torch.UntypedStorage) -> None:
        address = home._cdata
        known = self._homes.get(address)
        if known is not None and known() is home and address not in self._before:
            self._before[address] = home, self._runtime.unseen(_CLONE, whole(home))


def tensors_kept_by(optimizer: Any) -> Iterator[Tensor]:
    """Its parameters, and its state."""
    for group in optimizer.param_groups:
        yield from _tensors_within(list(group.values()))
    yield from _tensors_within(list(optimizer.state.values()))


def _tensors_within(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers; of one that is made of others (a DTensor), those."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            yield from _tensors_within([getattr(value, name) for name in flatten()[0]])
    elif isinstance(value, dict):
        yield from _tensors_within(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_within(item)
