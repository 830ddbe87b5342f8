"""Compare the simulator's models of PyTorch's CUDA allocator with what an H200 reserved.

The device's figures are those of one run of `scripts/on_device`, in results/on_device.json. The
traces are not in the repository. Their names are MODEL-ROWS-fp32, MODEL-ROWS-bf16, or, for the
checks of the memory, BERT-base-16-fp32-math. `rekindle.capture` records such traces on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from _tables import load

from rekindle.engine import NoRoom
from rekindle.policies import Thrifty
from rekindle.simulator import AllocatorName, Device, replay
from rekindle.trace import Trace, formats, keep_all_peak

RUN = 2  # index of the run whose recomputations are those of the traces; it also has most methods
MIB = 2**20
ALLOCATORS: dict[str, AllocatorName] = {"": "native", "expandable_segments:True": "expandable"}
#: The methods that are simulated: for each, whether it has the budget of the plain run, and whether
#: it runs on a device with no more memory than the plain run reserved.
METHODS = {
    "plain": (False, False),
    "plain, beyond the memory": (False, False),
    "online": (True, False),
    "online, in that device": (True, True),
}


def comparisons(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each figure of the device whose trace is in `folder`, with both MiB."""
    stages = load("on_device")["runs"][RUN]["stages"]
    speed = [line for stage in stages for line in stage["lines"] if "rows/s" in line]
    plain = {_workload(line): line for line in speed if line["method"] == "plain"}
    for line in speed:
        if line["method"] not in METHODS:
            continue
        base = plain[_workload(line)]
        small, trace = _trace(folder, _name(base)), _trace(folder, _name(line))
        if small is None or trace is None:
            continue
        within, limited = METHODS[line["method"]]
        yield {key: line[key] for key in ("model", "bf16", "rows", "method", "allocator")} | _both(
            trace,
            base["peak MiB"] * MIB if within else None,
            Device(ALLOCATORS[line["allocator"]], base["reserved MiB"] * MIB if limited else None),
            _missing(base, small),
            line["reserved MiB"],
        )
    yield from _checks(folder, stages, plain["BERT-base", False])


def _checks(folder: Path, stages: Any, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each check of the memory of BERT-base: three budgets, two allocators."""
    small, trace = _trace(folder, _name(base)), _trace(folder, f"{_name(base)}-math")
    for stage in stages:
        for line in stage["lines"]:
            name, *share = line.get("check", "").split(", ")
            if name != "memory: bert_base" or stage["setting"] not in ALLOCATORS:
                continue
            if small is not None and trace is not None:
                device = Device(ALLOCATORS[stage["setting"]])
                about = {"model": "BERT-base", "budget": share[0], "allocator": stage["setting"]}
                missing, reserved = _missing(base, small), line["reserved"] // MIB
                yield about | _both(trace, line["budget"], device, missing, reserved)


def _both(
    trace: Trace, budget: int | None, device: Device, missing: int, reserved: int
) -> dict[str, Any]:
    """Return the MiB reserved on the device and in the simulation, and how far these are apart.

    Args:
        trace: The trace of one step.
        budget: The budget on the device, in bytes.
        device: The simulated allocator, with the memory of the device.
        missing: The bytes in use on the device that the trace lacks.
        reserved: The MiB reserved on the device.
    """
    limit = device.memory and device.memory - missing
    device = Device(device.allocator, limit)
    try:
        record = replay(trace, budget=budget and budget - missing, policy=Thrifty(), device=device)
    except NoRoom:
        return {"device": reserved, "simulated": None, "off": None}
    simulated = (record.reserved_peak + missing) // MIB
    return {"device": reserved, "simulated": simulated, "off": round(simulated / reserved - 1, 4)}


def _missing(base: Mapping[str, Any], small: Trace) -> int:
    """Return the bytes that the trace lacks: workspaces of cuBLAS, which are always in use."""
    return int(base["peak MiB"] * MIB) - keep_all_peak(small)


def _workload(line: Mapping[str, Any]) -> tuple[str, bool]:
    return line["model"], line["bf16"]


def _name(line: Mapping[str, Any]) -> str:
    return f"{line['model']}-{line['rows']}-{'bf16' if line['bf16'] else 'fp32'}"


@cache
def _trace(folder: Path, name: str) -> Trace | None:
    path = folder / f"{name}.jsonl.gz"
    if path.exists():
        return formats.load(path)
    print(f"left out: {path} is missing")
    return None
