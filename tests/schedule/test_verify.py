"""Tests of the schedule verifier: it names the action and the reason of each fault."""

from __future__ import annotations

import pytest

from rekindle import InvalidSchedule
from rekindle._types import OpId, StorageId
from rekindle.schedule import Action, Compute, Discard, Free, Schedule, SwapIn, SwapOut, verify
from rekindle.trace import Trace, TraceBuilder


def _trace() -> Trace:
    builder = TraceBuilder()
    weight = builder.source(2, held=True)
    (a,) = builder.call("a", 3, [weight], [4])
    (b,) = builder.call("b", 5, [a], [4])
    builder.call("c_", 7, [b], [4], overwrites=[(0, b)])
    builder.use(a)
    return builder.build()


def _actions(*steps: str) -> tuple[Action, ...]:
    words: dict[str, Action] = {
        "w": Compute(OpId(0)),
        "a": Compute(OpId(1)),
        "b": Compute(OpId(2)),
        "c": Compute(OpId(3)),
        "c_": Compute(OpId(3), in_place=True),
        "-w": Free(StorageId(0)),
        "-a": Free(StorageId(1)),
        "-b": Free(StorageId(2)),
        "-c": Free(StorageId(3)),
        ">w": SwapOut(StorageId(0)),
        ">a": SwapOut(StorageId(1)),
        ">b": SwapOut(StorageId(2)),
        "<a": SwapIn(StorageId(1)),
        "<b": SwapIn(StorageId(2)),
        "~a": Discard(StorageId(1)),
        "<?": SwapIn(StorageId(-1)),
        "?": Compute(OpId(9)),
        "-?": Free(StorageId(9)),
    }
    return tuple(words[step] for step in steps)


def test_verifier_accepts_schedule_that_keeps_all_values() -> None:
    cost = verify(_trace(), Schedule(_actions("w", "a", "b", "c_")), 10)
    assert (cost.compute_ns, cost.recompute_ns, cost.recomputations, cost.peak) == (15, 0, 0, 10)
    assert cost.overhead == 0.0


def test_verifier_counts_recomputation_and_its_peak() -> None:
    cost = verify(_trace(), Schedule(_actions("w", "a", "b", "-a", "c_", "a")), 10)
    assert (cost.recompute_ns, cost.recomputations, cost.peak) == (3, 1, 10)
    assert cost.overhead == 3 / 15


@pytest.mark.parametrize(
    ("steps", "budget", "index", "reason"),
    [
        (["w", "a", "b", "c_"], 9, 2, "exceeds the budget of 9 by 1 bytes"),
        (["w", "b"], 99, 1, "op 2 \\(b\\) runs out of order"),
        (["w", "a", "-a", "b"], 99, 3, "reads value 1, which is not resident"),
        (["w", "a", "b", "c"], 99, 3, "is run by the program itself, in place"),
        (["w", "w"], 99, 1, "cannot be run again"),
        (["w", "-w"], 99, 1, "the program holds storage 0"),
        (["w", "-a"], 99, 1, "storage 1 is not resident"),
        (["w", "a", "b", "c_", "-a"], 99, 4, "the program holds storage 1"),
        (["w", "a", "b", "-a", "c_"], 99, 5, "the schedule ends before event Use"),
        (["w", "a", "b"], 99, 3, "the schedule ends before event Call"),
        (["?"], 99, 0, "there is no op 9"),
        (["-?"], 99, 0, "there is no storage 9"),
    ],
)
def test_verifier_refuses_wrong_schedule_and_names_action(
    steps: list[str], budget: int, index: int, reason: str
) -> None:
    with pytest.raises(InvalidSchedule, match=reason) as caught:
        verify(_trace(), Schedule(_actions(*steps)), budget)
    assert caught.value.index == index


def test_verifier_accepts_recomputed_write_on_copy_or_in_place() -> None:
    builder = TraceBuilder()
    (a,) = builder.call("a", 1, (), [4])
    (b,) = builder.call("b_", 1, [a], [4], overwrites=[(0, a)])
    builder.release(a)
    builder.call("other", 1, (), [0])
    builder.use(b)
    trace = builder.build()
    first = (Compute(OpId(0)), Compute(OpId(1), in_place=True), Free(StorageId(1)))
    first += (Compute(OpId(2)),)
    again = (Compute(OpId(0)), Compute(OpId(1), in_place=True))
    assert verify(trace, Schedule(first + again), 4).peak == 4
    copied = (Compute(OpId(0)), Compute(OpId(1)))
    assert verify(trace, Schedule(first + copied), 8).peak == 8


def test_verifier_accepts_host_copy_until_it_is_discarded() -> None:
    steps = ("w", "a", "b", ">a", "<a", "-a", "c_", "<a", "~a")
    cost = verify(_trace(), Schedule(_actions(*steps)), 10, host=4)
    assert (cost.recompute_ns, cost.recomputations, cost.peak) == (0, 0, 10)
    assert (cost.swapped_out, cost.swapped_in, cost.host_peak) == (4, 8, 4)


@pytest.mark.parametrize(
    ("steps", "host", "index", "reason"),
    [
        (["w", ">w"], 99, 1, "the program holds storage 0"),
        (["w", ">a"], 99, 1, "storage 1 is not resident"),
        (["w", "a", ">a"], 3, 2, "storage 1 exceeds the host's 3 by 1 bytes"),
        (["w", "a", "b", ">b", ">a"], 7, 4, "storage 1 exceeds the host's 7 by 1 bytes"),
        (["w", "a", ">a", "<a", ">a"], 99, 4, "storage 1 is on the host already"),
        (["w", "a", "<a"], 99, 2, "storage 1 is not on the host"),
        (["w", "a", ">a", "<a", "<a"], 99, 4, "storage 1 is resident already"),
        (["w", "a", ">a", "~a", "<a"], 99, 4, "storage 1 is not on the host"),
        (["w", "a", "~a"], 99, 2, "storage 1 is not on the host"),
        (["w", "a", ">a", "b"], 99, 3, "reads value 1, which is not resident"),
        (["<?"], 99, 0, "there is no storage -1"),
    ],
)
def test_verifier_refuses_wrong_swap_and_names_action(
    steps: list[str], host: int, index: int, reason: str
) -> None:
    with pytest.raises(InvalidSchedule, match=reason) as caught:
        verify(_trace(), Schedule(_actions(*steps)), 99, host)
    assert caught.value.index == index


def test_verifier_refuses_swap_in_above_budget() -> None:
    builder = TraceBuilder()
    (a,) = builder.call("a", 1, (), [4])
    builder.call("b", 1, (), [4])
    builder.use(a)
    trace = builder.build()
    first = (Compute(OpId(0)), SwapOut(StorageId(0)), Compute(OpId(1)))
    schedule = Schedule((*first, SwapIn(StorageId(0))))
    assert verify(trace, schedule, 8).peak == 8
    with pytest.raises(InvalidSchedule, match="exceeds the budget of 7 by 1 bytes"):
        verify(trace, schedule, 7)


def test_verifier_refuses_view_not_made_again_after_swap_in() -> None:
    builder = TraceBuilder()
    (a,) = builder.call("a", 1, (), [4])
    (early,) = builder.call("early", 1, [a], [0], aliases=[a])
    builder.call("between", 1, (), [4])
    (late,) = builder.call("late", 1, [early], [0], aliases=[a])
    builder.use(late)
    trace = builder.build()
    first = (Compute(OpId(0)), Compute(OpId(1)), SwapOut(StorageId(0)), Compute(OpId(2)))
    back = (SwapIn(StorageId(0)), Compute(OpId(3)))
    assert verify(trace, Schedule((*first, *back)), 8).recomputations == 0
    with pytest.raises(InvalidSchedule, match="ends before event Call"):
        verify(trace, Schedule((*first, back[0])), 8)
