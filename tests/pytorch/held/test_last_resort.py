"""Tests of `evict="auto"`: user-held values are evicted only if nothing else is left."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle._errors import InvalidSchedule
from rekindle.schedule import verify
from tests.helpers import name_of, sampled
from tests.pytorch import cores
from tests.pytorch.harsh import harshest
from tests.pytorch.held.placeholders import ADDRESS, UNREADABLE, is_empty, unseen_by_the_core
from tests.pytorch.held.test_anything import skips
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.sweep import _everything
from tests.pytorch.test_models import differing, everything, plainly, train
from tests.pytorch.tracker import Tracker, measure

ROWS = 400
NBYTES = 4 * 20 * ROWS  #: of one hidden state


def lending(amount: int, **options: Any) -> rekindle.budget:
    return rekindle.budget(amount, evict="auto", **options)


def layers(n: int = 6) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """Hidden states in a list, each made from the one before; and what they are made from."""
    torch.manual_seed(20)
    weight = torch.randn(ROWS, 20, requires_grad=True)

    def run() -> list[Tensor]:
        kept, x = [], weight
        for _ in range(n):
            x = torch.tanh(x * 1.5)
            kept.append(x)
        return kept

    return run, weight


# -- what it is for --------------------------------------------------------------------------------


def states() -> Callable[[], Any]:
    """Hidden states that are looked at once more when the loss is there."""
    torch.manual_seed(20)
    weight = torch.randn(ROWS, 20, requires_grad=True)

    def step() -> Any:
        kept, parts, x = [], [], weight
        for _ in range(20):
            x = torch.tanh(x * 1.5)
            kept.append(x)
            parts.append(x.square().mean())
        loss = torch.stack(parts).sum()
        means = [x.detach().mean() for x in kept]
        loss.backward()
        return loss.detach(), means, weight

    return step


def test_user_held_lists_are_evicted_last() -> None:
    plain = measure(states()).peak
    budget = harshest(states, evict="auto").budget
    assert budget < 0.6 * plain
    within = rekindle.budget(int(0.9 * plain), evict="saved")
    with pytest.raises(rekindle.OutOfBudget), within:
        states()()


def test_user_held_skips_are_evicted_last() -> None:
    """The gradients of the skips are left, which wait for their turn."""
    with cores.fixed_prices():
        smallest = {evict: harshest(skips, evict=evict).budget for evict in ("saved", "auto")}
    assert smallest["auto"] <= smallest["saved"] - NBYTES


def test_budget_of_last_resort_is_too_small_for_saved() -> None:
    budget = harshest(skips, evict="auto").budget
    with lending(budget) as run:
        skips()()
    assert run.peak <= budget
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(budget, evict="saved"):
        skips()()


def test_auto_with_enough_room_acts_as_saved() -> None:
    """A budget that does without is kept in the same way, action by action."""
    with cores.fixed_prices():
        peak = measure(skips()).peak
        with rekindle.budget(None):
            skips()()
        actions = {}
        for evict in ("saved", "auto"):
            with rekindle.budget(int(0.7 * peak), evict=evict, record=True) as run:
                skips()()
            actions[evict] = run.record.actions
            assert run.evictions > 0
    assert actions["saved"] == actions["auto"]


#: But the LSTM: each of its steps is made from all before it, which takes minutes.
_QUICK_CASES = [case for case in ALL_CASES if case.name != "lstm"]


@pytest.mark.filterwarnings("ignore:recomputation took")  # on a slow machine it is too much
@pytest.mark.parametrize("case", sampled(_QUICK_CASES, 3), ids=name_of)
def test_models_train_the_same_with_everything_evicted(case: Case) -> None:
    workload = case.build()
    with lending(1 << 40) as run:
        driver: Any = run._driver
        driver.core.let_go_of_everything(driver.handle, True)
        losses = train(workload)
    assert run.recomputations > 1_000
    run._driver.engine.check()
    assert differing(everything(workload, losses), plainly(case).outcome) == []


# -- what is read stays ----------------------------------------------------------------------------


def test_operands_stay_while_room_is_made_for_their_operator() -> None:
    run_layers, weight = layers(3)
    wanted = torch.cat(run_layers(), 1).sum().item()
    with lending(4 * NBYTES + 3 * NBYTES) as run:  # the operands, and what is made of them
        kept = run_layers()
        assert torch.cat(kept, 1).sum().item() == wanted
    assert run.peak <= 7 * NBYTES
    assert weight.grad is None


def test_recomputed_value_is_evicted_again() -> None:
    with lending(1 << 30) as run:
        kept = layers()[0]()
        _everything.let_go(run)
        assert all(map(is_empty, kept))
        first = kept[-1].sum().item()
        assert not is_empty(kept[-1])
        _everything.let_go(run)
        assert is_empty(kept[-1])
        assert kept[-1].sum().item() == first
        run._driver.engine.check()


def test_set_from_evicted_tensor_reads_its_bytes() -> None:
    """`set_` is no operator like others: what it looked at was gone."""
    wanted = layers()[0]()
    with lending(1 << 30) as run:
        kept = layers()[0]()
        _everything.let_go(run)
        assert is_empty(kept[1])
        assert is_empty(kept[4])
        kept[1].set_(kept[4])
        _everything.let_go(run)
        assert torch.equal(kept[1].detach(), wanted[4])
        assert torch.equal(kept[4].detach(), wanted[4])
        assert torch.equal(kept[5].detach(), wanted[5])
        run._driver.engine.check()


def test_views_writes_and_lookers() -> None:
    wanted = layers()[0]()
    with lending(1 << 30) as run:
        kept = layers()[0]()
        rows, odd = kept[2].view(-1), kept[3].detach()[1::2]
        for look in (
            lambda: torch.equal(rows, wanted[2].view(-1)),
            lambda: torch.equal(odd, wanted[3][1::2]),
            lambda: kept[1].tolist() == wanted[1].tolist(),
            lambda: repr(kept[1]) == repr(wanted[1]),
            lambda: kept[4][3, 5].item() == wanted[4][3, 5].item(),
            lambda: torch.equal(kept[0].detach().add_(1), wanted[0] + 1),
            lambda: torch.equal(kept[0], wanted[0] + 1),
        ):
            _everything.let_go(run)
            assert is_empty(kept[5])
            assert look()
            _everything.let_go(run)
    assert not any(map(is_empty, kept))


@pytest.mark.parametrize(
    "escape",
    [
        lambda x: x.data_ptr(),
        lambda x: x.untyped_storage(),
        lambda x: x.detach().numpy(),
        lambda x: torch.utils.dlpack.to_dlpack(x.detach()),
    ],
    ids=["data_ptr", "untyped_storage", "numpy", "dlpack"],
)
def test_value_with_escaped_address_is_pinned(escape: Callable[[Tensor], object]) -> None:
    with lending(1 << 30) as run:
        kept = layers()[0]()
        _everything.let_go(run)
        given = escape(kept[2])
        assert not is_empty(kept[2])
        _everything.let_go(run)
        assert [is_empty(x) for x in kept] == [True, True, False, True, True, True]
        del given


def test_operands_of_custom_functions_are_pinned() -> None:
    """Their kernels read the operands by address, which nothing observes."""
    seen: list[bool] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            _everything.let_go(run)
            seen.append(is_empty(x))
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            _everything.let_go(run)
            seen.append(is_empty(x))
            return gradient * 2

    with lending(1 << 30) as run:
        run_layers, weight = layers()
        kept = run_layers()
        result = Twice.apply(kept[-1])
        _everything.let_go(run)
        assert is_empty(kept[-1])
        result.sum().backward()
    assert seen == [False, False]
    assert weight.grad is not None


@pytest.mark.parametrize("make", [torch.empty, torch.zeros])
@pytest.mark.parametrize("evict", ["auto", "anything"])
def test_value_written_by_address_is_pinned(
    make: Callable[..., Tensor], evict: Literal["auto", "anything"]
) -> None:
    """It handed out an address in C++, and the write there was not observed."""
    with rekindle.budget(1 << 30, evict=evict) as run:
        x, other = make(8), torch.ones(8) * 3
        (ctypes.c_float * 8).from_address(ADDRESS(x))[:] = range(8)
        _everything.let_go(run)
        assert is_empty(other)
        assert x.tolist() == list(range(8))


def test_lengths_indices_and_single_numbers_stay() -> None:
    with lending(1 << 30) as run:
        x = layers()[0]()[-1]
        lengths, index, number = (x > 0).sum(0), x.argmax(0), x.sum()
        _everything.let_go(run)
        assert is_empty(x)
        assert not any(map(is_empty, (lengths, index, number)))


def test_placeholder_raises_on_unseen_read() -> None:
    with lending(1 << 30) as run:
        kept = layers()[0]()
        _everything.let_go(run)
        with pytest.raises(RuntimeError, match=UNREADABLE):
            ADDRESS(kept[2])
        unseen = torch._C._DisableTorchDispatch(), unseen_by_the_core()
        with pytest.raises(RuntimeError, match=UNREADABLE), unseen[0], unseen[1]:
            torch.sum(kept[2].detach())
        assert kept[2].sum().isfinite()


# -- threads and processes -------------------------------------------------------------------------


def test_user_held_values_are_pinned_while_thread_lives() -> None:
    done, begun = threading.Event(), threading.Event()

    def other() -> None:
        begun.set()
        done.wait()

    budget = harshest(skips, evict="auto").budget
    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    try:
        with pytest.raises(rekindle.OutOfBudget), lending(budget):
            skips()()
    finally:
        done.set()
        thread.join()
    with lending(budget):
        skips()()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_placeholder_read_in_forked_process_raises() -> None:
    with lending(1 << 30) as run:
        kept = layers()[0]()
        _everything.let_go(run)
        child = os.fork()
        if child == 0:
            try:
                kept[0].sum()
            except RuntimeError:
                os._exit(7)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
    assert not any(map(is_empty, kept))


# -- afterwards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, KeyError])
def test_context_end_recomputes_all_user_held_values(error: type[Exception] | None) -> None:
    wanted = layers()[0]()
    kept: list[Tensor] = []

    def program() -> None:
        with lending(1 << 30) as run:
            kept.extend(layers()[0]())
            _everything.let_go(run)
            assert all(map(is_empty, kept))
            if error is not None:
                raise error

    if error is None:
        program()
    else:
        with pytest.raises(error):
            program()
    assert all(torch.equal(*pair) for pair in zip(kept, wanted, strict=True))


def test_value_with_changed_source_raises_when_read() -> None:
    leaf = torch.ones(ROWS, 20, requires_grad=True)
    constant = torch.ones(ROWS, 20)
    kept: list[Tensor] = []

    def overwritten() -> None:
        with lending(1 << 30) as run:
            kept.extend((constant * leaf, leaf * 5))
            _everything.let_go(run)
            with torch._C._DisableTorchDispatch(), unseen_by_the_core():
                constant.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwritten()
    x, y = kept
    assert y.eq(5).all()
    with pytest.raises(RuntimeError, match=UNREADABLE):
        x.sum()


def test_failed_recomputation_keeps_first_error() -> None:
    constant, leaf = torch.ones(ROWS, 20), torch.ones(ROWS, 20, requires_grad=True)
    kept: list[Tensor] = []

    def trains() -> None:
        with lending(1 << 20) as run:
            kept.append(constant * leaf)
            _everything.let_go(run)
            with torch._C._DisableTorchDispatch(), unseen_by_the_core():
                constant.add_(1)
            torch.zeros(1 << 20)

    with pytest.raises(rekindle.OutOfBudget) as caught:
        trains()
    assert any("modified by an inplace operation" in note for note in caught.value.__notes__)


def test_dropped_values_free_their_memory() -> None:
    with lending(1 << 30) as run:
        kept = layers()[0]()
        before = run.memory
        _everything.let_go(run)
        assert run.memory <= before - 6 * NBYTES
        last = kept.pop()
        kept.clear()
        assert last.sum().isfinite()
        del last
        run._driver.engine.check()
        assert run.memory <= before - 6 * NBYTES


def test_backward_after_the_context() -> None:
    torch.manual_seed(20)
    run_layers, weight = layers()
    torch.stack(run_layers()).sum().backward()
    wanted, weight.grad = weight.grad, None
    with lending(1 << 30) as run:
        kept = run_layers()
        loss = torch.stack(kept).sum()
        _everything.let_go(run)
    loss.backward()
    assert weight.grad is not None
    assert wanted is not None
    assert torch.equal(weight.grad, wanted)


# -- written down ----------------------------------------------------------------------------------


def test_record_with_lending_passes_verifier() -> None:
    budget = harshest(skips, evict="auto").budget
    with lending(budget, record=True) as run:
        skips()()
    schedule = run.record.schedule
    cost = verify(run.trace, schedule, budget, lending=True)
    assert cost.peak == run.peak
    assert cost.recomputations == run.recomputations
    with pytest.raises(InvalidSchedule, match="the program holds storage"):
        verify(run.trace, schedule, budget)


def test_learned_steps_keep_budget_and_losses() -> None:
    budget = int(1.1 * harshest(skips, evict="auto").budget)  # and gradients from the step before
    torch.manual_seed(1)
    step = skips()
    wanted = [step()[0] for _ in range(5)]
    torch.manual_seed(1)
    step = skips()
    with Tracker(resized=True) as tracker, lending(budget, learn="wait"):
        losses = [step()[0] for _ in range(5)]
        assert tracker.peak <= budget
    assert all(torch.equal(*pair) for pair in zip(losses, wanted, strict=True))
