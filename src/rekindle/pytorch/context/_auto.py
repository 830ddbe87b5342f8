"""`rekindle.budget("auto")`: what the device has, with a margin."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes
from rekindle._units import parse_bytes
from rekindle.pytorch.context._run import Run
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.online import Step
from rekindle.pytorch.tensors import homes_of, living_tensors

#: Left alone: temporaries inside of operators, fragmentation, the program's other memory.
MARGIN = 0.1

#: Of the budget: a correction by less is not worth other schedules than those that were learned.
WORTH_IT = 0.01

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_MEMBERSHIP = Path("/proc/self/cgroup")  # which control groups this process is in
_GROUPS = Path("/sys/fs/cgroup")

#: Names of limit and usage, by version of control groups.
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


#: An environment variable: a cap from outside of the program, which "auto" then means.
CAP = "REKINDLE_BUDGET"


def resolved(amount: str | Bytes | None) -> str | Bytes | None:
    """Return `amount`; for "auto" the bytes that `REKINDLE_BUDGET` names, if it is set.

    Raises:
        InvalidBudget: It is set to something else than an amount of bytes or "auto".
    """
    cap = os.environ.get(CAP, "").strip()
    if not is_auto(amount) or not cap or is_auto(cap):
        return amount
    return parse_bytes(cap, line=f"{CAP}={{}}")


def is_auto(amount: object) -> bool:
    """Whether the device is to say how much there is."""
    return isinstance(amount, str) and amount.strip().lower() == "auto"


def amount_of(amount: str | Bytes, device: torch.device) -> Bytes:
    """The bytes that `amount` says; "auto" asks `REKINDLE_BUDGET`, then the device."""
    found = resolved(amount)
    return available(device) if found is None or is_auto(found) else parse_bytes(found)


def available(device: torch.device, ranks: int | None = None) -> Bytes:
    """What tensors may take on `device` in all: what they have now and what is free, but a margin.

    ranks: processes that share what is free; default: as many as `torchrun` says that there are for
        each device of this machine.

    On CUDA, what its allocator has reserved counts as tensors' own. On a CPU the free memory is
    that of the machine, of the control groups, or what `ulimit` leaves, whichever is least.
    """
    if is_accelerator(device):
        beside = accelerator.ranks_beside(_ranks_here()) if ranks is None else ranks
        free, mine = accelerator.obtainable(device)
        return int((1 - MARGIN) * (free // beside + mine))
    if device.type != "cpu":
        raise Unsupported(
            f'rekindle.budget("auto") on {device.type}, which does not say how much memory it has; '
            'write the amount, such as rekindle.budget("6GiB")'
        )
    free = _free_on_cpu() // (_ranks_here() if ranks is None else ranks)
    return int((1 - MARGIN) * (free + sum(_bytes_of_tensors())))


def measured_again(run: Run, device: torch.device) -> None:
    """After the first step of `run`, whose budget is what `device` had, it is what `device` has.

    By then libraries have loaded their kernels and taken their workspaces, other processes theirs,
    and what lies in pieces shows. A smaller one is not less than what cannot be let go.
    """

    reference = weakref.ref(run)  # which keeps who calls this

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
        except OutOfBudget:  # all that may be is let go
            run.budget = max(now, min(run.memory, before))

    run.on_step(correct)


def _ranks_here() -> int:
    """Processes of the job on this machine, by what `torchrun` says."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else 1


def _free_on_cpu() -> Bytes:
    found = [_left_in_group(limit, usage) for limit, usage in _control_groups()]
    found += [_free_in_machine(), *_left_in_limits()]
    known = [free for free in found if free is not None]
    if not known:
        raise Unsupported(
            'rekindle.budget("auto") cannot find out how much memory this machine has free '
            '(no /proc/meminfo); write the amount, such as rekindle.budget("6GiB")'
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
    """Files with limit and usage of each group that this process is in, and of those around it.

    In a container the groups that it names may be outside of what it sees: then the root counts.
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
    """What `ulimit -v` and `ulimit -d` leave of the addresses and of the data of this process."""
    try:
        import resource  # not on every system

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
    return int(most) - int(now) + _cache(usage) if most.isdigit() else None  # "max": no limit


def _cache(usage: Path) -> Bytes:
    """Files in memory count as used, and make way when memory is short."""
    with suppress(OSError):
        lines = (usage.parent / "memory.stat").read_text().splitlines()
        found = dict(line.split(" ", 1) for line in lines if " " in line)
        # That of the groups inside as well, which version 2 says under the shorter name.
        return int(found.get("total_inactive_file", found.get("inactive_file", 0)))
    return 0


def _bytes_of_tensors() -> list[Bytes]:
    """The sizes of all memory that tensors of the program have on the CPU."""
    homes = (home for home in homes_of(living_tensors()) if home.device.type == "cpu")
    return list({home._cdata: home.nbytes() for home in homes}.values())
