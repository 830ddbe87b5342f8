"""Tests of `evict="anything"`: user-held values are evicted, and recomputed on access."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle import Run
from rekindle.pytorch.held import _threads
from tests.differ.judge import smallest
from tests.helpers import combined, name_of, sampled
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.cores import evicting_before_every_operator
from tests.pytorch.harsh import harshest
from tests.pytorch.held.placeholders import HOME, UNREADABLE, empty, is_empty, unseen_by_the_core
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.sweep import _everything
from tests.pytorch.test_models import left_by, plainly, train
from tests.pytorch.tracker import Tracker, measure

NUMBERS = 10_000
STEPS, NBYTES = 40, 4 * NUMBERS


def pipeline(steps: int = 20) -> list[Tensor]:
    """Run inference, and return all intermediate results in a list."""
    torch.manual_seed(20)
    x, kept = torch.randn(NUMBERS), []
    with torch.no_grad():
        for _ in range(steps):
            x = torch.tanh(F.dropout(x * 1.5, 0.1)) + 0.1
            kept.append(x)
    return kept


def test_no_grad_pipeline_fits_with_evict_anything() -> None:
    wanted = pipeline()
    with Tracker(resized=True) as tracker, rekindle.budget(8 * NBYTES, evict="anything") as run:
        kept = pipeline()
        assert empty(kept) >= 12
        sums = [x.sum() for x in kept]
        inside = tracker.peak  # at the end of the budget all values are recomputed
    assert inside <= 8 * NBYTES
    assert run.peak <= 8 * NBYTES
    assert run.recomputations > 0
    assert empty(kept) == 0  # the budget has ended
    assert all(torch.equal(*pair) for pair in zip(kept, wanted, strict=True))
    assert all(torch.equal(a, b.sum()) for a, b in zip(sums, wanted, strict=True))
    run._driver.engine.check()
    assert run.memory == sum(HOME(x).nbytes() for x in [*kept, *sums])


def test_no_grad_pipeline_without_evict_anything_does_not_fit() -> None:
    with rekindle.budget(8 * NBYTES), pytest.raises(rekindle.OutOfBudget):
        pipeline()


def test_evict_anything_under_inference_mode_matches_pytorch() -> None:
    wanted = pipeline()
    with rekindle.budget(8 * NBYTES, evict="anything"), torch.inference_mode():
        kept = pipeline()
        assert empty(kept) >= 12
    assert all(torch.equal(*pair) for pair in zip(kept, wanted, strict=True))
    assert all(x.is_inference() for x in kept)


def test_views_of_evicted_value_have_its_recomputed_contents() -> None:
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(NUMBERS) * 3
        rows, odd, same = x.view(100, 100), x[1::2], x.detach()
        _everything.evict_all(run)
        assert is_empty(x)
        assert HOME(rows) is HOME(odd) is HOME(same) is HOME(x)
        assert rows[7, 7].item() == 3.0
        _everything.evict_all(run)
        assert odd.sum().item() == 3 * NUMBERS / 2
    assert same.eq(3).all()


def test_in_place_write_to_evicted_value_matches_pytorch() -> None:
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(NUMBERS) * 3
        twice = x * 2
        _everything.evict_all(run)
        x[:5].add_(1)
        _everything.evict_all(run)
        assert is_empty(x)
        assert is_empty(twice)
    assert x[:6].tolist() == [4, 4, 4, 4, 4, 3]
    assert twice.eq(6).all()


def test_deleting_the_variable_of_evicted_value_frees_its_record() -> None:
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(NUMBERS) * 3
        y = x.exp()
        watch = weakref.ref(HOME(x))
        _everything.evict_all(run)
        del x
        assert watch() is None
        assert y[0].item() == pytest.approx(20.085536)
        del y
        assert run.memory == 0
        run._driver.engine.check()


# -- training --------------------------------------------------------------------------------------


def skips(layers: int = 5) -> Callable[[], Any]:
    """A small U-Net: every hidden state is held until the decoder reads it."""
    down = nn.ModuleList(nn.Linear(20, 20) for _ in range(layers))
    up = nn.ModuleList(nn.Linear(40, 20) for _ in range(layers))
    x = torch.randn(400, 20)

    def step() -> Any:
        hidden, held = x, []
        for layer in down:
            hidden = F.relu_(F.dropout(layer(hidden), 0.2))
            held.append(hidden)
        for layer in up:
            hidden = torch.tanh(layer(torch.cat([hidden, held.pop()], 1)))
        loss = hidden.square().mean()
        loss.backward()
        return loss.detach(), down, up

    return step


def test_evicting_user_held_skip_connections_lowers_budget() -> None:
    smallest = {evict: harshest(skips, evict=evict).budget for evict in ("saved", "anything")}
    assert smallest["anything"] < 0.7 * smallest["saved"]


def held_in_place() -> Callable[[], Any]:
    """A value held by a variable is written in place, and again through a view."""
    weight = torch.randn(60, 60, requires_grad=True)
    x = torch.randn(200, 60)

    def step() -> Any:
        held = [x @ weight]
        for number in range(6):
            hidden = held[-1] @ weight / 8
            hidden[number].mul_(2)
            held.append(torch.relu_(hidden))
        loss = torch.stack([h.square().mean() * h.sum() for h in held]).sum()
        loss.backward()
        return loss.detach(), weight, held

    return step


def test_user_held_values_written_in_place_match_pytorch() -> None:
    harshest(held_in_place, evict="anything")


def unrolled() -> list[Tensor]:
    """Hold every state of a recurrent network, whose weight gradients sum over all time steps."""
    torch.manual_seed(20)
    weight, x = torch.randn(100, 100, requires_grad=True), torch.randn(20, 100)
    hidden, held = x, []
    for _ in range(STEPS):
        hidden = torch.tanh(F.layer_norm(hidden @ weight, (100,)))
        held.append(hidden)
    loss = torch.stack([each.square().mean() for each in held]).sum()
    loss.backward()
    assert weight.grad is not None
    return [loss.detach(), weight.grad]


def test_gradients_are_evicted_after_other_user_held_values() -> None:
    """Policies would evict the gradient first, because it is large and was not used for long.

    But a recomputation of it needs many values, so it stays.
    """
    plain = measure(unrolled)
    wanted = unrolled()
    with rekindle.budget(plain.budget(0.7), evict="anything") as run:
        got = unrolled()
    again = cores.recomputed(run._driver)
    assert again.total() > 20
    backward = [name for name in again if "backward" in name or name in ("add", "add_", "mul")]
    assert backward == [], "a gradient was computed again"
    # `mm` computes hidden states, and gradients of the weight: only the former are recomputed
    assert again["mm"] <= max(again["native_layer_norm"], STEPS)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "fraction"), sampled(combined(ALL_CASES, (0.3, 0.5, 0.7, 1.0)), 4), ids=name_of
)
def test_models_with_evict_anything_match_pytorch(case: Case, fraction: float) -> None:
    plain = plainly(case)

    def attempt(budget: int) -> tuple[dict[str, Any], Run]:
        workload, tracker = case.build(), Tracker(resized=True)
        with tracker, rekindle.budget(budget, evict="anything") as run:
            losses = train(workload)
            assert tracker.peak <= budget
        return left_by(workload, losses), run

    budget = plain.measured.budget(fraction)
    (left, run), *_ = smallest(attempt, budget, most=12, suggestion="worth_trying")
    assert differing(left, plain.outcome) == []
    run._driver.engine.check()


# -- afterwards ------------------------------------------------------------------------------------


def test_user_held_values_are_readable_after_exception() -> None:
    wanted = pipeline()
    kept: list[Tensor] = []

    def interrupted() -> None:
        with rekindle.budget(8 * NBYTES, evict="anything"):
            kept.extend(pipeline())
            assert empty(kept) >= 12
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert all(torch.equal(*pair) for pair in zip(kept, wanted, strict=True))


def test_user_held_values_are_readable_after_out_of_budget() -> None:
    kept: list[Tensor] = []

    def too_much() -> None:
        with rekindle.budget(8 * NBYTES, evict="anything", split="never"):
            kept.extend(pipeline())
            torch.cat(kept)

    with pytest.raises(rekindle.OutOfBudget):
        too_much()
    assert all(torch.equal(*pair) for pair in zip(kept, pipeline(), strict=True))


def test_reading_evicted_value_with_changed_source_raises() -> None:
    constant = torch.ones(NUMBERS)
    kept: list[Tensor] = []

    def overwritten() -> None:
        with rekindle.budget(1 << 30, evict="anything") as run:
            kept.extend((constant * 2, torch.ones(NUMBERS) * 5))
            _everything.evict_all(run)
            with torch._C._DisableTorchDispatch(), unseen_by_the_core():
                constant.add_(1)  # Rekindle does not observe this write

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwritten()
    x, y = kept
    assert y.eq(5).all()
    with pytest.raises(RuntimeError, match=UNREADABLE):
        x.sum()


def test_end_of_budget_restores_patched_tensor_methods() -> None:
    names = ("numpy", "data_ptr", "tolist", "untyped_storage", "__repr__")
    before = [getattr(Tensor, name) for name in names]
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    apply = torch.autograd.Function.apply
    with rekindle.budget(8 * NBYTES, evict="anything") as run:
        kept = pipeline()
    assert [getattr(Tensor, name) for name in names] == before
    assert "numpy" not in vars(Tensor)
    assert threading.Thread._bootstrap_inner is begin  # type: ignore[attr-defined]
    assert torch.autograd.Function.apply == apply
    assert hasattr(Tensor, "__dlpack_c_exchange_api__")
    driver = weakref.ref(run._driver)
    gc.disable()
    try:
        del run, kept
        assert driver() is None
    finally:
        gc.enable()


def test_backward_after_budget_of_evict_anything_matches_pytorch() -> None:
    def step() -> tuple[Tensor, Tensor]:
        torch.manual_seed(20)
        weight = torch.randn(NUMBERS, requires_grad=True)
        x = weight
        for _ in range(10):
            x = torch.sin(x * 2)
        return x, weight

    wanted, plain = step()
    wanted.sum().backward()
    with rekindle.budget(12 * NBYTES, evict="anything") as run:
        result, weight = step()
    assert run.evictions > 0
    result.sum().backward()
    assert weight.grad is not None
    assert plain.grad is not None
    assert torch.equal(weight.grad, plain.grad)


# -- values that only a long chain of operators could recompute ------------------------------------


@contextmanager
def longest_chain(calls: int) -> Iterator[None]:
    """While the context is open, let no value depend on a chain of more than `calls` operators.

    A value at the end of such a chain loses its recipe, and stays in memory.
    """
    cores.tune(lambda driver: driver.core.longest_chain(driver.handle, calls))
    yield
    cores.tune_no_more()


@longest_chain(50)
def test_running_mean_over_many_steps_does_not_grow_bookkeeping() -> None:
    with rekindle.budget(1 << 30, evict="anything") as run, torch.no_grad():
        mean = torch.zeros(10)
        counts = []
        for number in range(400):
            mean = 0.9 * mean + 0.1 * torch.full((10,), float(number))
            counts.append(len(list(run._driver.engine.storages)))
    assert max(counts[200:]) <= max(counts[:200])


@longest_chain(10)
def test_long_chain_without_autograd_pins_every_eleventh_value() -> None:
    with rekindle.budget(1 << 30, evict="anything") as run, torch.no_grad():
        results = [torch.ones(10)]
        for _ in range(44):
            results.append(results[-1] + 1)
        _everything.evict_all(run)
        kept = [i for i, x in enumerate(results) if not is_empty(x)]
    assert kept == [10, 21, 32, 43]


def test_batches_that_only_a_running_mean_needs_are_freed() -> None:
    """Only the recipe of the mean holds the batches. Together they do not fit into the budget."""
    with rekindle.budget(24 * NBYTES, evict="anything") as run, torch.no_grad():
        mean = torch.zeros(NUMBERS)
        for number in range(60):
            batch = torch.from_numpy(_counting(number))
            mean = 0.9 * mean + 0.1 * batch
            del batch
    assert run.peak <= 24 * NBYTES
    wanted = torch.zeros(NUMBERS)
    for number in range(60):
        wanted = 0.9 * wanted + 0.1 * torch.from_numpy(_counting(number))
    assert torch.equal(mean, wanted)


def _counting(number: int) -> Any:
    return torch.arange(number, number + NUMBERS, dtype=torch.float32).numpy().copy()


# -- threads ---------------------------------------------------------------------------------------


def test_thread_started_inside_reads_evicted_value() -> None:
    found: list[float] = []
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(NUMBERS) * 3
        _everything.evict_all(run)
        thread = threading.Thread(target=lambda: found.append((x * 2).sum().item()))
        thread.start()
        thread.join()
    assert found == [6.0 * NUMBERS]


def test_user_held_values_are_pinned_while_other_thread_runs() -> None:
    """Rekindle does not see the operators of the other thread, which could read freed memory."""
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(200, NUMBERS) * 3
        wrong: list[float] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                total = x.sum().item()
                wrong.extend([total] if total != 600 * NUMBERS else [])

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(20):
            _everything.evict_all(run)
            x[0, 0].item()
        done.set()
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("earlier", [False, True])
def test_user_held_values_are_pinned_while_outside_thread_lives(earlier: bool) -> None:
    """With `earlier`, the thread was started within another budget, which has ended."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait(60))
    with rekindle.budget(1 << 30) if earlier else nullcontext():
        thread.start()
    try:
        with rekindle.budget(1 << 30, evict="anything") as run:
            x = torch.ones(NUMBERS) * 3
            _everything.evict_all(run)
            assert not is_empty(x)
            stop.set()
            thread.join()
            torch.ones(1)  # the next operator notices that the thread has ended
            _everything.evict_all(run)
            assert is_empty(x)
        (line,) = [each for each in run.report().advice if "thread" in each]
        assert f"started by {__name__}" in line
    finally:
        stop.set()
        thread.join()


def test_user_held_values_are_pinned_while_pool_of_threads_lives() -> None:
    """The pool runs functions of the program, unlike other threads of `multiprocessing`."""
    with ThreadPool(1) as pool:
        pool.apply(int)
        with rekindle.budget(1 << 30, evict="anything") as run:
            x = torch.ones(NUMBERS) * 3
            _everything.evict_all(run)
            assert not is_empty(x)
            assert pool.apply(lambda: x.sum().item()) == 3 * NUMBERS
        pool.close()
        pool.join()


def test_values_that_program_unpacks_itself_stay_evictable() -> None:
    """Outside of a backward pass no kernel reads them without an operator."""
    x = torch.randn(NUMBERS, requires_grad=True)
    with rekindle.budget(6 * x.nbytes, evict="anything", learn=False):
        made = [x]
        for _ in range(20):
            made.append(made[-1].tanh())
        for before, after in pairwise(made):
            saved = after.grad_fn._saved_result.detach()  # type: ignore[union-attr]
            assert torch.equal(saved, before.detach().tanh())


def test_user_held_values_are_evicted_despite_harmless_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_threads, "HARMLESS", (*_threads.HARMLESS, __name__))
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait(60))
    thread.start()
    try:
        with rekindle.budget(1 << 30, evict="anything") as run:
            x = torch.ones(NUMBERS) * 3
            _everything.evict_all(run)
            assert is_empty(x)
        assert not [each for each in run.report().advice if "thread" in each]
    finally:
        stop.set()
        thread.join()


def test_user_held_values_are_evicted_despite_compiler_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's thread pool still exists after the compilation."""
    from torch._inductor import async_compile

    # if an earlier test compiled code, end the compiler's thread pool
    if async_compile.AsyncCompile.pool.cache_info().currsize:
        async_compile.AsyncCompile.pool().shutdown()
        async_compile.AsyncCompile.pool.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(async_compile.AsyncCompile, "pool", lru_cache(lambda: pool))
        pool.submit(int).result()
        with rekindle.budget(1 << 30, evict="anything") as run:
            x = torch.ones(NUMBERS) * 3
            _everything.evict_all(run)
            assert not is_empty(x)  # the thread is not known as Inductor's before `pool()` below
            torch.ones(1)
        assert async_compile.AsyncCompile.pool() is pool
        with rekindle.budget(1 << 30, evict="anything") as run:
            x = torch.ones(NUMBERS) * 3
            _everything.evict_all(run)
            assert is_empty(x)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_evicted_tensor_read_in_forked_process_raises() -> None:
    with rekindle.budget(1 << 30, evict="anything") as run:
        x = torch.ones(NUMBERS) * 3
        _everything.evict_all(run)
        child = os.fork()
        if child == 0:
            outcome = 1
            try:
                x.sum()
            except RuntimeError:
                outcome = 7
            finally:  # otherwise the child would run the remaining tests
                os._exit(outcome)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
    assert x.eq(3).all()


# -- refused ---------------------------------------------------------------------------------------


def test_unknown_evict_argument_is_refused() -> None:
    with pytest.raises(rekindle.InvalidArgument, match='evict="anything"'):
        rekindle.budget("1GiB", evict="everything")  # type: ignore[arg-type]


def test_budget_with_evict_saved_replaces_no_tensor_methods() -> None:
    apply = torch.autograd.Function.apply
    with rekindle.budget("1GiB", evict="saved"):
        assert "data_ptr" not in vars(Tensor)
        assert torch.autograd.Function.apply == apply


def test_fused_optimizer_step_with_grad_scaler_matches_pytorch() -> None:
    """The scaler stores tensors in the optimizer, which the forecast of its step must read."""
    weight = torch.ones(100, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with evicting_before_every_operator(), rekindle.budget(1 << 30, evict="anything"):
        scaler.scale((weight * 3).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.detach().allclose(torch.full((100,), 1 - 0.1 * 0.01 - 0.1))
