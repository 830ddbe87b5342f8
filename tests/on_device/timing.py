"""Measure times on a device: of steps in the memory of a smaller batch, and of the host's work."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from tests.on_device import workloads
from tests.on_device.machine import Line, Machine, check, refusal

MIB = 2**20


def speed(machine: Machine, *, bf16: bool) -> Iterator[Line]:
    """Measure rows per second of a larger batch, in the memory that a smaller one needs."""
    warm, count = machine.size(2, 1), machine.size(6, 2)
    for name, load in workloads.SPEED.items():
        rows, times = machine.size(load.rows, 2), load.times
        build = lambda n, load=load: partial(  # noqa: E731
            load.train, machine, load.model(machine), n, load.size, bf16=bf16
        )
        most = machine.trained(lambda _, b=build, n=rows: b(n)(), 2).peak
        reserved = torch.cuda.max_memory_reserved() if machine.is_cuda else 0
        for method, n, context in list(_methods(machine, most, rows, times)):
            label = {"model": name, "bf16": bf16, "method": method, "rows": n}
            limited = method.endswith(_LIMITED)
            what = f"speed: {name}, bf16 {bf16}, {method} completes"
            try:
                with _device_of(reserved if limited and machine.is_cuda else 0):
                    found = _measured(machine, method, build(n), n, context, warm, count)
                yield label | {"allocator": _settings(), **found}
                if context is not None:
                    yield check(what, True)
            except Exception as error:
                reported = f"{type(error).__name__}: {error}"[:300]
                yield label | {"allocator": _settings(), "error": reported}
                # A limited device may be too small because of fragmentation, which is no failure.
                if not limited:
                    yield check(what, refusal(error) is not None)


_LIMITED = ", in that device"


def _methods(
    machine: Machine, most: int, rows: int, times: int
) -> Iterator[tuple[str, int, Callable[[], Any] | None]]:
    """Yield what to measure: the name of a method, the rows of its batch, and its context.

    With PyTorch's default allocator settings, all methods are measured. With other settings, only
    those methods are measured on which the settings may have an effect.
    """
    within = partial(rekindle.budget, device=machine.kind)
    if not _settings():
        yield "plain", rows, None
        yield "online", times * rows, partial(within, most, learn=False)
    yield "online" + _LIMITED, times * rows, partial(within, most, learn=False)
    reserved = max(most, torch.cuda.max_memory_reserved() if machine.is_cuda else 0)
    yield "of reserved", times * rows, partial(within, reserved, of="reserved", learn=False)
    if not _settings() and not machine.quick:
        yield "watched", rows, partial(within, None)
        yield "plain, beyond the memory", times * rows, None
        learned = partial(within, most, learn="wait", cache=False)
        yield "learned", times * rows, learned
        yield "learned, swap", times * rows, partial(learned, swap="32GiB")
        yield "swap", times * rows, partial(within, most, swap="32GiB", learn=False)


def _settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF", "")


class _device_of:
    """Limit the device's memory to `nbytes` while the context is open; 0 means no limit."""

    def __init__(self, amount: int) -> None:
        self._amount = amount

    def __enter__(self) -> None:
        if self._amount:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._amount / total))

    def __exit__(self, *_: object) -> None:
        if self._amount:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _measured(
    machine: Machine,
    method: str,
    build: Callable[[], Any],
    rows: int,
    context: Any,
    warm: int,
    count: int,
) -> Line:
    machine.start_anew()
    torch.manual_seed(0)
    model, step = build()
    with nullcontext() if context is None else context() as run:
        first, _ = machine.timed(step, 1)
        for _ in range(warm + 10):
            if warm <= 0 and (run is None or "learned" not in method or run.steps_followed):
                break
            step()
            warm -= 1
        before = 0 if run is None else run.recomputations
        took, host = machine.timed(step, count)
        again = 0 if run is None else (run.recomputations - before) // count
    del model
    median = statistics.median(took)
    in_mib = lambda amount: amount // MIB  # noqa: E731
    return {
        "ms": round(median, 2),
        "first ms": round(first[0], 1),
        "rows/s": round(1e3 * rows / median, 2),
        "host share": round(host, 3),
        "peak MiB": in_mib(torch.cuda.max_memory_allocated() if machine.is_cuda else 0),
        "reserved MiB": in_mib(torch.cuda.max_memory_reserved() if machine.is_cuda else 0),
        "recomputed": again,
    }


def calls(machine: Machine) -> Iterator[Line]:
    """Measure the host's time per operator call (us): plain, in a budget, with a second stream."""
    repeats = machine.size(2000, 50)
    size = 256
    x = torch.randn(size, size, device=machine.kind, requires_grad=True)
    w = nn.Linear(size, size, device=machine.kind)
    norm = nn.LayerNorm(size, device=machine.kind)
    kinds: dict[str, Callable[[], Tensor]] = {
        "mul": lambda: x * 2.0,
        "view": lambda: x.view(-1),
        "linear": lambda: w(x),
        "layer_norm": lambda: norm(x),
        "dropout": lambda: F.dropout(x, 0.1),
        "gelu": lambda: F.gelu(x),
    }
    contexts: dict[str, Any] = {
        "plain": nullcontext,
        "watched": partial(rekindle.budget, None, device=machine.kind),
        "within": partial(rekindle.budget, "1GiB", device=machine.kind, learn=False),
    }
    for name, call in kinds.items():
        line: Line = {"call": name}
        for label, context in contexts.items():
            with context():
                line[label] = _us(machine, call, repeats)
                if label == "within" and machine.is_cuda:
                    with torch.cuda.stream(torch.cuda.Stream()):
                        call()
                    line["after a second stream"] = _us(machine, call, repeats)
        yield line
    yield from _optimizers(machine, contexts)


def _us(machine: Machine, call: Callable[[], object], repeats: int) -> float:
    """Return the smallest of three measured times of a call in us."""
    best = float("inf")
    for _ in range(3):
        machine.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, time.perf_counter() - began)
    return round(1e6 * best / repeats, 2)


def _optimizers(machine: Machine, contexts: dict[str, Any]) -> Iterator[Line]:
    """Measure what hooks add to a step of fused AdamW over many small parameters."""
    count = machine.size(300, 20)
    for label, context in contexts.items():
        weights = [nn.Parameter(torch.randn(64, device=machine.kind)) for _ in range(count)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(weights, fused=machine.is_cuda)
        with context():
            optimizer.step()
            took = _us(machine, optimizer.step, machine.size(50, 3))
        yield {"optimizer": label, "parameters": count, "ms a step": round(took / 1e3, 3)}


@final
class _Counted(TorchDispatchMode):
    """Count the calls of operators."""

    calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def models(machine: Machine) -> Iterator[Line]:
    """Measure the host's time for a step of small batches.

    The steps run in plain PyTorch, in a budget without a limit, and within half of the memory.
    """
    count = machine.size(10, 2)
    for name, load in workloads.SPEED.items():
        build = lambda _, load=load: load.train(  # noqa: E731
            machine, load.model(machine), machine.size(16, 2), load.short, bf16=True
        )
        _, half = machine.within(build, machine.trained(build, 2).budget(0.5), 2)
        within = partial(rekindle.budget, device=machine.kind, learn=False)
        contexts = {
            "plain": nullcontext,
            "watched": partial(within, None),
            "within half": partial(within, half),
        }
        line: Line = {"host of": name}
        for label, context in contexts.items():
            torch.manual_seed(0)
            model, step = build(machine)
            with context() as run:
                machine.timed(step, 3)
                before = 0 if run is None else run.recomputations
                took, _ = machine.timed(step, count)
                if run is not None:
                    line[f"{label}, recomputed"] = (run.recomputations - before) // count
            line[f"{label} ms"] = round(statistics.median(took), 2)
            if run is None:
                with _Counted() as counted:
                    step()
                line["calls"] = counted.calls
            del model, step
        yield line
