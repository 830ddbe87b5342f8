"""Share learned plans between processes through files in the cache folder.

There is one file for each sequence of operators that a step may run. A file is written completely
or not at all, and a damaged file is ignored. Several processes may record the same sequence at the
same time, such as the ranks of one job. Only the process that holds the `Claim` of this sequence, a
lock file, searches for a plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch

from rekindle._cache import store
from rekindle._types import Bytes
from rekindle.policies import Swap
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.learned._step_plan import GRAPH, StepPlan

try:
    import fcntl
# Windows has no module for file locks, so there each process makes its own search for a plan.
except ImportError:
    fcntl: Any = None

FORMAT: Final = "rekindle plan 7"
"""Version of the file format, to change if numbers of storages or operators get a new meaning."""
MOST_FILES: Final = 256
MOST_BYTES: Final = 64 << 20
LESS: Final = 0.95
"""A stored plan is used if its budget is at least this fraction of the present budget.

The budgets need not be equal, because `rekindle.budget("auto")` differs a little from process to
process.
"""
ENDING: Final = ".plan"


@final
class Claim:
    """A lock file: the process that holds it may search for the plan of one kind of step.

    The lock is released when the process ends.
    """

    def __init__(self, path: Path | None, descriptor: int = -1) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, so that other processes may search."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
            # Unlock explicitly, because a forked process may keep the file open, and so the lock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._path = None


@final
class PlanCache:
    """The files with learned plans for one device and one budget.

    Args:
        folder: The cache folder. None: read and store no plans.
        budget: The budget in bytes.
        device: The device.
        swap: Host memory and bandwidth, if plans may swap.
    """

    def __init__(
        self,
        folder: Path | None,
        budget: Bytes,
        device: torch.device,
        swap: Swap | None = None,
    ) -> None:
        self._folder = None if folder is None else folder / "plans"
        self._budget = budget
        self._about = f"{FORMAT} torch {torch.__version__} {_name_of(device)}{_name_of_host(swap)}"
        #: Names of plan files that were not read yet, by the part of the name that identifies the
        #: first operator of a step.
        self._unread: dict[str, list[str]] = {}
        for name in self._names():
            self._unread.setdefault(name.partition("-")[0], []).append(name)

    def beginning_with(self, op_id: int) -> list[StepPlan]:
        """Return the stored plans for steps that begin with operator `op_id`, largest budget first.

        Each file is read only once: a second call with the same `op_id` returns nothing.
        """
        if not self._unread:
            return []
        found = self._unread.pop(self._start(op_id), [])
        fitting = [name for name in found if self._fits(_budget_in(name))]
        fitting.sort(key=_budget_in, reverse=True)
        return [plan for name in fitting if (plan := self._read(name)) is not None]

    def same(self, plan: StepPlan) -> StepPlan | None:
        """Return the stored plan for the same step as `plan` if it is final, else None."""
        found = self._read(self._name(plan))
        return found if found is not None and found.finished else None

    def keep(self, plan: StepPlan) -> None:
        """Store `plan` for other processes. Errors of the file system are ignored."""
        if self._folder is None:
            return
        body = json.dumps(plan.as_numbers(), separators=(",", ":"))
        store(self._folder / self._name(plan), f"{_digest(body)}\n{body}")
        with suppress(OSError):
            self._make_room()

    def claim(self, plan: StepPlan) -> Claim | None:
        """Claim the search for a plan. Return None if another process holds this claim."""
        if self._folder is None or fcntl is None:
            return Claim(None)
        path = self._folder / self._name(plan).replace(ENDING, ".claim")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return Claim(None)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # the file system has no locks, so search without a claim
            os.close(descriptor)
            return Claim(None)
        return Claim(path, descriptor)

    def _names(self) -> list[str]:
        """Return the names of all plan files in the folder."""
        if self._folder is not None:
            with suppress(OSError):
                return [name for name in os.listdir(self._folder) if name.endswith(ENDING)]
        return []

    def _name(self, plan: StepPlan) -> str:
        """Return the name of the file for `plan`, with hashes of its operators and the budget."""
        graph = [op_id for op_id in plan.op_ids if op_id & GRAPH]
        return f"{self._start(plan.op_ids[0])}-{_digest(repr(graph))}-{self._budget}{ENDING}"

    def _start(self, op_id: int) -> str:
        """Return the first part of the file names of plans whose first operator is `op_id`."""
        return _digest(f"{self._about} {op_id}")

    def _fits(self, budget: Bytes) -> bool:
        """Return True if a plan for `budget` bytes can be used within this object's budget."""
        return LESS * self._budget <= budget <= self._budget

    def _read(self, name: str) -> StepPlan | None:
        """Return the plan in the file `name`, or None if the file is missing or damaged."""
        if self._folder is None:
            return None
        path = self._folder / name
        with suppress(OSError, ValueError, TypeError, KeyError):
            digest, _, body = path.read_text(encoding="utf-8").partition("\n")
            if digest == _digest(body):
                os.utime(path)  # mark the file as recently used, so that it is deleted last
                numbers = json.loads(body)
                return StepPlan.from_numbers(numbers)
        return None

    def _make_room(self) -> None:
        """Delete the least recently used plan files beyond the limits in number and bytes."""
        assert self._folder is not None
        files: list[tuple[float, int, str]] = []
        for entry in os.scandir(self._folder):
            with suppress(OSError):
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
        files.sort(reverse=True)
        nbytes = 0
        for number, (_, size, path) in enumerate(files):
            nbytes += size
            if number >= MOST_FILES or nbytes > MOST_BYTES:
                with suppress(OSError):
                    os.unlink(path)


def _name_of(device: torch.device) -> str:
    """Return a name of the hardware, because costs and thus plans depend on the hardware."""
    if is_accelerator(device):
        return accelerator.name_of(device)
    return f"{device.type} {platform.machine()}"


def _name_of_host(swap: Swap | None) -> str:
    """Return a text for the host memory and its bandwidths.

    Bandwidths are rounded, because each run measures slightly different ones.
    """
    if swap is None:
        return ""
    rates = (swap.out_bytes_per_s, swap.in_bytes_per_s)
    return f" swap {swap.host} {' '.join(str(rate.bit_length()) for rate in rates)}"


def _budget_in(name: str) -> Bytes:
    """Return the budget (bytes) in the file name of a stored plan, or 0 if there is none."""
    text = name.removesuffix(ENDING).rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


def _digest(text: str) -> str:
    """Return a short hash of `text`."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
