"""Callbacks that the native core calls: they make errors, and handle events in Python.

The argument `number` identifies a `Driver`, the Python object of one budget. If that driver no
longer exists, the callback does nothing.
"""

from __future__ import annotations

from array import array
from copy import copy
from itertools import chain
from types import FunctionType
from typing import Any, final

import torch

from rekindle._errors import OutOfBudget, SwapFailed, Unsupported
from rekindle._types import Bytes
from rekindle.engine import NoRoom
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.native._driver import drivers
from rekindle.pytorch.native._higher import shown_name
from rekindle.pytorch.native._module import Core
from rekindle.pytorch.native._watched import WATCHING, watch_begins, watch_ends
from rekindle.pytorch.online import (
    leaves,
    out_of_budget,
    out_of_memory,
    owner_of_file,
    same_device,
)
from rekindle.pytorch.operators import (
    changed_size,
    collective_in_replay,
    foreign_input,
    gathered_input,
    lost_value,
    modified_input,
    recomputed_in_a_graph,
    resized_input,
    unseen_collective,
)


@final
class PythonCallbacks:
    """The object whose methods the native core (C++) calls.

    The core calls them from any thread, without its lock. A method that makes an error returns the
    error, and the core raises it.
    """

    full = torch.OutOfMemoryError  #: raised by PyTorch if the device has no memory left
    not_full = OutOfBudget  #: subclass of `full`, raised if the budget is too small

    def __init__(self, core: Core) -> None:
        self.core = core

    def out_of_budget(
        self,
        number: int,
        needed: Bytes,
        memory: Bytes,
        budget: Bytes,
        who: str,
        inside: Bytes,
        likely: Bytes,
        operands: Bytes,
    ) -> OutOfBudget:
        """Return the error for `needed` bytes that do not fit into the budget.

        Args:
            number: The driver.
            needed: The bytes that were requested.
            memory: The bytes in use.
            budget: The budget in bytes.
            who: The operator that made the request.
            inside: The part of the requested bytes that is the operator's workspace.
            likely: Bytes that probably suffice, if the workspace was never measured; else 0.
            operands: Bytes of the operator's arguments.
        """
        who = shown_name(who)
        driver = drivers.get(number)
        shortage = NoRoom(needed, memory, budget, None)
        if driver is None:  # the budget has ended, and the Python object of its run was freed
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
        error = out_of_budget(
            shortage,
            driver.snapshot(),
            who,
            evicted=driver.core.evicted_bytes(driver.handle),
            inside=inside,
            likely=likely,
            unevictable=None if driver.anything else operands,
            moves=driver.moves_state,
            sliceable=who in driver.sliceable,
        )
        error.__cause__ = None  # the same effect as `raise error from None`
        if driver.transfers is not None:
            driver.transfers.add_note_to(error)
        driver.refused = driver.operators_run, copy(error)
        driver.interrupted.expect()
        return error

    def device_full(self, number: int, said: str) -> torch.OutOfMemoryError:
        """Return the device's OOM error with the text `said`, and a note on what holds memory."""
        error = torch.OutOfMemoryError(said)
        driver = drivers.get(number)
        if driver is not None:
            error.add_note(out_of_memory(driver.snapshot()))
        return error

    def on_wrong_device(self, number: int, found: str) -> BaseException:
        """Return the error for a tensor on another device than the budget's."""
        try:
            same_device(drivers[number].device, torch.device(found))
        except Unsupported as error:
            return error
        raise AssertionError(f"{found} is where the budget is")

    def recomputed_in_a_graph(self, made_by: str) -> Unsupported:
        """Return the error for a recomputation during CUDA graph capture."""
        return recomputed_in_a_graph(made_by)

    def swap_failed(self, number: int, site: str) -> SwapFailed:
        """Return the error for a value without a recipe whose host copy cannot be read."""
        driver = drivers.get(number)
        transfers = None if driver is None else driver.transfers
        if transfers is None:
            return SwapFailed(
                f"{site} could not be read back from the host, and it cannot be recomputed"
            )
        return transfers.lost(site, moved=driver is not None and driver.moves_state)

    def changed_size(self, name: str, now: Bytes, before: Bytes) -> Unsupported:
        return changed_size(name, now, before)

    def resized_input(self, now: Bytes, before: Bytes) -> Unsupported:
        return resized_input(now, before)

    def gathered_input(self, nbytes: Bytes, changed: int) -> Unsupported:
        return gathered_input(nbytes, bool(changed))

    def lost_value(self, made_by: str, nbytes: Bytes, budget: Bytes) -> OutOfBudget:
        return lost_value(made_by, nbytes, budget)

    def modified_input(self, made_by: str, now: int, expected: int) -> RuntimeError:
        return modified_input(made_by, now, expected)

    def foreign_input(self, made_by: str) -> RuntimeError:
        return foreign_input(made_by)

    def unseen_collective(self, name: str) -> Unsupported:
        return unseen_collective(name)

    def collective_in_replay(self, name: str) -> Unsupported:
        return collective_in_replay(name)

    def watch_begins(self, name: str) -> str:
        return watch_begins(name)

    def watch_ends(self, read: str) -> str:
        return watch_ends(read)

    def unseen_by_python(self, name: str) -> Unsupported:
        """Return the error for an operator in a dispatch mode, which needs torch 2.13."""
        return Unsupported(
            f"{name} ran inside a dispatch mode or on a tensor subclass, whose operators Rekindle "
            f"cannot see with torch {torch.__version__}; write pip install 'torch>=2.13'"
        )

    def gone(self) -> None:
        """Undo the replacement of `ctx.saved_tensors` (`Leaves`) if all drivers were freed."""
        leaves.deactivate(self.core.drivers_alive)

    def owner_of_file(self, name: str) -> int:
        """Return whose code is in a file: 0 Python's or torch's, 1 a library's, 2 the user's."""
        return ("nobody", "library", "user").index(owner_of_file(name))

    def segments(self, number: int) -> list[bytes]:
        """Return the blocks of each segment of the device's allocator.

        Each block is three 64-bit numbers: address, bytes, and 1 if the block is in use.
        """
        driver = drivers.get(number)
        found = () if driver is None else accelerator.segments(driver.device)
        return [array("q", chain.from_iterable(segment)).tobytes() for segment in found]

    def peak(self, number: int) -> None:
        """Store a snapshot at a new peak of memory. Called while source lines are recorded."""
        driver = drivers.get(number)
        if driver is not None:
            driver.peak.look()

    def sample(self, number: int) -> None:
        """Collect the samples of memory in use that the engine took."""
        driver = drivers.get(number)
        if driver is not None:
            driver.steps.sample()

    def losses(self, number: int) -> None:
        """Warn if recomputation takes more time than the computation itself."""
        driver = drivers.get(number)
        if driver is not None:
            driver.warn_of_losses()

    def owners(self, number: int) -> None:
        """Register all parameters of the running model, because an operator read one of them."""
        driver = drivers.get(number)
        if driver is not None:
            driver.meet_owners()

    def places(self, number: int, operators: int) -> None:
        """Record the current source line of the program for the latest operators."""
        driver = drivers.get(number)
        if driver is not None:
            driver.noted(operators)

    def plans(self, number: int, op_id: int) -> None:
        """Load learned plans of steps whose first operator is `op_id`."""
        driver = drivers.get(number)
        if driver is not None and driver.watcher is not None:
            driver.watcher.begins(op_id)

    def all_threads_are_known(self, number: int) -> bool:
        """Return True if each thread was started within the budget or uses no tensors."""
        driver = drivers.get(number)
        held = None if driver is None else driver.held
        return held is not None and held.all_threads_are_known()

    def move_copies_out(self, number: int) -> bool:
        """Move the copies that could undo an optimizer's step out of the budget's memory.

        Returns:
            True if that freed memory of the budget.
        """
        driver = drivers.get(number)
        undo = None if driver is None else driver.undo
        return undo is not None and undo.move_copies_out()

    def unpack(self, handle: object) -> torch.Tensor:
        """Return the saved tensor of `handle`. Compiled autograd calls this to read the value."""
        return self.core.unpack(handle)

    def range(self, number: int, ends: int) -> None:
        """Record that a profiler range begins or ends (`ends`); it may be an optimizer's step."""
        driver = drivers.get(number)
        if driver is not None and driver.undo is not None:
            driver.undo.marked(entering=not ends)
            driver.undo_no_more()


def _untraced(kind: type[Any]) -> None:
    """Keep Dynamo from tracing the methods of `kind`, and all functions that they call.

    The core also calls them while compiled code runs, when Dynamo traces each Python function that
    begins.
    """
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    skip = frames._FrameAction.SKIP
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))


for each in (PythonCallbacks, *WATCHING):
    _untraced(each)
