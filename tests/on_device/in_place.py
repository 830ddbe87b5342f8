"""Check operators that write their result over a gradient that nothing else reads.

The results must have equal bits, and less must be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from rekindle.pytorch.operators import InPlace
from tests.on_device import workloads
from tests.on_device.machine import Line, Machine, check, same
from tests.pytorch.in_place import FORWARD, NODES, Twins, taken_over, without

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def in_place(machine: Machine) -> Iterator[Line]:
    """Compare each operator alone, then whole steps with and without results written in place."""
    for entry, node in NODES:
        yield _operator(machine, entry, node)
    for name, bf16 in (("BERT", False), ("BERT, bfloat16", True)):
        yield from _steps(machine, name, bf16=bf16)


def _operator(machine: Machine, entry: InPlace, node: str) -> Line:
    wrong: list[str] = []
    called = 0
    for dtype in DTYPES:
        # Row lengths of a softmax that use its three kernels: in one warp, in a block that keeps
        # the row, and in one that reads it again.
        for width in (7, 100) if machine.tiny else (511, 1024, 4097, 50257):
            x = torch.rand(machine.size(1024, 8), width, device=machine.kind, dtype=dtype)
            y = FORWARD[node](x.requires_grad_())
            with Twins(entry) as twins:
                y.backward(torch.randn_like(y))
            called += twins.called
            wrong += twins.wrong
    return check(f"in place: {node}", not wrong and called >= len(DTYPES), wrong=wrong)


def _steps(machine: Machine, name: str, *, bf16: bool) -> Iterator[Line]:
    def program(machine: Machine) -> Any:
        rows = machine.size(16, 4)
        return workloads.language(machine, workloads.bert(machine), rows, 512, bf16=bf16)

    plain, again = machine.trained(program), machine.trained(program)
    repeatable = same(plain.values, again.values)
    recomputed: dict[bool, int] = {}
    for takes_over in (False, True):
        with nullcontext() if takes_over else without():
            took, amount = machine.within(program, plain.budget(0.6))
        recomputed[takes_over] = took.run.recomputations
        equal = same(took.values, plain.values)
        yield check(
            f"in place: {name}, {'with' if takes_over else 'without'}",
            (equal or not repeatable) and (taken_over(took.run) > 0) == takes_over,
            equal=equal,
            repeatable=repeatable,
            budget=amount,
            peak=took.peak,
            taken_over=taken_over(took.run),
            recomputations=took.run.recomputations,
        )
    if not machine.tiny:  # costs of tiny operators are noise, on which evictions depend
        fewer = recomputed[True] < recomputed[False]
        yield check(f"in place: {name}, recomputes less", fewer)
