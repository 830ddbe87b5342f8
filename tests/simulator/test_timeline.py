"""Tests of the times of copies in simulated runs that swap.

Small cases are computed by hand, random cases by code that is independent of the simulator.
"""

from __future__ import annotations

from hypothesis import assume, given

import rekindle
from rekindle.engine import NoRoom
from rekindle.policies import DTR, Swap
from rekindle.schedule import Compute, Discard, Free, Record, SwapIn, SwapOut
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder
from tests.engine.test_swap import BYTE_PER_NS, swaps
from tests.strategies import examples, problems


def _two() -> Trace:
    builder = TraceBuilder()
    (first,) = builder.call("first", 1000, (), [8])
    (second,) = builder.call("second", 10, (), [8])
    builder.release(second)
    builder.call("backward", 10, [first], [], replayable=False)
    builder.release(first)
    return builder.build()


def test_simulated_swap_in_waits_for_earlier_transfers() -> None:
    swap = Swap(out_bytes_per_s=BYTE_PER_NS, in_bytes_per_s=BYTE_PER_NS // 2)
    record = rekindle.simulate(_two(), budget=8, swap=swap)
    assert (record.swapped_out, record.swapped_in, record.host_peak) == (8, 8, 8)
    assert record.transfer_ns == record.waiting_ns == 8 + 16
    assert record.overhead == 24 / 1020


def test_simulated_run_without_swap_has_no_transfers() -> None:
    record = rekindle.simulate(_two(), budget=8)
    assert (record.recompute_ns, record.waiting_ns, record.transfer_ns) == (1000, 0, 0)


@given(problem=problems(), swap=swaps())
@examples(100)
def test_simulated_transfers_run_in_sequence_once_data_exist(
    problem: tuple[Trace, int], swap: Swap
) -> None:
    """The test computes the earliest possible time of each copy from the bandwidths."""
    trace, budget = problem
    try:
        record = replay(trace, budget=budget, policy=DTR(), swap=swap)
    except NoRoom:
        assume(False)
        raise
    _check(trace, record, swap)


def _check(trace: Trace, record: Record, swap: Swap) -> None:
    out_until = in_until = 0.0
    whole: dict[int, float] = {}  # time at which a storage is on the host
    back: dict[int, float] = {}  # time at which a storage is on the device again
    # time from which the memory of an evicted storage is free
    leaving: list[tuple[float, int]] = []
    assert record.budget is not None
    following = (*record.clock[1:], record.compute_ns + record.recompute_ns + record.waiting_ns)
    for action, now, then, memory in zip(
        record.actions, record.clock, following, record.memory, strict=True
    ):
        match action:
            case Compute(op_id, in_place):
                op = trace.ops[op_id]
                begin = then - op.cost  # or a little earlier, if the program then waited for a read
                assert all(back.get(trace.values[value], 0) <= begin for value in op.inputs)
                fresh = trace.output_bytes(op)
                if in_place:
                    fresh -= sum(trace.storages[trace.values[v]] for _, v in op.overwrites)
                still = sum(nbytes for end, nbytes in leaving if end > begin)
                assert memory + fresh + still <= record.budget
            case SwapOut(storage, keep):
                out_until = max(out_until, now, back.get(storage, 0))
                out_until += -(-trace.storages[storage] * BYTE_PER_NS // swap.out_bytes_per_s)
                whole[storage] = out_until
                if not keep:
                    leaving.append((out_until, trace.storages[storage]))
            case SwapIn(storage):
                in_until = max(in_until, now, whole[storage])
                in_until += -(-trace.storages[storage] * BYTE_PER_NS // swap.in_bytes_per_s)
                back[storage] = in_until
            case Free(storage):
                end = max(whole.get(storage, 0), back.pop(storage, 0))
                leaving.append((end, trace.storages[storage]))
            case Discard():
                pass
