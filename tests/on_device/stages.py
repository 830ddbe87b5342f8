"""Run one device stage: `python -m tests.on_device.stages NAME KIND [--tiny]`.

It prints findings as JSON lines. A line {"check": ..., "ok": ...} is a condition that must hold;
all other lines are figures.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import rekindle
from tests.on_device import programs, timing, workloads
from tests.on_device.in_place import in_place
from tests.on_device.machine import Line, Machine, Program, check, refusal, same, switched
from tests.on_device.public import public
from tests.on_device.trials import chosen_kernels

MIB = 2**20


def facts(machine: Machine) -> Iterator[Line]:
    yield {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rekindle": rekindle.__version__,
        "machine": platform.machine(),
        "settings": os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }
    if machine.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        yield {"device": properties.name, "memory MiB": properties.total_memory // MIB}
    host = torch.empty(machine.size(64, 1) * MIB, dtype=torch.uint8, pin_memory=machine.is_cuda)
    there = host.to(machine.kind, copy=True)
    for name, one, other in (("to the device", there, host), ("to the host", host, there)):
        times, _ = machine.timed(lambda a=one, b=other: a.copy_(b, non_blocking=True), 3)
        yield {"copy": name, "GB/s": round(host.nbytes / min(times) / 1e6, 1)}
    size = machine.size(4096, 128)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(size, size, device=machine.kind, dtype=dtype)
        times, _ = machine.timed(lambda x=x: x @ x, 5)
        yield {"matmul": str(dtype)[6:], "TFLOP/s": round(2 * size**3 / min(times) / 1e9, 2)}


def bits(machine: Machine, part: slice = slice(None)) -> Iterator[Line]:
    """Train each program twice without a budget, and then within budgets.

    If the two runs without a budget have equal bits, the runs within budgets must have the same.
    """
    for name, program in [*programs.programs(machine)][part]:
        yield from _each(machine, name, program)


def alone(machine: Machine, name: str, program: Program) -> Iterator[Line]:
    """Check the bits of one program. A budget must recompute something, or raise `Unsupported`."""
    found: list[Line] = []
    for line in _each(machine, name, program):
        found.append(line)
        yield line
    if machine.is_cuda and "recomputations" in found[-1]:
        most = max(line.get("recomputations", 0) for line in found)
        yield check(f"bits: {name} recomputes", most > 0, recomputations=most)


def _each(machine: Machine, name: str, program: Program) -> Iterator[Line]:
    try:
        yield from _bits(machine, name, program)
    except Exception as error:
        refused = refusal(error)
        reported = f"{type(refused or error).__name__}: {refused or error}"[:300]
        where = "".join(traceback.format_exception(error))[-2500:]
        yield check(f"bits: {name}", refused is not None, error=reported, traceback=where)


def _bits(machine: Machine, name: str, program: Any) -> Iterator[Line]:
    plain = machine.trained(program)
    again = machine.trained(program)
    repeatable = same(plain.values, again.values)
    for share in (0.45,) if machine.tiny else (0.7, 0.45, 0.0):
        took, amount = machine.within(program, plain.budget(share))
        equal = same(took.values, plain.values)
        yield check(
            f"bits: {name}, {share:.0%}",
            equal or not repeatable,
            equal=equal,
            repeatable=repeatable,
            budget=amount,
            recomputations=took.run.recomputations,
        )


def races(machine: Machine) -> Iterator[Line]:
    """Train on two streams, with a host buffer that is refilled before each step.

    Kernels that only wait (`torch.cuda._sleep`) delay the work of each stream. So an operator that
    does not wait for the other stream reads memory before it is written, or after it has been
    reused, and the results differ from those of plain PyTorch.
    """
    for pinned in (True, False):
        program = partial(programs.on_streams, pinned=pinned)
        plain = machine.trained(program)
        for options in ({}, {"swap": "4GiB"}, {"evict": "anything"}):
            what = f"races: pinned {pinned}, {options or 'online'}"
            try:
                took, _ = machine.within(program, plain.budget(0.5), **options)
            except rekindle.Unsupported as error:  # a refusal is allowed
                yield check(what, True, error=str(error)[:300])
            else:
                yield check(what, same(took.values, plain.values))


def no_waiting(machine: Machine) -> Iterator[Line]:
    """Check that a budget never makes the host wait for the device."""
    torch.manual_seed(0)
    model, step = programs.programs(machine).__next__()[1](machine)
    plain = machine.trained(programs.mlp)
    with rekindle.budget(max(plain.budget(0.6), 1), device=machine.kind) as run:
        for _ in range(3):
            step()
        machine.synchronize()
        if machine.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            waited = ""
        except RuntimeError as error:
            waited = str(error)
        finally:
            if machine.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
    yield check("no waiting: a step", not waited, error=waited, evictions=run.evictions)
    del model


def memory(machine: Machine) -> Iterator[Line]:
    """Check that the allocator's peak is within the budget, apart from workspaces of operators."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "default") or "default"
    for program in (workloads.bert_base, workloads.resnet, workloads.unet):
        name = program.__name__
        plain = machine.trained(program, 2)
        repeatable = same(plain.values, machine.trained(program, 2).values)
        seen = machine.trained(program, 2, None) if not machine.is_cuda else _seen(machine, program)
        inside = max(0, plain.peak - seen.peak)
        for share in (0.5,) if machine.tiny else (0.7, 0.5, 0.4):
            took, amount = machine.within(program, plain.budget(share), 2)
            equal = same(took.values, plain.values)
            yield check(
                f"memory: {name}, {share:.0%}, {settings}",
                took.peak <= amount + inside + 2 * MIB and (equal or not repeatable),
                peak=took.peak,
                budget=amount,
                inside=inside,
                equal=equal,
                repeatable=repeatable,
                reserved=torch.cuda.max_memory_reserved() if machine.is_cuda else 0,
            )


def _seen(machine: Machine, program: Any) -> Any:
    """Train two steps in an ample budget. The peak is that of the budget, not of the device."""
    took = machine.trained(program, 2, 1 << 50)
    return type(took)(took.values, took.run.peak, took.constant, took.run)


def swap(machine: Machine) -> Iterator[Line]:
    """Halve the activation memory with swapping.

    The bits must be equal. The figures show the time spent waiting for copies.
    """
    for program in (workloads.bert_base, workloads.resnet):
        plain = machine.trained(program)
        repeatable = same(plain.values, machine.trained(program).values)
        took, amount = machine.within(program, plain.budget(0.5), swap="16GiB")
        figures = took.run.report().swapped
        equal = same(took.values, plain.values)
        yield check(
            f"swap: {program.__name__}",
            equal or not repeatable,
            equal=equal,
            repeatable=repeatable,
            budget=amount,
            recomputations=took.run.recomputations,
            swapped=str(figures),
        )


def faults(machine: Machine) -> Iterator[Line]:
    """Check that the step after an `OutOfBudget` and after a device OOM is right."""
    program = dict(programs.programs(machine))["mlp, Adam"]
    plain = machine.trained(program)
    torch.manual_seed(0)
    model, step = program(machine)
    state = torch.get_rng_state()
    seeds = torch.cuda.get_rng_state() if machine.is_cuda else None
    try:
        with rekindle.budget(max(plain.constant // 2, 1), device=machine.kind):
            step()
        yield check("faults: too small a budget raises", False)
    except rekindle.OutOfBudget as error:
        yield check("faults: too small a budget raises", True, smallest=error.smallest_budget)
    torch.set_rng_state(state)
    if seeds is not None:
        torch.cuda.set_rng_state(seeds)
    with rekindle.budget(plain.peak * 2, device=machine.kind):
        for _ in range(3):
            step()
    values = [value.detach().cpu() for value in model.state_dict().values()]
    yield check("faults: the next step is right", same(values, plain.values[: len(values)]))
    del model, step
    if machine.is_cuda:
        yield from _full(machine, program, plain)


def _full(machine: Machine, program: Any, plain: Any) -> Iterator[Line]:
    """Train on a device that has less memory than the budget."""
    total = torch.cuda.get_device_properties(0).total_memory
    machine.start_anew()
    room = plain.budget(0.4) + 32 * MIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
    try:
        took = machine.trained(program, 3, 1 << 45)
        yield check(
            "faults: a full device",
            same(took.values, plain.values) and took.run.evictions > 0,
            evictions=took.run.evictions,
            room=room,
            plain=plain.peak,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def world_of_one(machine: Machine) -> Iterator[Line]:
    """Train with DDP and FSDP2 in a process group of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getpid() % 1000))
    dist.init_process_group("nccl" if machine.is_cuda else "gloo", rank=0, world_size=1)
    mesh = init_device_mesh(machine.kind, (1,))

    def ddp(machine: Machine) -> Any:
        return _stepping(machine, DistributedDataParallel(programs.blocks(machine)))

    def fsdp(machine: Machine, *, reshard: bool) -> Any:
        model = programs.blocks(machine)
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        return _stepping(machine, fully_shard(model, mesh=mesh, reshard_after_forward=reshard))

    kinds = {
        "DDP": ddp,
        "FSDP2": partial(fsdp, reshard=False),
        "FSDP2, resharded": partial(fsdp, reshard=True),
    }
    for name, program in kinds.items():
        plain = machine.trained(program)
        try:
            took, amount = machine.within(program, plain.budget(0.7))
        except rekindle.Unsupported as error:  # a refusal is allowed
            yield check(f"world of one: {name}", True, error=str(error)[:300])
        else:
            yield check(f"world of one: {name}", _equal(took.values, plain.values), budget=amount)
    dist.destroy_process_group()


def _stepping(machine: Machine, model: nn.Module) -> Any:
    return programs.training(
        model, lambda: model(programs.batch(machine)).square().mean(), _sgd(model)
    )


def _sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _equal(one: list[Any], other: list[Any]) -> bool:
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    return same([local(t) for t in one], [local(t) for t in other])


def compiled_in_budgets(machine: Machine) -> Iterator[Line]:
    """Train compiled blocks with a budget around each step; compiled code outlives each budget."""
    plain = machine.trained(programs.compiled, 4, 1 << 40)
    amount = plain.budget(0.6) if not machine.is_cuda else plain.run.peak * 3 // 4
    torch.manual_seed(0)
    machine.start_anew()
    model, step = programs.compiled(machine)
    recomputed = 0
    for _ in range(4):
        with rekindle.budget(amount, device=machine.kind) as run:
            step()
        recomputed += run.recomputations
    values = [value.detach().cpu() for value in model.state_dict().values()]
    yield check(
        "compiled blocks, a budget around each step",
        same(values, plain.values[: len(values)]) and recomputed > 0,
        recomputations=recomputed,
        budget=amount,
    )


#: Stages that compare bits, and so need deterministic algorithms: some operators of their programs
#: otherwise sum in any order.
_SETTLED = ("in place", "memory", "swap")


@final
@dataclass(frozen=True)
class Stage:
    """A stage, which runs in a process of its own.

    Attributes:
        run: Yields its findings.
        seconds: Its time limit, a part of the ten minutes for all stages.
        timed: True if nothing else may run at the same time.
        settings: Settings of PyTorch's allocator. The stage runs once with each, each time in a
            process of its own.
        on_cpu: True if the stage also runs in a rehearsal on the CPU.
    """

    run: Callable[[Machine], Iterator[Line]]
    seconds: int
    timed: bool = False
    settings: tuple[str, ...] = ("",)
    on_cpu: bool = True


def _alone(name: str, program: Program) -> Stage:
    """Return a stage for a program whose failure may damage later programs."""
    return Stage(partial(alone, name=name, program=program), 100, on_cpu=False)


_SEGMENTS = ("", "expandable_segments:True")
_ALL = (*_SEGMENTS, "backend:cudaMallocAsync")

#: Stages by name. Stages that may run at the same time as others come first.
STAGES: dict[str, Stage] = {
    "bits, first half": Stage(partial(bits, part=slice(0, None, 2)), 150),
    "bits, second half": Stage(partial(bits, part=slice(1, None, 2)), 150),
    "captured": _alone("a graph captured inside", programs.captured),
    "compiled": _alone("compiled blocks", programs.compiled),
    "compiled whole": _alone("a compiled model", programs.compiled_whole),
    "compiled, budgets": Stage(compiled_in_budgets, 100, on_cpu=False),
    "reduced overhead": _alone("compiled, reduce-overhead", programs.reduced_overhead),
    "triton": _alone("kernels in Triton", programs.triton),
    "in place": Stage(in_place, 100),
    "chosen kernels": Stage(chosen_kernels, 100),
    "races": Stage(races, 100),
    "no_waiting": Stage(no_waiting, 60),
    "memory": Stage(memory, 100, settings=_ALL),
    "swap": Stage(swap, 100),
    "faults": Stage(faults, 60),
    "world_of_one": Stage(world_of_one, 100),
    "public": Stage(public, 170),
    "facts": Stage(facts, 25, timed=True),
    "calls": Stage(timing.calls, 25, timed=True),
    "hosts": Stage(timing.models, 60, timed=True),
    "speed, float32": Stage(partial(timing.speed, bf16=False), 100, timed=True, settings=_SEGMENTS),
    "speed, bfloat16": Stage(partial(timing.speed, bf16=True), 60, timed=True, settings=_SEGMENTS),
}


def main() -> None:
    name, kind = sys.argv[1:3]
    machine = Machine(kind, tiny="--tiny" in sys.argv, quick="--quick" in sys.argv)
    torch.set_float32_matmul_precision("highest")
    if not machine.is_cuda:
        torch.set_num_threads(1)
    began = time.perf_counter()
    with (
        switched(torch.backends.cudnn, "benchmark", False),
        switched(torch.backends.cudnn, "deterministic", name in _SETTLED),
        sdpa_kernel(SDPBackend.MATH) if name in _SETTLED else nullcontext(),
    ):
        torch.use_deterministic_algorithms(name in _SETTLED, warn_only=True)
        for line in STAGES[name].run(machine):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"seconds": round(time.perf_counter() - began, 1)}) + "\n")


if __name__ == "__main__":
    main()
