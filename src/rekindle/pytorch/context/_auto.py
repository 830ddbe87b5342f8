"""`rekindle.budget("auto")`: the memory that the device has for tensors, less a margin of 10 %.

On a CPU the smallest of four amounts counts: the machine's free memory, and what control groups,
`ulimit -v` and `ulimit -d` leave.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes
from rekindle.pytorch.context._run import Run
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.native import Step
from rekindle.pytorch.tensors import homes_of, living_tensors

#: Fraction of memory that `budget("auto")` leaves for fragmentation and memory outside of tensors.
MARGIN = 0.1

#: Smallest correction of the budget after the first step, as a fraction of the budget. A smaller
#: one is not worth it: a changed budget discards the learned plans.
WORTH_IT = 0.01

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_MEMBERSHIP = Path("/proc/self/cgroup")  # file that names the control groups of this process
_GROUPS = Path("/sys/fs/cgroup")

#: For each version of control groups, the names of the files with the limit and with the usage (in
#: bytes).
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


def available(device: torch.device, ranks: int | None = None) -> Bytes:
    """Return the bytes that tensors of this process may take on `device`.

    They are the bytes in use by tensors now and the free bytes, less the margin. On CUDA, memory
    that PyTorch's allocator has reserved counts as in use. On a CPU the free memory is the smallest
    of the amounts that the machine, the control groups and `ulimit` leave.

    Args:
        device: A CPU or a CUDA device.
        ranks: The number of processes that share the free memory. Default: as many as `torchrun`
            started for each device of this machine.

    Raises:
        Unsupported: The device does not report how much memory it has.
    """
    if is_accelerator(device):
        sharing = accelerator.ranks_of_device(_ranks_here()) if ranks is None else ranks
        free, mine = accelerator.obtainable(device)
        return int((1 - MARGIN) * (free // sharing + mine))
    if device.type != "cpu":
        raise Unsupported(
            f'rekindle.budget("auto"): PyTorch does not report how much memory {device.type} '
            'has; write the size, such as rekindle.budget("6GiB")'
        )
    free = _free_on_cpu() // (_ranks_here() if ranks is None else ranks)
    return int((1 - MARGIN) * (free + sum(_bytes_of_tensors())))


def measured_again(run: Run, device: torch.device) -> None:
    """After the first step, set the budget of `run` to the memory that `device` has then.

    By then libraries have loaded their kernels and allocated workspaces, other processes have
    taken their share, and fragmentation shows. The new budget is never below the memory that
    cannot be evicted.
    """

    # Use a weak reference: `run` refers to `correct`, so a strong one would be a reference cycle.
    reference = weakref.ref(run)

    def correct(step: Step) -> None:
        run = reference()
        if step.number > 1 or run is None or run.budget is None:
            return
        before = run.budget
        now = available(device)
        if abs(now - before) <= WORTH_IT * before:
            return
        try:
            run.budget = now
        # the device now has less memory than the values that cannot be evicted, so the old budget
        # stays
        except OutOfBudget:
            run.budget = max(now, min(run.memory, before))

    run.on_step(correct)


def _ranks_here() -> int:
    """Return the number of this job's processes on this machine, as `torchrun` reports it."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else 1


def _free_on_cpu() -> Bytes:
    found = [_left_in_group(limit, usage) for limit, usage in _control_groups()]
    found += [_free_in_machine(), *_left_in_limits()]
    known = [free for free in found if free is not None]
    if not known:
        raise Unsupported(
            'rekindle.budget("auto"): the free memory of this machine is not known (there is '
            'no /proc/meminfo); write the size, such as rekindle.budget("6GiB")'
        )
    return max(0, min(known))


def _free_in_machine() -> Bytes | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable")
    return None if available is None else 1024 * int(available.split()[0])


def _control_groups() -> Iterator[tuple[Path, Path]]:
    """Yield the files with limit and usage of each control group of this process and its parents.

    A container may not see the groups that /proc/self/cgroup names. Then only the files of the root
    group exist, which is among the parents.
    """
    groups = {(_GROUPS, 2): Path(), (_GROUPS / "memory", 1): Path()}
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups[_GROUPS, 2] = Path(path.strip("/"))
            elif "memory" in controllers.split(","):
                groups[_GROUPS / "memory", 1] = Path(path.strip("/"))
    for (root, version), group in groups.items():
        limit, usage = _NAMES[version]
        for folder in (group, *group.parents):
            yield root / folder / limit, root / folder / usage


def _left_in_limits() -> Iterator[Bytes]:
    """Yield the bytes that `ulimit -v` and `ulimit -d` leave to this process."""
    try:
        import resource  # Windows has no such module

        lines = _STATUS.read_text().splitlines()
    except (ImportError, OSError):
        return
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    for which, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(which)
        if most != resource.RLIM_INFINITY and field in fields:
            yield most - 1024 * int(fields[field].split()[0])


def _left_in_group(limit: Path, usage: Path) -> Bytes | None:
    try:
        most, now = limit.read_text().strip(), usage.read_text().strip()
    except OSError:
        return None
    # the text "max" in the file means that the control group has no limit
    return int(most) - int(now) + _cache(usage) if most.isdigit() else None


def _cache(usage: Path) -> Bytes:
    """Return the bytes of cached files in a control group.

    They count as used, but the system frees them when memory is short.

    Args:
        usage: The file with the usage of the group.
    """
    with suppress(OSError):
        lines = (usage.parent / "memory.stat").read_text().splitlines()
        found = dict(line.split(" ", 1) for line in lines if " " in line)
        # Both figures include the control groups inside this one. Version 2 of control groups uses
        # the shorter name for that sum.
        return int(found.get("total_inactive_file", found.get("inactive_file", 0)))
    return 0


def _bytes_of_tensors() -> list[Bytes]:
    """Return the bytes of each storage on the CPU that a tensor of the program refers to."""
    homes = (home for home in homes_of(living_tensors()) if home.device.type == "cpu")
    return list({home._cdata: home.nbytes() for home in homes}.values())
