"""What an optimizer's step wrote is put back if it runs out of budget half way.

For steps of which nobody can say ahead what they take: those that call the program between two
writes (LBFGS), and those of optimizers that are not PyTorch's own. All copies are made before the
step begins, as far as there is room for them; they count, and go when the step is over. Where there
is no room they take no part of the budget: they are in an unnamed file, or on the host if the
weights are on a device. So a step needs no more than without copies.
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from contextlib import ExitStack
from typing import IO, Any, final

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.online._contents import PutBack, keep, put_back
from rekindle.pytorch.online._session import Runtime
from rekindle.pytorch.tensors import geometry_of, homes_of, whole

_CLONE, _COPY = torch.ops.aten.clone.default, torch.ops.aten.copy_.default


@final
class _Outside:
    """Bytes that are in no budget: in a file, or on the host."""

    def __init__(self, home: torch.UntypedStorage, file: IO[bytes]) -> None:
        """Copy the bytes of `home`.

        Raises:
            OSError: there is no room for it in the file.
        """
        self._on_host: torch.UntypedStorage | None = None
        if is_accelerator(home.device):
            self._on_host = home.cpu()
            return
        self._file = file
        self._at = file.seek(0, os.SEEK_END)
        home._write_file(file, True, True, 1)  # type: ignore[attr-defined]

    def read(self) -> torch.UntypedStorage:
        """Return the bytes in a new storage on the CPU."""
        if self._on_host is not None:
            return self._on_host
        self._file.seek(self._at)
        return torch.UntypedStorage._new_with_file(self._file, 1)  # type: ignore[attr-defined]


@final
class _Before:
    """What a storage had in it before the step."""

    def __init__(self, home: torch.UntypedStorage, copy: Tensor | _Outside) -> None:
        self._home = weakref.ref(home)
        self._device = home.device
        self._kept: torch.UntypedStorage | None = home
        self.copy: Tensor | _Outside = copy
        if isinstance(copy, _Outside):
            self.move_out(copy)

    def move_out(self, outside: _Outside) -> None:
        """From now on keep neither the storage nor a copy within the budget."""
        self.copy, self._kept = outside, None

    @property
    def alive(self) -> torch.UntypedStorage | None:
        """The storage, if anybody has it."""
        return self._home()

    def restored(self) -> torch.UntypedStorage:
        """Return the storage; one that died is made once more."""
        home = self._home()
        if home is None:
            assert isinstance(self.copy, _Outside)
            home = self._kept = self.copy.read().to(device=self._device)
            self._home = weakref.ref(home)
        return home


@final
class _Item:
    """A tensor in an optimizer's containers."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._alive = weakref.ref(tensor)
        self._geometry = geometry_of(tensor)
        self._before: _Before | None = None
        self.address = tensor.untyped_storage()._cdata

    def leave_to(self, before: _Before) -> None:
        """Keep the tensor no longer: what is in it is in `before`."""
        self._tensor, self._before = None, before

    def __call__(self) -> Tensor:
        tensor = self._alive()
        if tensor is None:
            assert self._before is not None
            tensor = self._geometry.of(self._before.restored())
        return tensor


@final
class Undo:
    """Copies all that one step of an optimizer might write, and puts it back if the step fails.

    Who needs the room of the copies asks for it (`move_copies_out`).
    """

    def __init__(self, runtime: Runtime, optimizer: Any, *, copies: bool) -> None:
        """Without `copies` nothing is put back; an error then says so."""
        self.driver = runtime.driver
        self.running = True
        self._runtime = runtime
        self._name = type(optimizer).__name__
        self._copies = copies
        self._depth = 1  # of ranges of the profiler: one is around every step
        self._before: dict[int, _Before] = {}
        self._items: list[_Item] = []
        self._file: IO[bytes] | None = None
        self._files = ExitStack()
        self._contents: list[PutBack] = []
        self.protect(optimizer)

    def protect(self, optimizer: Any) -> None:
        """What `optimizer` may write goes back as well, from what it is now."""
        if self._copies:
            self._contents.append(put_back(vars(optimizer), {}, self._item))
            kept = [optimizer.param_groups, *optimizer.state.values()]
            for home in homes_of(self.driver.tensors_within(kept)):
                if home._cdata not in self._before:
                    self._before[home._cdata] = _Before(home, self._copy_of(home))
            self._leave_items()

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
        self._items.clear()
        self._file = None
        self._files.close()

    def move_copies_out(self) -> bool:
        """Move all copies out of the budget; return whether any copy was in it."""
        moved = False
        for before in self._before.values():
            if isinstance(before.copy, Tensor):
                outside = self._outside(before.copy.untyped_storage())
                if outside is None:
                    break
                before.move_out(outside)
                moved = True
        self._leave_items()
        return moved

    def _item(self, value: Any) -> PutBack:
        """Return what returns `value`, an item of the optimizer's containers."""
        plain = type(value) is Tensor and value.layout is torch.strided
        if not plain or value.requires_grad or vars(value):
            return keep(value)
        item = _Item(value)
        self._items.append(item)
        return item

    def _leave_items(self) -> None:
        """Keep no tensor that can be made of what is outside of the budget."""
        for item in self._items:
            before = self._before.get(item.address)
            if before is not None and isinstance(before.copy, _Outside):
                item.leave_to(before)

    def _failed(self, error: OutOfBudget) -> None:
        if not self._copies:
            error.add_note(
                f"This was amid {self._name}.step(), which took more than the time before: some "
                "weights have moved and others not. Load them and the optimizer's state anew"
            )
            return
        for before in self._before.values():
            home = before.alive
            if home is not None:
                self._write_back(home, before.copy)
        for refill in self._contents:
            refill()

    def _write_back(self, home: torch.UntypedStorage, copy: Tensor | _Outside) -> None:
        engine = self.driver.engine
        budget = engine.budget

        def write() -> None:
            bytes_before = copy if isinstance(copy, Tensor) else whole(copy.read())
            self._runtime.unseen(_COPY, whole(home), bytes_before)

        try:
            write()
        except OutOfBudget:  # to have back what was made amid the step; here that must not matter
            engine.budget = float("inf")
            write()
        finally:
            engine.budget = budget

    def _copy_of(self, home: torch.UntypedStorage) -> Tensor | _Outside:
        """Copy `home` within the budget if nothing has to make way for that."""
        engine = self.driver.engine
        if engine.now().memory + home.nbytes() <= engine.budget:
            try:
                return self._clone(home)
            except OutOfBudget:  # some room is kept for small results
                self.driver.refused = None
        return self._outside(home) or self._clone(home)

    def _clone(self, home: torch.UntypedStorage) -> Tensor:
        copy: Tensor = self._runtime.unseen(_CLONE, whole(home))
        return copy

    def _outside(self, home: torch.UntypedStorage) -> _Outside | None:
        """Copy `home` out of the budget; None: there is no room for that."""
        try:
            if self._file is None:
                with ExitStack() as opened:
                    self._file = opened.enter_context(tempfile.TemporaryFile(buffering=0))
                    self._files = opened.pop_all()
            return _Outside(home, self._file)
        except OSError:
            return None
