"""Tests of the arena: a budget's own CPU allocator.

It gives freed memory back to the operating system, so that the process stays near the budget.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.native import core, why_not

ROOT = Path(__file__).parents[3]
MIB = 2**20

pytestmark = pytest.mark.skipif(core() is None, reason=f"no native core: {why_not()}")


def live() -> int:
    """Return the bytes that the arena has mapped and that are in use."""
    return core().arena()[0]


def cached() -> int:
    """Return the bytes that the arena has mapped and that are free."""
    return core().arena()[1]


def most(budget: int) -> int:
    """Return the most bytes that the arena may map: 17/16 of the budget, plus 4 MiB."""
    return budget * 17 // 16 + 4 * MIB


def room(budget: int) -> int:
    """Return how many free bytes the arena may keep mapped within `budget`."""
    return max(0, most(budget) - live())


def deep(width: int) -> tuple[Callable[[], Tensor], nn.Module]:
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12)])
    batch = torch.randn(width, width)

    def step() -> Tensor:
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    return step, model


@pytest.mark.parametrize("arena", [True, False])
def test_budget_with_or_without_arena_matches_pytorch(arena: bool) -> None:
    step, model = deep(128)
    plain = [step(), *(each.grad.clone() for each in model.parameters())]
    with rekindle.budget("2200KiB", arena=arena) as run:
        ours = [step(), *(each.grad.clone() for each in model.parameters())]
    assert run.evictions > 0
    assert all(map(torch.equal, plain, ours))


def test_arena_maps_no_memory_after_end_of_budget() -> None:
    before = live()
    step, model = deep(64)
    with rekindle.budget("20MiB"):
        step()
        model.zero_grad()
        assert live() >= before
        assert cached() > 0
    assert (live(), cached()) == (before, 0)


def test_arena_memory_that_outlives_budget_stays_valid() -> None:
    before = live()
    with rekindle.budget("20MiB"):
        kept = [torch.full((size,), 3.0) for size in (1, 100, 5_000, 300_000)]
        small = [torch.full((16,), float(i)) for i in range(500)]
    after = live()
    assert after >= before + sum(each.nbytes for each in kept)
    assert all(bool((each == 3).all()) for each in kept)
    other = threading.Thread(target=kept.clear)
    other.start()
    other.join()
    assert live() <= after - 300_000 * 4
    assert all(float(each.sum()) == 16 * i for i, each in enumerate(small))
    with rekindle.budget("20MiB"):
        small.clear()
    assert (live(), cached()) == (before, 0)


@pytest.mark.parametrize("nbytes", [1, 64, 65, 16_384, 16_385, 1_000_001])
def test_arena_memory_is_aligned_and_disjoint(nbytes: int) -> None:
    with rekindle.budget("20MiB"):
        pieces = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(8)]
        addresses = [each.data_ptr() for each in pieces]
        ends = sorted((address, address + nbytes) for address in addresses)
    assert all(address % 64 == 0 for address in addresses)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_free_memory_of_arena_is_limited_by_budget() -> None:
    with rekindle.budget("8MiB") as run:
        for size in (100_000, 300_000, 500_000, 50_000, 700_000):
            torch.empty(size)
            assert cached() <= room(8 * MIB)
        run.budget = "2MiB"
        assert cached() <= room(2 * MIB)
        run.budget = "8MiB"


def test_memory_outside_of_arena_lowers_limit_of_arena() -> None:
    weight, before = torch.zeros(1_000_000, requires_grad=True), live()
    with rekindle.budget("8MiB"):
        weight.sum()  # these 4 MB count from the first operator that reads them
        torch.empty(900_000)
        (weight[:10] * 2).sum()
        torch.empty(200_000)
        assert weight.nbytes + live() - before + cached() <= most(8 * MIB)


def test_memory_of_earlier_budget_leaves_room_for_free_blocks() -> None:
    with rekindle.budget("20MiB"):
        kept = torch.ones(3_000_000)
    with rekindle.budget("8MiB"):
        torch.empty(900_000)
        assert cached() >= 900_000 * 4
    assert bool((kept == 1).all())


def test_used_memory_of_earlier_budget_lowers_limit_of_arena() -> None:
    with rekindle.budget("20MiB"):
        kept = torch.ones(1_000_000)
    before = live() - kept.nbytes
    with rekindle.budget("8MiB"):
        kept.sum()  # these 4 MB count from the first operator that reads them
        torch.empty(900_000)
        (kept[:10] * 2).sum()
        torch.empty(200_000)
        assert live() - before + cached() <= most(8 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_arena_in_full_small_budget_reuses_its_mapped_pages() -> None:
    """New tensors use memory that is still mapped, so the system maps few new pages."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(64, 64)
    batch = torch.randn(40, 8, 64)

    def step() -> None:
        cell.zero_grad()
        hidden = memory = torch.zeros(8, 64)
        for item in batch:
            hidden, memory = cell(item, (hidden, memory))
        hidden.sum().backward()

    with rekindle.budget("600KiB", learn=False) as run:
        for _ in range(6):
            step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert run.evictions > 0
    assert faults < 1_000


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_budget_around_each_step_reuses_mapped_pages() -> None:
    step, _ = deep(128)

    def faults(steps: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            with rekindle.budget("8MiB", learn=False):
                step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults(4)
    assert faults(10) < 1_000


def lazily_free() -> int:
    """Return the bytes that the system may take, and still counts as memory of the process."""
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    (row,) = (each for each in rows if each.startswith("LazyFree:"))
    return int(row.split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_memory_after_budget_is_left_to_the_system() -> None:
    with rekindle.budget("4MiB"):
        torch.ones(100)  # the system has taken memory of earlier budgets, or this budget has it
    before = lazily_free()
    with rekindle.budget("64MiB"):
        torch.ones(5_000_000)
    assert lazily_free() - before > 19_000_000
    assert cached() == 0
    with rekindle.budget("4MiB"):
        assert cached() <= room(4 * MIB)


@pytest.mark.parametrize("amount", [None, "20MiB"])
def test_budget_of_none_or_arena_false_uses_no_arena(amount: str | None) -> None:
    before = live()
    with rekindle.budget(amount, arena=False) if amount else rekindle.budget(None):
        kept = torch.ones(500_000)
        assert (live(), cached()) == (before, 0)
    del kept


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_report_shows_resident_memory_of_process() -> None:
    with rekindle.budget("64MiB") as run:
        kept = torch.ones(5_000_000)
        kept.sum()
    report = run.report()
    (row,) = (line for line in report.text().splitlines() if line.startswith("resident"))
    assert report.at_peak.resident > report.at_peak.memory + report.at_peak.cached
    assert "19.1 MiB counted" in row
    assert row.endswith("Python and libraries")
    assert type(report).from_json(report.to_json()) == report


def test_memory_from_before_budget_can_be_freed_inside_budget() -> None:
    before = [torch.ones(size) for size in (10, 1_000, 1_000_000)]
    with rekindle.budget("20MiB"):
        before.clear()
        again = torch.ones(1_000_000)
        again.untyped_storage().resize_(100)
    assert again.untyped_storage().nbytes() == 100


def test_torch_profiler_sees_memory_of_arena() -> None:
    with (
        rekindle.budget("20MiB"),
        torch.profiler.profile(profile_memory=True) as observed,
    ):
        torch.empty(300_000)
        torch.empty(16)
    events = [e for e in observed.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sorted(e.nbytes() for e in events) == [-1_200_000, -64, 64, 1_200_000]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_allocates_and_frees_without_arena() -> None:
    with rekindle.budget("20MiB"):
        kept = [torch.full((size,), 5.0) for size in (10, 400_000)]
        torch.empty(400_000)
        child = os.fork()
        if child == 0:
            sound = all(bool((each == 5).all()) for each in kept) and cached() == 0
            kept.clear()
            new = torch.ones(400_000)
            os._exit(0 if sound and float(new[0]) == 1 else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert all(bool((each == 5).all()) for each in kept)


PROGRAM = """
import json, resource, sys, torch, rekindle
import torch._dynamo  # PyTorch's meta kernels import it as soon as memory is short
from pathlib import Path
from tests.pytorch import networks
torch.set_num_threads(1)
torch.manual_seed(0)
name, budget = sys.argv[1], int(sys.argv[2])
with rekindle.budget("1MiB", learn=False):
    (torch.ones(3, requires_grad=True) * 2).sum().backward()

if name == "loop":  # https://github.com/pytorch/pytorch/issues/125591
    a, b, start = (torch.randn(200, 200, dtype=torch.float64) for _ in range(3))
    scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    def step():
        c, d = (a + scale * b) / a.norm(), start
        for _ in range(400):
            d = c @ d
            d = d / d.norm()
        (b.t() @ d).norm().backward()
elif name == "unet":
    model = networks.UNet(width=16, levels=3)
    batch = torch.randn(8, 1, 96, 96)
    def step():
        model.zero_grad()
        model(batch).square().mean().backward()
else:
    cell = torch.nn.LSTMCell(64, 256)
    x = torch.randn(200, 64, 64)
    def step():
        cell.zero_grad()
        h = c = torch.zeros(64, 256)
        for one in x:
            h, c = cell(one, (h, c))
        h.square().mean().backward()

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
with rekindle.budget(budget, arena=sys.argv[3] == "arena", learn=False) as run:
    for _ in range(2):
        step()
print(json.dumps({"growth": resident("VmHWM") - before, "evictions": run.evictions}))
"""


def growth(name: str, budget: int, how: str) -> int:
    command = [sys.executable, "-c", PROGRAM, name, str(budget), how]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=600,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["evictions"] > 0
    return found["growth"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "budget"), [("loop", 30 * MIB), ("lstm", 30 * MIB), ("unet", 50 * MIB)]
)
def test_resident_memory_grows_by_little_more_than_the_budget(name: str, budget: int) -> None:
    """Without the arena, the allocator of the C library makes it grow by more."""
    assert growth(name, budget, "arena") <= 1.08 * budget + 32 * MIB
    assert growth(name, budget, "malloc") > 1.08 * budget + 32 * MIB
