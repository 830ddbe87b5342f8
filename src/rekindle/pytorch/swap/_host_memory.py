"""Check the argument `swap=` of `rekindle.budget`, and open the store that holds swapped values."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Final, final

import torch

from rekindle import _checks as checks
from rekindle._errors import Unsupported
from rekindle._types import Bytes
from rekindle._units import parse_memory
from rekindle.policies import Swap
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.swap._bandwidth import bandwidth_of
from rekindle.pytorch.swap._file_store import FileStore
from rekindle.pytorch.swap._host_store import Copies
from rekindle.pytorch.swap._pinned_store import PinnedStore
from rekindle.pytorch.swap._store import Bandwidth, Store
from rekindle.pytorch.swap._streams import Streams


def host_memory(
    swap: str | int | Swap | None,
    directory: str | os.PathLike[str] | None,
    device: torch.device,
) -> HostMemory | None:
    """Return the checked arguments for swapping, or None if the user did not ask for swapping.

    Args:
        swap: The size of the host memory to use, or a `Swap` with size and bandwidths.
        directory: The folder of the swap file, for a budget on the CPU.
        device: The device of the budget.

    Raises:
        InvalidBudget: The size in `swap` is not valid.
        Unsupported: Swapping is impossible on this device, or `directory` was given without `swap`.
    """
    if swap is not None:
        return HostMemory(swap, directory, device)
    if directory is not None:
        raise Unsupported(
            f"rekindle.budget(..., swap_directory={os.fspath(directory)!r}): got no swap=, "
            'without which nothing is swapped; write rekindle.budget("6GiB", swap="32GiB", '
            "swap_directory=...)"
        )
    return None


UNLIMITED: Final[Bytes] = 1 << 60
"""The limit of host memory if the user gives none: more bytes than any host has."""


@final
class HostMemory:
    """The checked arguments `swap=` and `swap_directory=`. Its method `copies` opens the store."""

    def __init__(
        self,
        swap: str | int | Swap,
        directory: str | os.PathLike[str] | None,
        device: torch.device,
        call: str = 'rekindle.budget("6GiB", {})',
    ) -> None:
        """Check the arguments that the user gave for swapping.

        Args:
            swap: As for `host_memory`.
            directory: As for `host_memory`.
            device: The device of the values.
            call: The user's call for error messages, with {} in place of the arguments.
        """
        function = call.partition("(")[0]
        if device.type != "cpu" and not is_accelerator(device):
            raise Unsupported(
                f"{function}(..., swap=...): values on {device.type} cannot be swapped, only "
                "those on CUDA and on the CPU; leave out swap="
            )
        if directory is not None and device.type != "cpu":
            raise Unsupported(
                f"{function}(..., swap_directory={os.fspath(directory)!r}): values on "
                f"{device.type} are swapped to page-locked host memory, not to a file; write "
                f'{function}(..., swap="32GiB") without swap_directory='
            )
        line = call.format('swap="32GiB", swap_directory={}')
        paths = (str, os.PathLike, type(None))
        checks.kind(directory, paths, "the path of a folder", line, '"/var/tmp"')
        self._swap = swap
        if not isinstance(swap, Swap):
            self._limit = parse_memory(swap, line=call.format("swap={}"))
        else:
            self._limit = swap.host
        self._device = device
        self._directory = directory

    def copies(self, budget: Bytes | None) -> tuple[Copies, Swap]:
        """Open the store of swapped values, and measure its bandwidth if the user gave none.

        Args:
            budget: The budget of the device. Test transfers use at most an eighth of it.

        Returns:
            The object that copies values for the native core, and the settings for the engine.

        Raises:
            Unsupported: The store cannot be opened.
        """
        store, swap, believed = self._measured(budget)
        return Copies(store, believed), swap

    def _measured(self, budget: Bytes | None) -> tuple[Store, Swap, Bandwidth | None]:
        """Open the store. Return it with the engine's settings, and the bandwidth if measured."""
        store, place = self._open()
        swap, believed = self._swap, None
        if not isinstance(swap, Swap):
            most = store.limit if budget is None else budget // 8
            believed = bandwidth_of(store, place, most)
            swap = Swap(store.limit, believed.out, believed.back)
        return store, replace(swap, host=store.limit), believed

    def _open(self) -> tuple[Store, Hashable]:
        """Open the store. Return it with the device or disk that its bandwidth depends on."""
        # without a limit, `write` fails when the host is full
        limit = UNLIMITED if self._limit is None else self._limit
        if is_accelerator(self._device):
            return PinnedStore(limit, self._device, Streams(self._device)), self._device
        directory = Path(default_directory() if self._directory is None else self._directory)
        store = FileStore(limit, directory)
        return store, directory.stat().st_dev


def default_directory() -> str:
    """Return the directory for swap files: $TMPDIR, else /var/tmp, as /tmp is often in memory."""
    if os.environ.get("TMPDIR"):
        return os.environ["TMPDIR"]
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
