"""Tests of recorded locations of operators: module and line, in forward and backward passes."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

import rekindle
from rekindle import Run
from rekindle.pytorch.online._places import OUTSIDE, Place
from tests.pretend_fake.build import ALONE


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()  # half


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Half(), Half()])

    def forward(self, x: Tensor) -> Tensor:
        for half in self.halves:
            x = half(x)
        return x.exp()  # net


def places(step: Callable[[], object]) -> list[tuple[str, Place]]:
    """Return each operator with its module and line."""
    with rekindle.budget.unlimited(record=True) as run:
        step()
    return _named(run)


def _named(run: Run) -> list[tuple[str, Place]]:
    assert run._driver.places is not None
    names = [op.name for op in run.trace.ops]
    return list(zip(names, run._driver.places.of_op, strict=True))


def comment(place: Place) -> str:
    """Return the comment at the end of the source line of `place`."""
    path, _, number = place.line.rpartition(":")
    with open(path) as source:
        line = source.read().splitlines()[int(number) - 1]
    found = re.search(r"  # (\w+)$", line)
    return found[1] if found else ""


def test_recorded_operators_name_their_module_and_line() -> None:
    net = Net()
    batch = torch.rand(4, 8)

    def step() -> None:
        loss = net(batch).sum()  # loss
        loss.backward()  # back

    found = places(step)
    modules = {(name, place.module) for name, place in found}
    assert {
        ("aten::addmm", "Net.halves.0.linear"),
        ("aten::addmm", "Net.halves.1.linear"),
        ("aten::tanh", "Net.halves.0"),
        ("aten::exp", "Net"),
        ("aten::sum", OUTSIDE),
    } <= modules
    # Backward operators have the location of their forward operator.
    assert {
        ("aten::mm", "Net.halves.0.linear"),
        ("aten::mm", "Net.halves.1.linear"),
        ("aten::tanh_backward", "Net.halves.0"),
        ("aten::tanh_backward", "Net.halves.1"),
        ("aten::mul", "Net"),
    } <= modules
    lines = {(name, comment(place)) for name, place in found if place.line}
    assert {("aten::tanh", "half"), ("aten::tanh_backward", "half"), ("aten::mul", "net")} <= lines
    assert ("aten::sum", "loss") in lines


def test_operator_after_module_that_raised_is_outside_of_module() -> None:
    net = Net()

    def step() -> None:
        with pytest.raises(RuntimeError):
            net(torch.rand(4, 9))
        torch.rand(3).sqrt()

    assert ("aten::sqrt", OUTSIDE) in {(name, place.module) for name, place in places(step)}


@ALONE
def test_module_hooks_are_registered_only_while_recording() -> None:
    before = len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)
    net = Net()
    with rekindle.budget("1MiB") as run:
        assert (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)) == before
        net(torch.rand(4, 8))
    assert run._driver.places is None
    places(lambda: net(torch.rand(4, 8)))
    assert (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)) == before


def test_report_of_recorded_run_lists_time_by_module() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)])
    batch = torch.rand(256, 64)
    activations, weights = 24 * 256 * 64 * 4, 12 * 65 * 64 * 4
    with rekindle.budget(2 * weights + activations // 5, record=True) as run:
        net(batch).sum().backward()
    report = run.report()
    assert run.recomputations > 0
    assert sum(row.times for row in report.recomputed) == run.recomputations
    assert sum(row.ns for row in report.recomputed) == run.recompute_ns
    assert {row.operator for row in report.recomputed} <= {"aten::addmm", "aten::tanh"}
    assert all(row.module.startswith("Sequential.") for row in report.recomputed)
    peak = report.at_peak
    for table in (peak.categories, peak.modules, peak.lines):
        assert sum(table.values()) == peak.memory
    totals = [sum(band) for band in zip(*report.timeline.bands.values(), strict=True)]
    assert max(totals) == report.peak == run.peak
    assert report.to_html().count("<section>") >= 6


class _Keeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.exp()
        return self.kept.sum()


def test_recording_does_not_keep_module_with_its_results_alive() -> None:
    """The results hold the autograd graph, through which Python's collector sees no cycles."""
    network = _Keeping()
    with rekindle.budget.unlimited(record=True):
        network(torch.rand(8, requires_grad=True))
    gone = weakref.ref(network)
    del network
    gc.collect()
    assert gone() is None
