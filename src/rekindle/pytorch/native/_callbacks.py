"""Callbacks of the native core: errors in words, and events that Python handles.

The core passes the id of a driver. A driver that no longer exists is ignored.
"""

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

#: All drivers, by the id that the core uses.
drivers: WeakValueDictionary[int, Any] = WeakValueDictionary()


@final
class PythonCallbacks:
    """The object whose methods the core calls.

    Calls come from any thread, without the core's lock. Methods that make an error return it, and
    the core raises it.
    """

    full = torch.OutOfMemoryError  #: raised by PyTorch if the device has no memory left
    not_full = OutOfBudget  #: a subclass that means the budget, not the device

    def __init__(self, core: Any) -> None:
        self.core = core

    def out_of_budget(
        self, number: int, needed: Bytes, memory: Bytes, budget: Bytes, who: str
    ) -> OutOfBudget:
        """Return the error for a request that does not fit into the budget."""
        who = shown_name(who)
        driver = drivers.get(number)
        shortage = NoRoom(needed, memory, budget, None)
        if driver is None:  # the context is over, and its `run` is freed
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
        error.__cause__ = None  # as with `raise error from None`
        if driver.transfers is not None:
            driver.transfers.add_note_to(error)
        driver.refused = driver.operators_run, copy(error)
        return error

    def device_full(self, number: int, said: str) -> torch.OutOfMemoryError:
        """Return the device's OOM error `said`, with a note about who holds memory."""
        error = torch.OutOfMemoryError(said)
        driver = drivers.get(number)
        if driver is not None:
            error.add_note(out_of_memory(driver.snapshot()))
        return error

    def met_elsewhere(self, number: int, met: str) -> BaseException:
        """Return the error for a tensor on another device than the budget's."""
        try:
            same_device(drivers[number].device, torch.device(met))
        except Unsupported as error:
            return error
        raise AssertionError(f"{met} is where the budget is")

    def recomputed_in_a_graph(self, made_by: str) -> Unsupported:
        """Return the error for a recomputation during CUDA graph capture."""
        return recomputed_in_a_graph(made_by)

    def swap_failed(self, number: int, site: str) -> SwapFailed:
        """Return the error for a value whose copy cannot be read back and that has no recipe."""
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
        """Return the error for an operator in a dispatch mode, unseen before torch 2.13."""
        return Unsupported(
            f"{name} ran within a dispatch mode or on a tensor subclass, and what those do a "
            f"budget cannot see with torch {torch.__version__}: install torch 2.13 or a later one"
        )

    def gone(self, number: int) -> None:
        """Note that no handle of a driver is left."""
        leaves.stay_away()

    def owner_of_file(self, name: str) -> int:
        """Return whose code is in a file: 0 nobody's, 1 a library's, 2 the user's."""
        return ("nobody", "library", "user").index(owner_of_file(name))

    def segments(self, number: int) -> list[bytes]:
        """Return the blocks of each memory segment of the device: address, bytes, 1 if in use."""
        driver = drivers.get(number)
        found = () if driver is None else accelerator.segments(driver.device)
        return [array("q", chain.from_iterable(segment)).tobytes() for segment in found]

    def peak(self, number: int) -> None:
        """Take a snapshot at a new peak, with places."""
        driver = drivers.get(number)
        if driver is not None:
            driver.peak.look()

    def sample(self, number: int) -> None:
        """Collect samples of the memory."""
        driver = drivers.get(number)
        if driver is not None:
            driver.steps.sample()

    def losses(self, number: int) -> None:
        """Warn if recomputation takes most of the time."""
        driver = drivers.get(number)
        if driver is not None:
            driver.warn_of_losses()

    def owners(self, number: int) -> None:
        """Register the rest of a model of which a weight was seen."""
        driver = drivers.get(number)
        if driver is not None:
            driver.meet_owners()

    def places(self, number: int, operators: int) -> None:
        """Record the place in the program of the latest operators."""
        driver = drivers.get(number)
        if driver is not None:
            driver.noted(operators)

    def plans(self, number: int, met: int) -> None:
        """Load plans of steps that begin with operator `met`, if there are any."""
        driver = drivers.get(number)
        if driver is not None and driver.watcher is not None:
            driver.watcher.begins(met)

    def all_threads_are_known(self, number: int) -> bool:
        """Return True if it is known which threads may read the program's tensors."""
        driver = drivers.get(number)
        lending = None if driver is None else driver.lending
        return lending is not None and lending.all_threads_are_known()

    def move_copies_out(self, number: int) -> bool:
        """Move the copies that undo a step out of the budget. Return True if any was in it."""
        driver = drivers.get(number)
        undo = None if driver is None else driver.undo
        return undo is not None and undo.move_copies_out()

    def unpack(self, handle: object) -> torch.Tensor:
        """Return a saved tensor. Compiled autograd calls this when it needs the value."""
        return self.core.unpack(handle)

    def range(self, number: int, ends: int) -> None:
        """Note that a range of the profiler begins or ends."""
        driver = drivers.get(number)
        if driver is not None and driver.undo is not None:
            driver.undo.marked(entering=not ends)
            driver.undo_no_more()
