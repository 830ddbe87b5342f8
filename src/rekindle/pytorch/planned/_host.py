"""The host of planned models: their graphs call it to swap values out and in.

A forward graph can hand only tensors to its backward graph. So a copy on the host is named by a
*ticket*: a tensor with one number. The copy is freed once nothing refers to the ticket's storage.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from rekindle._errors import SwapFailed, Unsupported
from rekindle._types import Bytes, StorageId
from rekindle._units import format_bytes
from rekindle.policies import Swap
from rekindle.pytorch.swap import Copies, HostMemory, Transfers
from rekindle.pytorch.tensors import Geometry, geometry_of, privately

CALL = "rekindle.plan(model, x, {})"
# Fraction of the measured bandwidth that plans may use. The program may need the rest itself.
SLACK = 0.9


def host_for(
    tensors: Sequence[Tensor],
    swap: str | int | Swap,
    directory: str | os.PathLike[str] | None,
    budget: Bytes | None,
) -> Host:
    """Open the host memory for the plan of a model.

    Args:
        tensors: The parameters, buffers and inputs of the model.
        swap: An amount of host memory, or a `Swap` with its bandwidths.
        directory: The folder of the swap file, for a model on the CPU.
        budget: The budget of the plan. The test transfers that measure the bandwidth use at most an
            eighth of it.

    Raises:
        InvalidBudget: The amount is not valid.
        Unsupported: Swapping is impossible on this device, or the model is on several devices.
    """
    devices = {each.device for each in tensors if each.device.type != "cpu"}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise Unsupported(
            f"{CALL.format('swap=...')}: got a model on {names}, wanted one device; leave out swap="
        )
    device = devices.pop() if devices else torch.device("cpu")
    copies, found = HostMemory(swap, directory, device, CALL).copies(budget)
    if not isinstance(swap, Swap):
        out, back = int(SLACK * found.out_bytes_per_s), int(SLACK * found.in_bytes_per_s)
        found = replace(found, out_bytes_per_s=max(1, out), in_bytes_per_s=max(1, back))
    return Host(copies, found)


@final
class Host:
    """The copies on the host of all planned graphs of one model.

    Graphs call `swap_out`, `evict`, `make_room`, `swap_in` and `arrive`, from any thread.

    Attributes:
        swap: The bandwidth that plans count on, and the limit of host memory.
    """

    def __init__(self, copies: Copies, swap: Swap) -> None:
        self.swap = swap
        self._copies = copies
        self._lock = threading.Lock()
        self._numbers = map(StorageId, itertools.count())
        self._tickets: WeakValueDictionary[int, _Ticket] = WeakValueDictionary()
        self._freed: deque[StorageId] = deque()  # host copies to which no ticket refers any more
        # copies to the host that nothing has waited for yet, with their bytes
        self._out: dict[StorageId, Bytes] = {}
        # copies from the host to the device that nothing has waited for yet
        self._back: set[StorageId] = set()
        # storages that the graph evicted while their copy to the host still runs
        self._leaving: set[StorageId] = set()
        # copies to the host that failed, each with the reason
        self._lost: dict[StorageId, str] = {}

    @property
    def transfers(self) -> Transfers:
        """The statistics of the transfers."""
        return self._copies.transfers

    @property
    def used(self) -> Bytes:
        """Bytes of copies on the host."""
        with self._lock:
            self._tidy()
            return self._copies.store.used

    # -- calls in graphs --------------------------------------------------------------------------

    def swap_out(self, site: str, *tensors: Tensor) -> Tensor:
        """Begin to copy the storage of `tensors` to the host.

        Args:
            site: The operator that made the storage, for error messages.
            *tensors: Tensors in one storage, which `swap_in` restores.

        Returns:
            The ticket of the copy: a tensor with one number, which identifies the copy.

        Raises:
            SwapFailed: The host has no room.
        """
        home = tensors[0].untyped_storage()
        with privately(), self._lock:
            self._tidy()
            number = next(self._numbers)
            begun = self._copies.write(number, home)
            if not begun:
                self._tidy(wait=True)
                begun = self._copies.write(number, home)
            geometries = tuple(map(geometry_of, tensors))
            ticket = _Ticket(self._freed, number, site, home.nbytes(), geometries)
            if not begun:
                raise ticket.failed("copied to the host", "there is no room for it")
            ticket.written = True
            self._out[number] = home.nbytes()
            self._tickets[number] = ticket
            return torch.frombuffer(ticket, dtype=torch.int64)

    def evict(self, ticket: Tensor) -> None:
        """Record that the graph freed the storage: its memory is free once the copy has ended."""
        with privately(), self._lock:
            self._leaving.add(StorageId(int(ticket)))
            self._tidy()

    def make_room(self, allowed: Bytes) -> None:
        """Wait until evicted storages whose copies still run take at most `allowed` bytes."""
        with privately(), self._lock:
            self._tidy()
            taken = sum(self._out[number] for number in self._leaving)
            # Wait in the order of the numbers, in which the copies began and end.
            for number in sorted(self._leaving):
                if taken <= allowed:
                    break
                taken -= self._out[number]
                self._finish_out(number)

    def swap_in(self, ticket: Tensor) -> Sequence[Tensor]:
        """Begin to copy a storage back from the host, into new memory of the device.

        Returns:
            Tensors in the new memory, with the geometry of those that `swap_out` was called with.
            Nothing may read them before `arrive`.

        Raises:
            SwapFailed: The copy on the host does not exist.
        """
        with privately(), self._lock:
            found = self._ticket_of(ticket)
            if found.number in self._out:
                self._finish_out(found.number)
            # If the last pass of the graph failed, it may have left this copy from the host
            # unfinished.
            if found.number in self._back:
                self._finish_back(found.number)
            why = self._lost.get(found.number, "")
            home = self._copies.store.new_home(found.nbytes)
            why = why or self._copies.read(found.number, home)
            if why:
                raise found.failed("read back", why)
            self._back.add(found.number)
            return [each.of(home) for each in found.tensors]

    def arrive(self, ticket: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Wait until `tensors`, results of `swap_in`, can be read, and return them.

        Raises:
            SwapFailed: The copy could not be read.
        """
        with privately(), self._lock:
            found = self._ticket_of(ticket)
            why = self._finish_back(found.number)
            if why:
                raise found.failed("read back", why)
            return tensors

    # -- the state of transfers and copies --------------------------------------------------------

    def _ticket_of(self, tensor: Tensor) -> _Ticket:
        found = self._tickets.get(int(tensor))
        if found is None:
            raise SwapFailed(
                "a value that a planned model swapped out cannot be found, because a "
                "saved-tensor hook (such as torch.autograd.graph.save_on_cpu) replaced the tensor "
                "that names its copy; run the planned model outside of that hook, or plan it "
                "without swap="
            )
        return found

    def _finish_out(self, number: StorageId) -> None:
        """Wait for a copy to the host. If it failed, keep the reason until the copy is needed."""
        why, *_ = self._copies.wait(number)
        del self._out[number]
        self._leaving.discard(number)
        if why:
            self._lost[number] = why

    def _finish_back(self, number: StorageId) -> str:
        """Wait for a copy from the host. Return why it failed, or an empty text."""
        self._back.remove(number)
        why, *_ = self._copies.wait(number)
        return why

    def _tidy(self, *, wait: bool = False) -> None:
        """Record which copies have ended, and free those on the host that nothing needs.

        Args:
            wait: Wait for running copies that nothing needs, so that they can be freed.
        """
        for number in list(self._out):
            if not self._copies.ended(number):
                # Copies end in the order in which they began, so the later ones are still running
                # too.
                break
            self._finish_out(number)
        self._leaving &= self._out.keys()
        for _ in range(len(self._freed)):
            number = self._freed.popleft()
            running = number in self._out or number in self._back
            if running and not (wait or self._copies.ended(number)):
                self._freed.append(number)
                continue
            if number in self._out:
                self._finish_out(number)
            if number in self._back:
                self._finish_back(number)
            self._lost.pop(number, None)
            self._copies.release(number)


def is_kept(node: fx.Node) -> bool:
    """Return True if `node` calls the host for its effect, not for its result."""
    target = node.target
    effects = Host.swap_out, Host.evict, Host.make_room
    return getattr(target, "__func__", None) in effects


@final
class _Ticket(bytearray):
    """The memory of a ticket: the number of a copy. It lives as long as the storage of the ticket.

    Attributes:
        number: The number of the copy.
        nbytes: The size of the copied storage.
        tensors: The geometries of the tensors in that storage.
        written: True once the copy exists on the host, and must be freed.
    """

    def __init__(
        self,
        freed: deque[StorageId],
        number: StorageId,
        site: str,
        nbytes: Bytes,
        tensors: tuple[Geometry, ...],
    ) -> None:
        super().__init__(number.to_bytes(8, "little"))
        self._freed = freed
        self._site = site
        self.number = number
        self.nbytes = nbytes
        self.tensors = tensors
        self.written = False

    def failed(self, what: str, why: str) -> SwapFailed:
        """Return the error for a storage that could not be swapped."""
        return SwapFailed(
            f"{format_bytes(self.nbytes)} of {self._site} could not be {what}: {why}. Weights and "
            "optimizer state are unchanged: run this step again, with a plan made with "
            "swap_directory= on another disk, or without swap="
        )

    def __del__(self) -> None:
        if self.written:
            # Only append here: the garbage collector may call this at any point of other code.
            self._freed.append(self.number)
