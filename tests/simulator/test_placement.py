"""Tests of simulated runs with a simulated allocator, which gives each storage an address.

It rounds sizes, and has gaps, so memory can be short although enough bytes are free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rekindle
from rekindle.engine import Engine, NoRoom
from rekindle.policies import LRU, MSPS, Policy, Swap, Thrifty
from rekindle.schedule import Compute, Free, Record, verify
from rekindle.simulator import AllocatorName, Device, Repair, Run, replay
from rekindle.trace import Trace, TraceBuilder, chain, keep_all_peak
from tests.engine.test_swap import swaps
from tests.strategies import examples, problems

MIB = 2**20


def larger(trace: Trace, factor: int) -> Trace:
    ops = tuple(replace(op, workspace=op.workspace * factor) for op in trace.ops)
    return replace(trace, ops=ops, storages=tuple(size * factor for size in trace.storages))


@pytest.mark.parametrize(("allocator", "unit"), [("native", 20), ("expandable", 20), ("pages", 4)])
def test_simulated_allocator_without_limit_changes_no_action(allocator: Any, unit: int) -> None:
    trace = chain(24, nbytes=3 * MIB)
    budget = keep_all_peak(trace) // 2
    plain = rekindle.simulate(trace, budget=budget)
    placed = rekindle.simulate(trace, budget=budget, allocator=allocator)
    assert placed.actions == plain.actions
    assert replace(placed, allocated_peak=0, reserved_peak=0) == plain
    assert (plain.rounding, plain.fragmentation) == (0, 0)
    assert placed.reserved_peak == placed.peak + placed.rounding + placed.fragmentation
    assert placed.reserved_peak % (unit * MIB) == 0


def test_simulated_record_has_rounding_and_fragmentation() -> None:
    builder = TraceBuilder()
    builder.call("one", 1, [], [700], replayable=False)
    builder.call("large", 1, [], [3 * MIB], replayable=False)
    record = rekindle.simulate(builder.build(), allocator="native")
    assert record.peak == 3 * MIB + 700
    assert record.allocated_peak == 3 * MIB + 1024
    assert record.rounding == 324
    assert record.reserved_peak == 22 * MIB  # a segment of 2 MiB and one of 20 MiB
    assert record.fragmentation == 19 * MIB - 1024


def test_workspace_has_address_while_operator_runs() -> None:
    builder = TraceBuilder()
    builder.call("product", 1, [], [5 * MIB], workspace=16 * MIB)
    builder.call("other", 1, [], [9 * MIB])
    record = rekindle.simulate(builder.build(), allocator="native")
    assert record.allocated_peak == record.peak == 21 * MIB
    assert record.reserved_peak == (20 + 16) * MIB  # the 9 MiB are next to the result afterwards


def _freed_before(record: Record, trace: Trace, name: str) -> list[int]:
    """Return the numbers of the storages that were evicted before the operator `name` ran."""
    first = next(
        index
        for index, action in enumerate(record.actions)
        if isinstance(action, Compute) and trace.ops[action.op].name == name
    )
    return [action.storage for action in record.actions[:first] if isinstance(action, Free)]


@pytest.mark.parametrize(
    ("allocator", "memory", "window", "score"),
    [("native", 22, [3, 4], [1, 3, 4]), ("pages", 26, [1, 3], [1, 3])],
)
def test_evicting_adjacent_values_evicts_fewer_than_by_score(
    allocator: Any, memory: int, window: list[int], score: list[int]
) -> None:
    """A result needs the memory of two adjacent values out of four. The cheapest two are apart.

    The search for a window of adjacent values ("window") evicts two. Eviction in the order of
    scores ("score") evicts three. With pages the values need not be adjacent.
    """
    builder = TraceBuilder()
    source = builder.source(512)
    costs = (10, 1000, 20, 30)
    values = [builder.call("value", cost, [source], [5 * MIB])[0] for cost in costs]
    (wide,) = builder.call("wide", 1, [source], [10 * MIB], replayable=False)
    builder.release(wide)
    for value in values:
        builder.call("read", 1, [value], [], replayable=False)
        builder.release(value)
    trace = builder.build()
    freed: dict[str, list[int]] = {}
    for repair in get_args(Repair):
        record = replay(
            trace, budget=None, policy=MSPS(), device=Device(allocator, memory * MIB, repair)
        )
        assert verify(trace, record.schedule, None).peak <= 20 * MIB + 512
        freed[repair] = _freed_before(record, trace, "wide")
    assert freed == {"window": window, "score": score}


def test_allocator_segments_are_released_if_no_gap_is_enough() -> None:
    """A request of 22 MiB fits only after two segments of 12 MiB went back to the device."""
    builder = TraceBuilder()
    source = builder.source(512)
    values = [builder.call("value", cost, [source], [12 * MIB])[0] for cost in (9, 5, 7)]
    (wide,) = builder.call("wide", 1, [source], [22 * MIB], replayable=False)
    builder.release(wide)
    for value in values:
        builder.release(value)
    trace = builder.build()
    record = rekindle.simulate(
        trace, policy="msps", allocator="native", device_memory=(2 + 36 + 2) * MIB
    )
    assert _freed_before(record, trace, "wide") == [2, 3]


def test_inputs_between_free_blocks_are_moved_for_large_result() -> None:
    """One segment of 20 MiB has a pinned value in the middle, and two holes of 9 MiB.

    In each hole lies an input of the last operator. A third input can only be recomputed through a
    value of 9 MiB. So one of the inputs in the holes must be evicted, and recomputed elsewhere.
    """
    builder = TraceBuilder()
    source = builder.source(512)
    (deep,) = builder.call("deep", 10, [source], [9 * MIB])
    builder.call("middle", 1, [source], [2 * MIB], replayable=False)
    (filler,) = builder.call("filler", 1, [source], [9 * MIB])
    builder.release(filler)
    (missing,) = builder.call("missing", 10, [deep], [3 * MIB])
    builder.release(deep)
    (filler,) = builder.call("filler", 1, [source], [3 * MIB])
    (right,) = builder.call("right", 1000, [source], [3 * MIB])
    (left,) = builder.call("left", 1000, [source], [4 * MIB])
    builder.release(filler)
    (wide,) = builder.call("wide", 1, [source], [6 * MIB], replayable=False)
    builder.release(wide)
    builder.call("all", 1, [missing, right, left], [], replayable=False)
    trace = builder.build()
    record = rekindle.simulate(trace, policy="msps", allocator="native", device_memory=22 * MIB)
    again = Counter(trace.ops[a.op].name for a in record.actions if isinstance(a, Compute))
    assert {name for name, runs in again.items() if runs == 2} == {
        "deep", "missing", "left", "filler"
    }  # fmt: skip
    assert record.recomputations == 3  # each of the two filler operators runs once
    assert verify(trace, record.schedule, None).recomputations == 3


def test_allocation_on_full_device_raises_with_device_figures() -> None:
    with pytest.raises(rekindle.OutOfBudget, match=r"needs 3\.0 MiB in one piece, but") as caught:
        rekindle.simulate(
            chain(12, nbytes=3 * MIB), budget="1GiB", allocator="native", device_memory="19MiB"
        )
    assert (caught.value.budget, caught.value.needed) == (19 * MIB, 3 * MIB)


def test_simulate_with_wrong_argument_names_line_to_write() -> None:
    trace = chain(3)
    with pytest.raises(
        rekindle.InvalidArgument, match=r'write .*allocator="native", device_memory='
    ):
        rekindle.simulate(trace, device_memory="1GiB")
    with pytest.raises(rekindle.InvalidArgument, match=r"wanted one of None, \"native\""):
        rekindle.simulate(trace, allocator="arena")  # type: ignore[arg-type]
    with pytest.raises(rekindle.InvalidArgument, match=r'repair="window"\) or'):
        rekindle.simulate(trace, allocator="native", repair="all")  # type: ignore[arg-type]
    with pytest.raises(rekindle.InvalidBudget, match=r"device_memory="):
        rekindle.simulate(trace, allocator="native", device_memory="much")
    with pytest.raises(rekindle.Unsupported, match=r"leave out device_memory="):
        rekindle.simulate(trace, allocator="native", device_memory="1GiB", swap=Swap())
    with pytest.raises(rekindle.Unsupported, match=r"only the Python core simulates an allocator"):
        rekindle.simulate(trace, allocator="native", core="native")


@given(
    problem=problems(longest=40),
    factor=st.sampled_from((900_000, 2_500_000, 5 * MIB, 20_000_000)),
    share=st.floats(1.0, 1.6),
    device=st.builds(
        Device,
        allocator=st.sampled_from(get_args(AllocatorName)),
        repair=st.sampled_from(("window", "score")),
    ),
    policy=st.sampled_from((Thrifty(), LRU())),
)
@examples(400)
def test_simulated_run_on_small_device_is_valid_schedule(
    problem: tuple[Trace, int], factor: int, share: float, device: Device, policy: Policy
) -> None:
    trace, budget = larger(problem[0], factor), problem[1] * factor
    device = replace(device, memory=int(budget * share) + 8 * MIB)
    run = Run(trace, budget, policy, device=device)
    placement = run.placement
    assert placement is not None

    def watch(engine: Engine) -> None:
        placement.check()
        engine.check()
        there = {s.id for s in engine.storages if s.resident and s.nbytes}
        assert placement.storages == there

    try:
        run.go(watch)
    except NoRoom:
        return
    record = run.record()
    assert record.reserved_peak <= (device.memory or 0)
    assert record.allocated_peak >= record.peak
    assert verify(trace, record.schedule, budget).recomputations == record.recomputations


@pytest.mark.parametrize("allocator", get_args(AllocatorName))
@given(problem=problems(), swap=swaps())
@examples(50)
def test_swapped_storage_frees_its_address_and_gets_new_one(
    allocator: AllocatorName, problem: tuple[Trace, int], swap: Swap
) -> None:
    trace, budget = larger(problem[0], 2_500_000), problem[1] * 2_500_000
    swap = replace(swap, host=swap.host and swap.host * 2_500_000)
    run = Run(trace, budget, Thrifty(), swap=swap, device=Device(allocator))
    placement = run.placement
    assert placement is not None

    def watch(engine: Engine) -> None:
        placement.check()
        assert placement.storages == {s.id for s in engine.storages if s.resident and s.nbytes}

    try:
        run.go(watch)
    except NoRoom:
        return
    assert run.record().allocated_peak >= run.record().peak


@given(problem=problems())
@examples(50)
def test_block_of_multiple_of_512_bytes_is_not_rounded(
    problem: tuple[Trace, int],
) -> None:
    trace, budget = larger(problem[0], 512), problem[1] * 512
    try:
        record = replay(trace, budget=budget, policy=Thrifty(), device=Device())
    except NoRoom:
        return
    assert record.allocated_peak == record.peak


@given(problem=problems(longest=40))
@examples(100)
def test_run_on_pages_acts_as_by_sums_if_sizes_are_whole_pages(
    problem: tuple[Trace, int],
) -> None:
    """An allocation fails only if the sum of bytes is too large: places never matter."""
    trace, budget = larger(problem[0], 2 * MIB), problem[1] * 2 * MIB
    device = Device("pages", budget)
    try:
        plain = replay(trace, budget=budget, policy=Thrifty())
    except NoRoom:
        with pytest.raises(NoRoom):
            replay(trace, budget=budget, policy=Thrifty(), device=device)
    else:
        placed = replay(trace, budget=budget, policy=Thrifty(), device=device)
        assert placed.actions == plain.actions
        assert placed.reserved_peak == placed.allocated_peak == plain.peak
