"""Tests that nothing of a budget is read or kept after its end, also if the end raises."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

import rekindle
from rekindle.pytorch.online import leaves
from tests.pytorch import cores
from tests.pytorch.native.test_arena import lazily_free

NUMBERS = 1 << 18
NBYTES = 4 * NUMBERS

# -- memory that is read after it was freed --------------------------------------------------------

VERIFIED = """
import torch, rekindle
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
x = torch.randn(512, 256)
def step():
    model(x).square().mean().backward()
    model.zero_grad()
assert rekindle.verify(step, budget="4MiB").ok
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the tunables of glibc")
def test_end_of_verified_budget_reads_no_freed_memory() -> None:
    """The C library overwrites memory when it is freed, so that a later read of it crashes."""
    overwritten = {"MALLOC_PERTURB_": "165", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    done = subprocess.run(
        [sys.executable, "-c", VERIFIED], env=os.environ | overwritten,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- an end that raises ----------------------------------------------------------------------------


class Service:
    """An operator that works until the program breaks it."""

    error: BaseException | None = None
    times = 1_000_000  #: how often the error is raised

    @classmethod
    def double(cls, x: Tensor) -> Tensor:
        if cls.error is not None and cls.times > 0:
            cls.times -= 1
            raise cls.error
        return x * 2


@pytest.fixture
def _service() -> Iterator[None]:
    with torch.library._scoped_library("rekindle_endings", "FRAGMENT"):
        made = torch.library.custom_op("rekindle_endings::double", Service.double, mutates_args=())
        made.register_fake(torch.empty_like)
        made.register_autograd(lambda ctx, gradient: gradient * 2)
        yield
        Service.error, Service.times = None, 1_000_000


@pytest.mark.usefixtures("_service")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.evicts_anything
def test_end_of_budget_that_raises_gives_memory_back(error: type[BaseException]) -> None:
    core: Any = cores._core()
    weight = torch.ones(NUMBERS, requires_grad=True)
    within = rekindle.budget("1GiB", evict="anything", learn=False)
    run = within.__enter__()
    held = [torch.ops.rekindle_endings.double(weight + n) for n in range(4)]
    cores.evict_all(run._driver)
    assert run.evictions >= 4
    resident = torch.ones(NUMBERS)
    Service.error = error
    with pytest.raises(error):
        within.__exit__(None, None, None)
    Service.error = None
    others = core.arena()[0]
    large = [torch.ones(NUMBERS) for _ in range(4)]
    assert core.arena()[0] == others, "the arena still gives memory"
    del held, large, resident
    assert run.memory == weight.nbytes, "the budget does not notice that memory is freed"
    assert core.arena()[1] == 0, "the arena keeps freed memory"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("_service")
@pytest.mark.evicts_anything
def test_system_gets_free_memory_if_end_of_budget_raises() -> None:
    with rekindle.budget("1MiB"):
        torch.ones(100)  # the system has taken memory of earlier budgets, or this budget has it
    weight, before = torch.ones(NUMBERS), lazily_free()
    within = rekindle.budget("1GiB", evict="anything", learn=False)
    run = within.__enter__()
    held = [torch.ops.rekindle_endings.double(weight + n) for n in range(32)]
    cores.evict_all(run._driver)
    assert run.evictions >= len(held)
    Service.error = RuntimeError()
    with pytest.raises(RuntimeError):
        within.__exit__(None, None, None)
    assert lazily_free() <= before


@pytest.mark.usefixtures("_service")
@pytest.mark.evicts_anything
def test_no_tensor_is_lost_if_end_of_budget_raises() -> None:
    """An error that comes once costs nothing. After a lasting one, `run.keep` restores tensors."""
    double = torch.ops.rekindle_endings.double
    weight = torch.rand(1_000, requires_grad=True)
    wanted = double(weight).sin()

    def held_at_end(error: BaseException, times: int) -> None:
        with rekindle.budget("1GiB", evict="anything", learn=False) as run:
            kept[:] = [run, double(weight), double(weight).sin()]
            cores.evict_all(run._driver)
            Service.error, Service.times = error, times

    kept: list[Any] = []
    for error in (RuntimeError("once"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            held_at_end(error, 1)
        assert torch.equal(kept[2], wanted)
    with pytest.raises(RuntimeError) as caught:
        held_at_end(RuntimeError("lasts"), 1_000)
    assert any("run.keep(tensor)" in note for note in caught.value.__notes__)
    Service.error = None
    run, *tensors = kept
    for each in tensors:
        run.keep(each)
    assert torch.equal(tensors[1], wanted)


# -- many budgets that end at once -----------------------------------------------------------------


def test_saved_tensors_are_unpatched_after_many_graphs_die() -> None:
    """Python has 32 places for calls that C++ code asks it to make later."""
    gc.collect()
    others = cores._core().drivers_alive()  # other tests may keep graphs
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    losses = []
    for _ in range(40):
        with rekindle.budget("1MiB", learn=False):
            losses.append(model(torch.rand(16, 8)).square().mean())
    assert cores._core().drivers_alive() == others + len(losses)
    assert "saved_tensors" in vars(BackwardCFunction)
    losses.clear()
    gc.collect()
    assert cores._core().drivers_alive() == leaves._owners == others
    assert ("saved_tensors" in vars(BackwardCFunction)) == (others > 0)
