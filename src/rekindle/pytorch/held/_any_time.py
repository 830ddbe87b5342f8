"""What the program holds is evicted like everything else (`evict="anything"`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle.engine import Storage
from rekindle.pytorch.held._shells import Shells
from rekindle.pytorch.held._threads import Threads
from rekindle.pytorch.online import LONGEST_CHAIN, Driver, given_away, hand_out, may_forget
from rekindle.pytorch.operators import Recipe
from rekindle.pytorch.tensors import UNSEEN

#: What has lengths and indices stays: functions that are composed of operators (`tensor_split`,
#: `pad_packed_sequence`) read it before any of them runs.
LENGTHS = (torch.int64, torch.int32)
#: With grad mode off: looked at is whether batches that the program has dropped take a quarter of
#: the budget, for they are kept only to recompute from.
OPERATORS_BETWEEN_LOOKS = 16


@final
class AnyTime(Shells):
    """What the program holds may be let go at any time."""

    def __init__(self, driver: Driver, record_without_grad: Callable[[bool], None]) -> None:
        """`record_without_grad(False)`: one reason more that nothing is recorded with grad mode
        off; `True`: one less."""
        super().__init__(driver)
        self._record_without_grad = record_without_grad
        self.threads = Threads()
        self._unpacked: list[Storage] = []  # what autograd works with, and for which node
        self._node = 0
        self._worked_with: list[Storage] = []  # made or asked for in the backward pass going on
        self._paused = False
        self._until_look = OPERATORS_BETWEEN_LOOKS

    def _about_to_bring(self) -> None:
        if self._unpacked:
            self._nodes_change()
        if self._worked_with and not _in_backward():
            self._keep_what_is_left()
        if self.threads.changed():
            self._pause(bool(self.threads.unknown))

    @contextmanager
    def present_in_forward(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Likewise. A function of one's own may write by kernels that nobody sees, and moves the
        version of what it wrote only when it is over: without autograd it leaves no recipes."""
        self._record_without_grad(False)
        try:
            with self.present(tensors):
                yield
        finally:
            self._record_without_grad(True)

    present_in_backward = Shells.present  # what autograd saved stays anyway (`stays`)

    def keep(self, tensor: Tensor) -> None:
        """Its address leaves PyTorch: what `tensor` is in is there, and never let go again."""
        with self.lock:
            self.done(self.bring((tensor,)))
            storage = self._storage_of(tensor)
            if storage is not None and not storage.pinned:
                self._driver.pin(storage)

    def hand_out(self, tensor: Tensor) -> None:
        """Others get the memory of `tensor`, and may write there: it is there, and stays."""
        with self.present((tensor,)):
            hand_out(partial(given_away, self._driver), tensor)

    def made(self, tensors: Iterable[Tensor]) -> None:
        """An operator of the program made or wrote `tensors`: those too can be let go.

        Gradients only if nothing else is left. To have one again takes what the backward pass is
        about to do without, and those before it: sums over time, as large as the weights and each
        the next one's operand, were let go first and computed again from the start at every step.
        """
        without_grad = not torch.is_grad_enabled()
        backward = _in_backward()
        if without_grad and not backward:
            self._look_at_sources()
        for tensor in tensors:
            storage = self._storage_of(tensor)
            if storage is None or storage.returns or self._paused:
                continue
            if storage.payload.flags & UNSEEN:
                continue
            if tensor.dtype in LENGTHS:
                self._driver.pin(storage)
                continue
            if without_grad and self._hangs_on_too_much(storage):
                self._driver.seal(storage)
                continue
            gradient = without_grad and backward
            self._driver.engine.let_return(storage, True, last=gradient)
            if gradient:
                self._worked_with.append(storage)

    def stays(self, tensor: Tensor) -> None:
        """Autograd got `tensor` for the node that it is at; kernels may read it unseen."""
        with self.lock:
            self._look_after()
            storage = self._storage_of(tensor)
            if storage is not None and storage.returns:
                self._nodes_change()
                self._driver.engine.let_return(storage, False)
                self._unpacked.append(storage)
                if _in_backward():
                    self._worked_with.append(storage)

    def _keep_what_is_left(self) -> None:
        """After a backward pass what is left of it stays: a gradient, or a state that goes on to
        the next batch, would keep all that it could be computed again from, batch after batch."""
        driver = self._driver
        left: list[Storage] = []
        for storage in dict.fromkeys(self._worked_with):
            if storage.held and storage.makers and storage.replayable:
                driver.settle()
                if not storage.resident:
                    driver.use(storage)
                driver.engine.let_return(storage, False)
                left.append(storage)
        self._worked_with.clear()
        driver.engine.reserve.clear()
        for storage in left:
            if may_forget(storage) and driver.whole is None:
                driver.seal(storage)
        self._look_after()

    def _nodes_change(self) -> None:
        node = id(torch._C._current_autograd_node())
        if node != self._node:
            self._node = node
            for storage in self._unpacked:
                if not self._paused:
                    self._driver.engine.let_return(storage, True)
            self._unpacked.clear()

    # -- limits ---------------------------------------------------------------------------------

    def _pause(self, pause: bool) -> None:
        """A thread that nothing is known of may be reading anything that the program holds."""
        if pause != self._paused:
            self._paused = pause
            for storage in self._driver.engine.storages:
                known = storage.replayable and not storage.payload.flags & UNSEEN
                if known and storage.makers[0].payload is not None:
                    self._driver.engine.let_return(storage, not pause)

    @staticmethod
    def _hangs_on_too_much(storage: Storage) -> bool:
        call = storage.makers[0]
        recipe: Recipe = call.payload
        recipe.depth = 1 + max((_depth(value.storage) for value in call.inputs), default=0)
        return recipe.depth > LONGEST_CHAIN

    def give_up_sources(self) -> bool:
        """Lets go of what only recomputation needs, once what needs it is there; whether it helped.

        From then on what was made from it is kept.
        """
        driver = self._driver
        if driver.whole is not None:  # a trace cannot say until when others could be had again
            return False
        with self.lock:
            before = driver.engine.memory
            for source in self._dead_sources():
                try:
                    driver.bring(partial(driver.engine.forget, source))
                except OutOfBudget:
                    continue
                driver.disown(source)
            self._look_after()
            driver.settle()
            return driver.engine.memory < before

    def _dead_sources(self) -> list[Storage]:
        """What the program has dropped, and cannot be recomputed, but others from it."""
        is_held = self._driver.table.is_held
        return [
            storage
            for storage in self._driver.engine.storages
            if storage.consumers and storage.resident and not storage.replayable
            if not storage.references and not is_held(storage)
        ]

    def _look_at_sources(self) -> None:
        """Too late, there would be no room to bring back what was made from them."""
        engine = self._driver.engine
        self._until_look -= 1
        if self._until_look <= 0:
            self._until_look = OPERATORS_BETWEEN_LOOKS
            if 2 * engine.memory > engine.budget:
                nbytes = sum(source.nbytes for source in self._dead_sources())
                if 4 * nbytes > engine.budget:
                    self.give_up_sources()

    # -- the end --------------------------------------------------------------------------------

    def _about_to_empty(self) -> None:
        self.threads.assert_known()

    def _before_all_is_back(self) -> None:
        self._driver.write_no_more()
        for storage in self._driver.engine.storages:
            if storage.returns and storage.resident:
                self._driver.engine.let_return(storage, False)

    def _after_all_is_back(self) -> None:
        """What was made with grad mode off stays from now on: how to make it is of no use."""
        driver = self._driver
        for storage in driver.engine.storages:
            recipe = storage.makers[0].payload if storage.makers else None
            plain = type(recipe) is Recipe and not recipe.grad_mode
            if plain and storage.held and may_forget(storage):
                driver.seal(storage)
        for storage in driver.engine.storages:
            if storage.dead and storage.resident and storage.replayable:
                driver.engine.lock(storage)
                driver.perform(driver.engine.unlock(storage))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _depth(storage: Storage) -> int:
    if not storage.replayable:
        return 0  # it stays: nothing is computed again to have it
    recipe: Any = storage.makers[0].payload
    return getattr(recipe, "depth", 0)
