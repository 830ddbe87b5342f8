"""Tests of rule R9 (everything else runs once): no thread of the program sees a recomputation.

A second thread draws random numbers and reads PyTorch's settings while the main thread recomputes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import rekindle
from tests.pytorch.harsh import WIDTH

PATIENCE_S = 60.0


@contextmanager
def beside(work: Callable[[], object], *, once: bool = False) -> Iterator[list[Any]]:
    """Run `work` again and again in a thread while the block runs. Yield its results."""
    over, found, failed = threading.Event(), list[Any](), list[BaseException]()

    def run() -> None:
        try:
            while not over.is_set():
                found.append(work())
                if once:
                    break
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]


# -- generators ------------------------------------------------------------------------------------


class Noisy:
    """An operator whose body draws random numbers, and may wait for another thread before."""

    waits: Callable[[], None] | None = None

    @classmethod
    def noise(cls, x: Tensor) -> Tensor:
        if cls.waits is not None:
            cls.waits()
        return x * torch.rand(x.shape) + torch.randn_like(x)


@pytest.fixture
def _noisy() -> Iterator[None]:
    with torch.library._scoped_library("rekindle_noisy", "FRAGMENT"):
        made = torch.library.custom_op(
            "rekindle_noisy::noise", Noisy.noise, mutates_args=(),
            tags=(torch.Tag.nondeterministic_seeded,),
        )  # fmt: skip
        made.register_fake(torch.empty_like)
        made.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda **_: None)
        yield
        Noisy.waits = None


@pytest.mark.usefixtures("_noisy")
def test_thread_draws_beside_recomputed_random_body() -> None:
    """While the body waits, another thread draws from the default generator."""

    def step(run: rekindle.Run | None = None) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        weight = torch.ones(WIDTH, requires_grad=True)
        noise = torch.ops.rekindle_noisy.noise(weight)
        loss = (noise * weight.sin()).sum()
        del noise
        if run is None:
            drawn = torch.rand(5)
        else:
            run._driver.core.evict_all(run._driver.handle)
            asked, drew = threading.Event(), queue.Queue[Tensor]()

            def draw() -> None:
                assert asked.wait(PATIENCE_S)
                drew.put(torch.rand(5))

            def waits() -> None:
                if not asked.is_set():
                    asked.set()
                    answers.append(drew.get(timeout=PATIENCE_S))

            answers: list[Tensor] = []
            Noisy.waits = waits
            with beside(draw, once=True):
                loss.backward()
            (drawn,) = answers
        if run is None:
            loss.backward()
        assert weight.grad is not None
        return weight.grad, drawn, torch.rand(5)

    wanted = step()
    with rekindle.budget("1GiB", learn=False, evict="saved") as run:
        found = step(run)
    assert run.recomputations > 0
    assert all(map(torch.equal, found, wanted))


def _drawn_by_argument(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.randn(x.numel(), generator=generator)


_DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(9, x.shape).float(),
    "randperm": lambda x: torch.randperm(x.numel()).float(),
    "dropout": functional.dropout,
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.detach() * 0 + 0.5),
    "multinomial": lambda x: torch.multinomial(x.detach().abs(), x.numel(), True).float(),
    "poisson": lambda x: torch.poisson(x.detach().abs()),
    "normal": lambda x: torch.normal(x.detach(), 1.0),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "gamma": torch._standard_gamma,
}


@pytest.mark.parametrize("name", [*_DRAWN, "own generator"])
def test_state_of_generator_never_changes_in_recomputation(name: str) -> None:
    """Another thread reads the state all the time, and finds the same one."""
    generator = torch.Generator() if name == "own generator" else torch.default_generator
    draw = _DRAWN.get(name) or _drawn_by_argument(generator)

    def loss() -> tuple[Tensor, Tensor]:
        generator.manual_seed(2)
        weight = torch.ones(30_000, requires_grad=True)
        total = torch.zeros(())
        for _ in range(8):
            noise = draw(weight)
            total = total + (noise * weight.sin()).sum()
        return total, weight

    wanted, weight = loss()
    wanted.backward()
    begin, state = threading.Event(), list[Tensor]()

    def stays() -> bool:
        assert begin.wait(PATIENCE_S)
        return torch.equal(generator.get_state(), state[0])

    # The thread starts outside of the budget, which therefore never makes it wait.
    with beside(stays) as same, rekindle.budget("1GiB", learn=False, evict="saved") as run:
        found, other = loss()
        run._driver.core.evict_before_every_op(run._driver.handle, True)
        state.append(generator.get_state())
        begin.set()
        found.backward()
        run._driver.core.evict_before_every_op(run._driver.handle, False)
    assert torch.equal(found, wanted)
    assert weight.grad is not None
    assert other.grad is not None
    assert torch.equal(other.grad, weight.grad)
    assert all(same)
    assert run.recomputations >= 8


def test_draws_of_thread_in_budget_match_its_own_recomputation() -> None:
    """Two threads draw from one generator. Each recomputes the numbers that it has drawn."""

    def differs() -> float:
        weight = torch.ones(2_000, requires_grad=True)
        noise = torch.rand(2_000)
        seen = noise.clone()
        loss = (noise * weight.sin()).sum()
        del noise
        loss.backward()
        with torch.no_grad():
            return float((weight.grad - seen * weight.cos()).abs().max())

    with rekindle.budget("1GiB", learn=False, evict="saved") as run:
        run._driver.core.evict_before_every_op(run._driver.handle, True)
        with beside(differs) as one, beside(differs) as other:
            mine = [differs() for _ in range(40)]
        run._driver.core.evict_before_every_op(run._driver.handle, False)
    assert run.recomputations > 40
    assert max([*mine, *one, *other]) == 0.0


# -- settings --------------------------------------------------------------------------------------

LAYERS = 8
_C: Any = torch._C
_MATMUL: Any = torch.backends.mkldnn.matmul


def seen() -> dict[str, object]:
    """Return the settings that a thread sees."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "dtype of a result": (torch.arange(3) / 2).dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "oneDNN": _C._get_mkldnn_enabled(),
        "deterministic oneDNN": _C._get_mkldnn_deterministic(),
        "NNPACK": _C._get_nnpack_enabled(),
        "half": _C._get_cpu_allow_fp16_reduced_precision_reduction(),
        "precision": _MATMUL.fp32_precision,
        "flushes": 5e-324 * 1.0 == 0.0,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": len(_get_current_dispatch_mode_stack()),
        "function modes": _C._len_torch_function_stack(),
    }


@contextmanager
def _set(put: Callable[[Any], Any], value: object, before: object) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


Setting = Callable[[], AbstractContextManager[Any]]
SETTINGS: dict[str, Setting] = {
    "none": lambda: torch.enable_grad(),
    "threads": lambda: _set(torch.set_num_threads, 2, torch.get_num_threads()),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "oneDNN": lambda: _set(_C._set_mkldnn_enabled, False, True),
    "precision": lambda: _set(
        lambda value: setattr(_MATMUL, "fp32_precision", value), "bf16", _MATMUL.fp32_precision
    ),
    "default type": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("inside", [True, False], ids=["of budget", "outside"])
@pytest.mark.parametrize("name", SETTINGS)
def test_thread_beside_recomputation_sees_same_settings(name: str, inside: bool) -> None:
    """The forward pass ran under another setting, with which its values are recomputed."""
    begin, own = threading.Event(), torch.Generator().manual_seed(3)
    numbers = own.clone_state()

    def look() -> tuple[dict[str, object], float]:
        begin.wait(PATIENCE_S)
        return seen(), torch.rand(1, generator=own).item()

    def loss() -> tuple[Tensor, Tensor]:
        torch.manual_seed(4)
        weight = torch.rand(40, 40, dtype=torch.float32).requires_grad_()
        with SETTINGS[name]():
            x = weight
            for _ in range(LAYERS):
                x = functional.dropout((x @ weight) * 0.05, 0.1).tanh()
        return x.sum(), weight

    wanted, weight = loss()
    wanted.backward()
    within = rekindle.budget("1GiB", learn=False, evict="saved")
    run = within.__enter__() if inside else None
    with beside(look) as found:
        run = within.__enter__() if run is None else run
        result, other = loss()
        core, handle = run._driver.core, run._driver.handle
        core.evict_before_every_op(handle, True)
        now = seen()
        begin.set()
        result.backward()
        core.evict_before_every_op(handle, False)
        within.__exit__(None, None, None)
    assert run.recomputations > 3 * LAYERS
    assert other.grad is not None
    assert weight.grad is not None
    assert torch.equal(other.grad, weight.grad)
    assert [each for each, _ in found if each != now] == []
    assert [drawn for _, drawn in found] == [torch.rand(1, generator=numbers).item() for _ in found]


def test_number_of_threads_after_recomputation_is_programs() -> None:
    """The recomputing thread has two threads for its operators, the program has said one."""
    tasks, done, counts = queue.Queue[Tensor](), threading.Event(), list[int]()

    def work() -> None:
        torch.ones(10).sum()  # from now on this thread has two
        counts.append(torch.get_num_threads())
        done.set()
        tasks.get(timeout=PATIENCE_S).backward()
        counts.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weight = torch.rand(100, 100, requires_grad=True)
        with rekindle.budget("1GiB", learn=False, evict="saved") as run:
            thread = threading.Thread(target=work)
            thread.start()
            assert done.wait(PATIENCE_S)
            torch.set_num_threads(1)
            h = weight
            for _ in range(6):
                h = (h @ weight).tanh()
            run._driver.core.evict_before_every_op(run._driver.handle, True)
            tasks.put(h.sum())
            thread.join()
            run._driver.core.evict_before_every_op(run._driver.handle, False)
            with beside(torch.get_num_threads, once=True) as found:
                pass
    finally:
        torch.set_num_threads(before)
    assert run.recomputations > 6
    assert found == [1]
    assert counts == [2, 2]
