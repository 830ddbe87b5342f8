"""Undo an optimizer's step that runs out of budget half way.

This is needed if the memory of a step cannot be predicted: for LBFGS, which calls the program
between two writes, and for optimizers that are not PyTorch's own. All tensors that the step may
write are copied before the step begins. The copies count toward the budget, and are freed at the
end of the step.

If the budget has no room for a copy, the copy is made in an unnamed file, or in host memory if the
weights are on a device. So a step needs no more of the budget than without copies.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any, final

import torch
from torch import Tensor, nn

from rekindle._errors import OutOfBudget
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.native import Runtime
from rekindle.pytorch.online import PutBack, put_back
from rekindle.pytorch.tensors import geometry_of, homes_of, whole

_CLONE, _COPY = torch.ops.aten.clone.default, torch.ops.aten.copy_.default
_EQUAL = torch.ops.aten.equal.default


@final
class _Outside:
    """A copy of a storage outside of the budget: in a file, or in host memory."""

    def __init__(self, home: torch.UntypedStorage, file: IO[bytes]) -> None:
        """Copy the bytes of the storage `home`.

        Args:
            home: The storage to copy.
            file: The file to append to, for a storage on the CPU.

        Raises:
            OSError: The file has no room.
        """
        self._on_host: torch.UntypedStorage | None = None
        if is_accelerator(home.device):
            self._on_host = home.cpu()
            return
        self._file = file
        self._at = file.seek(0, os.SEEK_END)
        home._write_file(file, True, True, 1)  # type: ignore[attr-defined]

    def read(self) -> torch.UntypedStorage:
        """Return the copied bytes in a storage on the CPU."""
        if self._on_host is not None:
            return self._on_host
        self._file.seek(self._at)
        return torch.UntypedStorage._new_with_file(self._file, 1)  # type: ignore[attr-defined]


@final
class _Before:
    """A storage that the step may write, and the copy of its contents before the step."""

    def __init__(self, home: torch.UntypedStorage, copy: Tensor | _Outside) -> None:
        self._home = weakref.ref(home)
        self._device = home.device
        self._kept: torch.UntypedStorage | None = home
        self.copy: Tensor | _Outside = copy
        if isinstance(copy, _Outside):
            self.move_out(copy)

    def move_out(self, outside: _Outside) -> None:
        """Replace the copy by `outside`, and stop keeping the storage alive."""
        self.copy, self._kept = outside, None

    @property
    def alive(self) -> torch.UntypedStorage | None:
        """The storage, or None if it was freed."""
        return self._home()

    def restored(self) -> torch.UntypedStorage:
        """Return the storage to restore. If it was freed, make a new one from the copy."""
        home = self._home()
        if home is None:
            assert isinstance(self.copy, _Outside)
            home = self._kept = self.copy.read().to(device=self._device)
            self._home = weakref.ref(home)
        return home


@final
class _Item:
    """A tensor in an optimizer's state or settings, to be put back after a failed step."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._alive = weakref.ref(tensor)
        self._geometry = geometry_of(tensor)
        self._before: _Before | None = None
        self.address = tensor.untyped_storage()._cdata

    def leave_to(self, before: _Before) -> None:
        """Stop keeping the tensor alive, because it can be restored from `before`."""
        self._tensor, self._before = None, before

    def __call__(self) -> Tensor:
        """Return the tensor. If it was freed, make a new one from the copy."""
        tensor = self._alive()
        if tensor is None:
            assert self._before is not None
            tensor = self._geometry.of(self._before.restored())
        return tensor


@final
class Undo:
    """Copies of everything that one step of an optimizer may write.

    If the step fails, the copies are written back into the weights and the state. If memory gets
    short, the copies move out of the budget (`move_copies_out`).
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        over: Callable[[], None],
        *,
        copies: bool,
    ) -> None:
        """Copy all tensors that the step of `optimizer` may write.

        Args:
            runtime: The run.
            optimizer: The optimizer.
            over: Called at the end of the step, also of one that failed.
            copies: If False, make no copies. A failed step is then not undone, and its error says
                so.
        """
        self.driver = runtime.driver
        self.running = True
        self._runtime = runtime
        self._name = type(optimizer).__name__
        self._copies = copies
        self._over = over
        self._thread = threading.get_ident()
        # Nesting depth of profiler ranges, to find the end of a step: PyTorch makes a range for
        # each step.
        self._depth = 1
        self._before: dict[int, _Before] = {}
        self._items: list[_Item] = []
        # Tensors of the optimizer that live on their own, to get their memory of before back if the
        # step assigns their `data`.
        self._tensors: list[tuple[weakref.ref[Tensor], _Item]] = []
        self._file: IO[bytes] | None = None
        self._files = ExitStack()
        self._contents: list[PutBack] = []
        self.protect(optimizer)

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy all tensors of `optimizer`, so that its step, which begins now, can be undone.

        An optimizer may call the step of another one. Then this object undoes both.
        """
        if self._copies:
            self._contents.append(put_back(vars(optimizer), {}, self._item))
            weights = self.driver.core.tensors_within(optimizer.param_groups)
            gradients = [each.grad for each in weights if each.grad is not None]
            kept = [vars(optimizer), *optimizer.state.values(), gradients]
            tensors = self.driver.core.tensors_within(kept)
            for home in homes_of(tensors):
                if home._cdata not in self._before:
                    self._before[home._cdata] = _Before(home, self._copy_of(home))
            for tensor in tensors:
                if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
                    self._tensors.append((weakref.ref(tensor), _Item(tensor.data)))
            self._leave_items()

    def marked(self, *, entering: bool) -> None:
        """Record that a profiler range of a thread begins or ends.

        Each step is a range, so the end of the outermost one is the end of the step. That includes
        a step that fails, for which optimizers have no hook.
        """
        if threading.get_ident() != self._thread:
            return
        self._depth += 1 if entering else -1
        if self.running and not self._depth:
            error = sys.exc_info()[1]
            if isinstance(error, OutOfBudget):
                self._failed(error)
            self.end()
            self._over()

    def end(self) -> None:
        """Drop all copies, because the step has ended."""
        self.running = False
        self._before.clear()
        self._contents.clear()
        self._items.clear()
        self._tensors.clear()
        self._file = None
        self._files.close()

    def move_copies_out(self) -> bool:
        """Move all copies out of the budget. Return True if that freed memory of the budget."""
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
        """Return a function that returns `value`, an item of the optimizer's state or settings.

        If `value` is a tensor of which a copy exists, the function can also make it again.
        """
        plain = type(value) is Tensor and value.layout is torch.strided
        if not plain or value.requires_grad or vars(value):
            return lambda: value
        item = _Item(value)
        self._items.append(item)
        return item

    def _leave_items(self) -> None:
        """Stop keeping tensors alive that can be restored from a copy outside of the budget."""
        for item in [*self._items, *(item for _, item in self._tensors)]:
            before = self._before.get(item.address)
            if before is not None and isinstance(before.copy, _Outside):
                item.leave_to(before)

    def _failed(self, error: OutOfBudget) -> None:
        """Restore weights and state, or add a note to `error` if there are no copies."""
        if not self._copies:
            error.add_note(
                f"{self._name}.step() needed more memory than in earlier steps and failed "
                "part-way: some weights are updated and others are not. Load a checkpoint of the "
                "weights and of the optimizer's state"
            )
            return
        for before in self._before.values():
            home = before.alive
            if home is not None:
                self._write_back(home, before.copy)
        for alive, item in self._tensors:
            tensor = alive()
            if tensor is not None and tensor.untyped_storage()._cdata != item.address:
                tensor.data = item()
        for refill in self._contents:
            refill()

    def _write_back(self, home: torch.UntypedStorage, copy: Tensor | _Outside) -> None:
        """Write `copy`, the contents from before the step, back into the storage `home`."""

        def write() -> None:
            bytes_before = copy if isinstance(copy, Tensor) else whole(copy.read())
            if self.driver.moves_state:
                self.driver.about_to_write_unseen(home)  # which makes it resident
            bytes_now = whole(home)
            # Before a write, evicted values that need the old contents would be recomputed.
            if not self._runtime.unseen(_EQUAL, bytes_now, bytes_before):
                self._runtime.unseen(_COPY, bytes_now, bytes_before)

        try:
            write()
        except OutOfBudget:
            # Results of the failed step may be evicted, and may exceed the budget when recomputed.
            # Restore them without a limit.
            with self.driver.engine.without_limit():
                write()

    def _copy_of(self, home: torch.UntypedStorage) -> Tensor | _Outside:
        """Copy the storage `home`: within the budget if it fits without evicting, else outside."""
        engine = self.driver.engine
        budget = engine.budget
        if self.driver.moves_state:
            # The storage may be on the host. Beside it, a copy could take room that the step needs.
            self.driver.about_to_write_unseen(home)
            return self._outside(home) or self._clone(home)
        if budget is None or engine.now().memory + home.nbytes() <= budget:
            try:
                return self._clone(home)
            # The budget has room for the copy, but that room is reserved for small results.
            except OutOfBudget:
                self.driver.refused = None
        return self._outside(home) or self._clone(home)

    def _clone(self, home: torch.UntypedStorage) -> Tensor:
        """Copy the storage `home` into a tensor that counts towards the budget."""
        copy: Tensor = self._runtime.unseen(_CLONE, whole(home))
        return copy

    def _outside(self, home: torch.UntypedStorage) -> _Outside | None:
        """Copy the storage `home` outside of the budget. Return None if the disk has no room."""
        try:
            if self._file is None:
                with ExitStack() as opened:
                    self._file = opened.enter_context(tempfile.TemporaryFile(buffering=0))
                    self._files = opened.pop_all()
            return _Outside(home, self._file)
        except OSError:
            return None
