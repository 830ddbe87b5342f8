"""What the native core asks of Python: errors in words for its numbers, and a look at each peak."""

from __future__ import annotations

from array import array
from copy import copy
from itertools import chain
from typing import Any, final
from weakref import WeakValueDictionary

import torch

from rekindle._errors import OutOfBudget, SwapFailed, Unsupported
from rekindle._types import Bytes
from rekindle.engine import NoRoom
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.native._higher import shown_name
from rekindle.pytorch.online import (
    leaves,
    out_of_budget,
    out_of_memory,
    owner_of_file,
    same_device,
)
from rekindle.pytorch.operators import (
    changed_size,
    foreign_input,
    modified_input,
    recomputed_in_a_graph,
    resized_input,
    unseen_collective,
)

#: By the number that the core knows them by.
drivers: WeakValueDictionary[int, Any] = WeakValueDictionary()


@final
class Answers:
    """Its methods are called from any thread, without the core's lock. Errors are returned."""

    full = torch.OutOfMemoryError  #: what Python says where a device has no more memory,
    not_full = OutOfBudget  #: but for what it says where the budget has none

    def __init__(self, core: Any) -> None:
        self.core = core

    def out_of_budget(
        self, number: int, needed: Bytes, memory: Bytes, budget: Bytes, who: str
    ) -> OutOfBudget:
        who = shown_name(who)
        driver = drivers.get(number)
        shortage = NoRoom(needed, memory, budget, None)
        if driver is None:  # the context is over, and nobody has its `run` any more
            return OutOfBudget(
                str(shortage),
                needed=needed,
                budget=budget,
                held={},
                smallest_budget=memory + needed,
                worth_trying=memory + needed,
                operator=who,
                where="",
            )
        evicted = driver.core.evicted_bytes(driver.handle)
        error = out_of_budget(shortage, driver.snapshot(), who, evicted)
        error.__cause__ = None  # as raised from nothing
        if driver.transfers is not None:
            driver.transfers.add_note_to(error)
        driver.refused = driver.operators_run, copy(error)
        return error

    def device_full(self, number: int, said: str) -> torch.OutOfMemoryError:
        error = torch.OutOfMemoryError(said)
        driver = drivers.get(number)
        if driver is not None:
            error.add_note(out_of_memory(driver.snapshot()))
        return error

    def met_elsewhere(self, number: int, met: str) -> BaseException:
        try:
            same_device(drivers[number].device, torch.device(met))
        except Unsupported as error:
            return error
        raise AssertionError(f"{met} is where the budget is")

    def recomputed_in_a_graph(self, made_by: str) -> Unsupported:
        return recomputed_in_a_graph(made_by)

    def swap_failed(self, number: int, site: str) -> SwapFailed:
        driver = drivers.get(number)
        transfers = None if driver is None else driver.transfers
        if transfers is None:
            return SwapFailed(f"{site} could not be read back, nor can it be computed again")
        return transfers.lost(site)

    def changed_size(self, name: str, now: Bytes, before: Bytes) -> Unsupported:
        return changed_size(name, now, before)

    def resized_input(self, now: Bytes, before: Bytes) -> Unsupported:
        return resized_input(now, before)

    def modified_input(self, made_by: str, now: int, expected: int) -> RuntimeError:
        return modified_input(made_by, now, expected)

    def foreign_input(self, made_by: str) -> RuntimeError:
        return foreign_input(made_by)

    def unseen_collective(self, name: str) -> Unsupported:
        return unseen_collective(name)

    def unseen_by_python(self, name: str) -> Unsupported:
        """With this torch modes and subclasses come after the core, which does not see them."""
        return Unsupported(
            f"{name} ran within a dispatch mode or on a tensor subclass, and what those do a "
            f"budget cannot see with torch {torch.__version__}: install torch 2.13 or a later one"
        )

    def gone(self, number: int) -> None:
        """No handle of that driver is left."""
        leaves.stay_away()

    def owner_of_file(self, name: str) -> int:
        """As the core has them: whether code in it is nobody's, a library's, or the user's."""
        return ("nobody", "library", "user").index(owner_of_file(name))

    def segments(self, number: int) -> list[bytes]:
        """Return the blocks of each segment of the device: address, bytes, whether it is used."""
        driver = drivers.get(number)
        found = () if driver is None else accelerator.segments(driver.device)
        return [array("q", chain.from_iterable(segment)).tobytes() for segment in found]

    def peak(self, number: int) -> None:
        driver = drivers.get(number)
        if driver is not None:
            driver.peak.look()

    def sample(self, number: int) -> None:
        driver = drivers.get(number)
        if driver is not None:
            driver.steps.sample()

    def losses(self, number: int) -> None:
        driver = drivers.get(number)
        if driver is not None:
            driver.warn_of_losses()

    def owners(self, number: int) -> None:
        driver = drivers.get(number)
        if driver is not None:
            driver.meet_owners()

    def places(self, number: int, operators: int) -> None:
        driver = drivers.get(number)
        if driver is not None:
            driver.noted(operators)

    def lessons(self, number: int, met: int) -> None:
        driver = drivers.get(number)
        if driver is not None and driver.watcher is not None:
            driver.watcher.begins(met)

    def all_threads_are_known(self, number: int) -> bool:
        driver = drivers.get(number)
        lending = None if driver is None else driver.lending
        return lending is not None and lending.all_threads_are_known()

    def move_copies_out(self, number: int) -> bool:
        """Return whether copies from which a step can be undone have left the budget."""
        driver = drivers.get(number)
        undo = None if driver is None else driver.undo
        return undo is not None and undo.move_copies_out()

    def unpack(self, handle: object) -> torch.Tensor:
        """Return what autograd saved: compiled autograd calls this where it needs the value."""
        return self.core.unpack(handle)

    def range(self, number: int, ends: int) -> None:
        driver = drivers.get(number)
        if driver is not None and driver.undo is not None:
            driver.undo.marked(entering=not ends)
            driver.undo_no_more()
