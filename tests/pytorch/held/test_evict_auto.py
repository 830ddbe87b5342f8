"""Tests of `evict="auto"`: tensors in variables are evicted only if nothing else can be."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import InvalidSchedule
from rekindle.schedule import verify
from tests.helpers import name_of, sampled
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.harsh import harshest
from tests.pytorch.held.placeholders import ADDRESS, UNREADABLE, is_empty, unseen_by_the_core
from tests.pytorch.held.test_evict_anything import skips
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.sweep import _everything
from tests.pytorch.test_models import left_by, plainly, train
from tests.pytorch.tracker import Tracker, measure

ROWS = 400
NBYTES = 4 * 20 * ROWS  #: bytes of one hidden state


def evicting_held(amount: int, **options: Any) -> rekindle.budget:
    return rekindle.budget(amount, evict="auto", **options)


def layers(n: int = 6) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """Return a step that holds its hidden states in a list, and the input of the step."""
    torch.manual_seed(20)
    weight = torch.randn(ROWS, 20, requires_grad=True)

    def run() -> list[Tensor]:
        kept, x = [], weight
        for _ in range(n):
            x = torch.tanh(x * 1.5)
            kept.append(x)
        return kept

    return run, weight


# -- tensors from before the budget ----------------------------------------------------------------


def saved(late: nn.Linear, x: Tensor) -> Tensor:
    return late(x)


def viewed(late: nn.Linear, x: Tensor) -> Tensor:
    return x @ late.weight.t().contiguous()


def only_counted(late: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        late.weight.mul_(1.0)
    return late(x)


@pytest.mark.parametrize("first_access", [saved, viewed, only_counted], ids=name_of)
def test_first_use_of_model_evicts_values_held_in_list(
    first_access: Callable[[nn.Linear, Tensor], Tensor],
) -> None:
    """The model, its gradients and optimizer state count from the first use of a parameter on."""
    torch.manual_seed(20)
    late = nn.Linear(128, 128, bias=False)
    optimizer = torch.optim.AdamW(late.parameters())
    x = torch.randn(64, 128, requires_grad=True)
    late(x).sum().backward()
    optimizer.step()

    def step() -> list[Tensor]:
        late.zero_grad(set_to_none=False)
        kept, hidden = [], x
        for _ in range(8):
            hidden = hidden.sin()
            kept.append(hidden)
        first_access(late, hidden).square().mean().backward()
        assert late.weight.grad is not None
        assert x.grad is not None
        return [late.weight.grad.clone(), x.grad.clone(), *kept]

    with torch.no_grad():
        late.weight.mul_(1.0)
    x.grad = None
    expected = step()
    x.grad = None
    model = 4 * late.weight.nbytes  # with its gradient and two moments
    with cores.fixed_prices(), evicting_held(model + 8 * x.nbytes, learn=False) as run:
        found = step()
    assert all(map(torch.equal, found, expected))
    assert run.recomputations > 0
    assert run.peak <= run.budget


# -- programs that fit only if user-held values are evicted ----------------------------------------


def states() -> Callable[[], Any]:
    """Return a step that holds its hidden states in a list, and reads them again after the loss."""
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


def test_list_of_hidden_states_fits_in_budget_with_evict_auto() -> None:
    plain = measure(states()).peak
    budget = harshest(states, evict="auto").budget
    assert budget < 0.6 * plain
    within = rekindle.budget(int(0.9 * plain), evict="saved")
    with pytest.raises(rekindle.OutOfBudget), within:
        states()()


def test_evict_auto_needs_less_memory_for_held_skip_connections() -> None:
    """With "auto", skip connections in variables are evicted. Their gradients are not.

    With five to seven layers, both budgets are nearly equal.
    """
    few = partial(skips, 4)
    with cores.fixed_prices():
        smallest = {evict: harshest(few, evict=evict).budget for evict in ("saved", "auto")}
    assert smallest["auto"] <= smallest["saved"] - NBYTES


def test_evict_auto_fits_where_evict_saved_raises_out_of_budget() -> None:
    budget = harshest(skips, evict="auto").budget
    with evicting_held(budget) as run:
        skips()()
    assert run.peak <= budget
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(budget, evict="saved"):
        skips()()


def test_evict_auto_in_ample_budget_acts_as_evict_saved() -> None:
    """If no user-held value must be evicted, both settings take the same actions, one by one."""
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


#: All models but the LSTM: each of its steps depends on all before it, so recomputation takes
#: minutes.
_QUICK_CASES = [case for case in ALL_CASES if case.name != "lstm"]


# the warning depends on the speed of the machine
@pytest.mark.filterwarnings("ignore:recomputation took")
@pytest.mark.parametrize("case", sampled(_QUICK_CASES, 3), ids=name_of)
def test_models_with_evict_auto_match_pytorch(case: Case) -> None:
    workload = case.build()
    with evicting_held(1 << 40) as run:
        driver: Any = run._driver
        driver.core.evict_before_every_op(driver.handle, True)
        losses = train(workload)
    assert run.recomputations > 1_000
    run._driver.engine.check()
    assert differing(left_by(workload, losses), plainly(case).outcome) == []


# -- values that must not be evicted ---------------------------------------------------------------


def test_operands_of_running_operator_are_not_evicted() -> None:
    run_layers, weight = layers(3)
    wanted = torch.cat(run_layers(), 1).sum().item()
    with evicting_held(4 * NBYTES + 3 * NBYTES) as run:  # the operands and the results
        kept = run_layers()
        assert torch.cat(kept, 1).sum().item() == wanted
    assert run.peak <= 7 * NBYTES
    assert weight.grad is None


def test_recomputed_user_held_value_is_evicted_again() -> None:
    with evicting_held(1 << 30) as run:
        kept = layers()[0]()
        _everything.evict_all(run)
        assert all(map(is_empty, kept))
        first = kept[-1].sum().item()
        assert not is_empty(kept[-1])
        _everything.evict_all(run)
        assert is_empty(kept[-1])
        assert kept[-1].sum().item() == first
        run._driver.engine.check()


def test_tensor_set_from_evicted_tensor_reads_recomputed_bytes() -> None:
    """`Tensor.set_` lets a tensor use another tensor's storage, here an evicted one."""
    wanted = layers()[0]()
    with evicting_held(1 << 30) as run:
        kept = layers()[0]()
        _everything.evict_all(run)
        assert is_empty(kept[1])
        assert is_empty(kept[4])
        kept[1].set_(kept[4])
        _everything.evict_all(run)
        assert torch.equal(kept[1].detach(), wanted[4])
        assert torch.equal(kept[4].detach(), wanted[4])
        assert torch.equal(kept[5].detach(), wanted[5])
        run._driver.engine.check()


def test_views_of_evicted_user_held_values_match_pytorch() -> None:
    wanted = layers()[0]()
    with evicting_held(1 << 30) as run:
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
            _everything.evict_all(run)
            assert is_empty(kept[5])
            assert look()
            _everything.evict_all(run)
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
def test_user_held_value_whose_address_was_read_is_pinned(
    escape: Callable[[Tensor], object],
) -> None:
    with evicting_held(1 << 30) as run:
        kept = layers()[0]()
        _everything.evict_all(run)
        given = escape(kept[2])
        assert not is_empty(kept[2])
        _everything.evict_all(run)
        assert [is_empty(x) for x in kept] == [True, True, False, True, True, True]
        del given


def test_operands_of_custom_autograd_functions_are_pinned() -> None:
    """Kernels of custom functions read their operands by address, which Rekindle cannot observe."""
    seen: list[bool] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            _everything.evict_all(run)
            seen.append(is_empty(x))
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            _everything.evict_all(run)
            seen.append(is_empty(x))
            return gradient * 2

    with evicting_held(1 << 30) as run:
        run_layers, weight = layers()
        kept = run_layers()
        result = Twice.apply(kept[-1])
        _everything.evict_all(run)
        assert is_empty(kept[-1])
        result.sum().backward()
    assert seen == [False, False]
    assert weight.grad is not None


@pytest.mark.parametrize("make", [torch.empty, torch.zeros])
@pytest.mark.parametrize("evict", ["auto", "anything"])
def test_user_held_value_written_by_address_is_pinned(
    make: Callable[..., Tensor], evict: Literal["auto", "anything"]
) -> None:
    """C++ code took the address of the value and wrote there, which Rekindle cannot observe."""
    with rekindle.budget(1 << 30, evict=evict) as run:
        x, other = make(8), torch.ones(8) * 3
        (ctypes.c_float * 8).from_address(ADDRESS(x))[:] = range(8)
        _everything.evict_all(run)
        assert is_empty(other)
        assert x.tolist() == list(range(8))


def test_integer_tensors_and_scalars_are_not_evicted() -> None:
    with evicting_held(1 << 30) as run:
        x = layers()[0]()[-1]
        lengths, index, number = (x > 0).sum(0), x.argmax(0), x.sum()
        _everything.evict_all(run)
        assert is_empty(x)
        assert not any(map(is_empty, (lengths, index, number)))


def test_reading_evicted_value_without_dispatcher_raises() -> None:
    with evicting_held(1 << 30) as run:
        kept = layers()[0]()
        _everything.evict_all(run)
        with pytest.raises(RuntimeError, match=UNREADABLE):
            ADDRESS(kept[2])
        unseen = torch._C._DisableTorchDispatch(), unseen_by_the_core()
        with pytest.raises(RuntimeError, match=UNREADABLE), unseen[0], unseen[1]:
            torch.sum(kept[2].detach())
        assert kept[2].sum().isfinite()


# -- threads and processes -------------------------------------------------------------------------


def test_user_held_values_stay_while_older_thread_runs() -> None:
    """Rekindle does not see the operators of a thread that started before the budget."""
    done, begun = threading.Event(), threading.Event()

    def other() -> None:
        begun.set()
        done.wait()

    few = partial(skips, 4)
    with cores.fixed_prices():
        budget = harshest(few, evict="auto").budget
    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    try:
        with (
            cores.fixed_prices(),
            pytest.raises(rekindle.OutOfBudget),
            evicting_held(budget),
        ):
            few()()
    finally:
        done.set()
        thread.join()
    with evicting_held(budget):
        few()()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_reading_evicted_user_held_tensor_after_fork_raises() -> None:
    with evicting_held(1 << 30) as run:
        kept = layers()[0]()
        _everything.evict_all(run)
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
def test_end_of_budget_recomputes_all_user_held_values(error: type[Exception] | None) -> None:
    wanted = layers()[0]()
    kept: list[Tensor] = []

    def program() -> None:
        with evicting_held(1 << 30) as run:
            kept.extend(layers()[0]())
            _everything.evict_all(run)
            assert all(map(is_empty, kept))
            if error is not None:
                raise error

    if error is None:
        program()
    else:
        with pytest.raises(error):
            program()
    assert all(torch.equal(*pair) for pair in zip(kept, wanted, strict=True))


def test_reading_user_held_value_with_changed_source_raises() -> None:
    leaf = torch.ones(ROWS, 20, requires_grad=True)
    constant = torch.ones(ROWS, 20)
    kept: list[Tensor] = []

    def overwritten() -> None:
        with evicting_held(1 << 30) as run:
            kept.extend((constant * leaf, leaf * 5))
            _everything.evict_all(run)
            with torch._C._DisableTorchDispatch(), unseen_by_the_core():
                constant.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwritten()
    x, y = kept
    assert y.eq(5).all()
    with pytest.raises(RuntimeError, match=UNREADABLE):
        x.sum()


def test_failed_recomputation_at_end_of_budget_keeps_first_error() -> None:
    constant, leaf = torch.ones(ROWS, 20), torch.ones(ROWS, 20, requires_grad=True)
    kept: list[Tensor] = []

    def trains() -> None:
        with evicting_held(1 << 20) as run:
            kept.append(constant * leaf)
            _everything.evict_all(run)
            with torch._C._DisableTorchDispatch(), unseen_by_the_core():
                constant.add_(1)
            torch.zeros(1 << 20)

    with pytest.raises(rekindle.OutOfBudget) as caught:
        trains()
    assert any("modified by an inplace operation" in note for note in caught.value.__notes__)


def test_deleted_user_held_values_free_memory_and_bookkeeping() -> None:
    with evicting_held(1 << 30) as run:
        kept = layers()[0]()
        before = run.memory
        _everything.evict_all(run)
        assert run.memory <= before - 6 * NBYTES
        last = kept.pop()
        kept.clear()
        assert last.sum().isfinite()
        del last
        run._driver.engine.check()
        assert run.memory <= before - 6 * NBYTES


def test_backward_after_budget_with_evict_auto_matches_pytorch() -> None:
    torch.manual_seed(20)
    run_layers, weight = layers()
    torch.stack(run_layers()).sum().backward()
    wanted, weight.grad = weight.grad, None
    with evicting_held(1 << 30) as run:
        kept = run_layers()
        loss = torch.stack(kept).sum()
        _everything.evict_all(run)
    loss.backward()
    assert weight.grad is not None
    assert wanted is not None
    assert torch.equal(weight.grad, wanted)


# -- records and plans -----------------------------------------------------------------------------


def test_recorded_run_with_evict_auto_is_valid_schedule() -> None:
    budget = harshest(skips, evict="auto").budget
    with evicting_held(budget, record=True) as run:
        skips()()
    schedule = run.record.schedule
    cost = verify(run.trace, schedule, budget, evicts_held=True)
    assert cost.peak == run.peak
    assert cost.recomputations == run.recomputations
    with pytest.raises(InvalidSchedule, match="the program holds storage"):
        verify(run.trace, schedule, budget)


def test_learned_plan_with_evict_auto_matches_pytorch() -> None:
    # 10 % more than the smallest budget of one step, for the gradients of the step before
    budget = int(1.1 * harshest(skips, evict="auto").budget)
    torch.manual_seed(1)
    step = skips()
    wanted = [step()[0] for _ in range(5)]
    torch.manual_seed(1)
    step = skips()
    with Tracker(resized=True) as tracker, evicting_held(budget, learn="wait"):
        losses = [step()[0] for _ in range(5)]
        assert tracker.peak <= budget
    assert all(torch.equal(*pair) for pair in zip(losses, wanted, strict=True))
