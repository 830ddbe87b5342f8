"""Simulate many runs (traces x policies x budgets) in parallel processes.

`rekindle simulate` and benchmarks use this module. A log is the file that contains a trace.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from rekindle import _clock
from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import Swap, named
from rekindle.simulator._native import Core
from rekindle.simulator._placement import Device
from rekindle.simulator._replay import Run
from rekindle.trace import Trace, keep_all_peak
from rekindle.trace.formats import load

RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""The budgets of the DTR paper's figures, as shares of the peak without evictions."""


@final
@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one run to simulate: the file of the trace, the policy, the budget."""

    log: str
    policy: str
    ratio: float | None = None  #: budget as a share of the peak without evictions
    budget: Bytes | None = None  #: budget in bytes, instead of `ratio`; both None: no limit
    #: A run fails with "thrash" if it takes longer than this multiple of the program's own time.
    limit: float | None = 2.0
    swap: Swap | None = None
    device: Device | None = None


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one simulated run; those of a failed run cover the time up to the failure.

    Attributes:
        log: The name of the trace's file.
        policy: The name of the policy.
        ratio: The budget as a share of the peak without evictions, if the case gave a share.
        budget_bytes: The budget, or None.
        keep_all_bytes: The peak if nothing is evicted.
        status: "pass"; "oom" if an operator does not fit; "thrash" if recomputing took too long.
        overhead: The time of the run over the time of running everything once. 1.0 means no
            recomputation and no waiting.
        peak_bytes: The peak of the run.
        evictions: The number of evictions.
        rematerializations: The number of recomputed operators.
        base_ns: The time (ns) of running everything once.
        rematerialization_ns: The time (ns) of recomputation.
        seconds: The real time that the simulation took.
        waiting_ns: The time (ns) of waiting for copies to and from the host.
        allocated_bytes: With an allocator, the bytes in blocks at the peak.
        reserved_bytes: With an allocator, the bytes reserved from the device at the peak.
    """

    log: str
    policy: str
    ratio: float | None
    budget_bytes: Bytes | None
    keep_all_bytes: Bytes
    status: Literal["pass", "oom", "thrash"]
    overhead: float
    peak_bytes: Bytes
    evictions: int
    rematerializations: int
    base_ns: Nanoseconds
    rematerialization_ns: Nanoseconds
    seconds: float
    waiting_ns: Nanoseconds = 0
    allocated_bytes: Bytes = 0
    reserved_bytes: Bytes = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_case(case: Case, trace: Trace | None = None, *, core: Core = "auto") -> Outcome:
    """Simulate one run of `trace`. If `trace` is None, read it from the file `case.log`."""
    trace = trace or _load(case.log)
    everything = keep_all_peak(trace)
    budget = case.budget
    if budget is None and case.ratio is not None:
        budget = int(everything * case.ratio)
    limit = None if case.limit is None else int((case.limit - 1) * trace.compute_ns)
    started = _clock.seconds()
    run = Run(
        trace, budget, named(case.policy), limit, swap=case.swap, device=case.device, core=core
    )
    status: Literal["pass", "oom", "thrash"] = "pass"
    try:
        run.go()
    except NoRoom:
        status = "oom"
    except Thrashed:
        status = "thrash"
    waiting = run.timeline.waiting_ns if run.timeline else 0
    clock = run.engine.clock + waiting
    allocator = run.placement.allocator if run.placement else None
    return Outcome(
        log=_name(case.log),
        policy=case.policy,
        ratio=case.ratio,
        budget_bytes=budget,
        keep_all_bytes=everything,
        status=status,
        overhead=clock / trace.compute_ns if trace.compute_ns else 1.0,
        peak_bytes=run.engine.peak,
        evictions=run.evictions,
        rematerializations=run.recomputations,
        base_ns=trace.compute_ns,
        rematerialization_ns=run.engine.recompute_ns,
        seconds=round(_clock.seconds() - started, 6),
        waiting_ns=waiting,
        allocated_bytes=allocator.allocated_peak if allocator else 0,
        reserved_bytes=allocator.reserved_peak if allocator else 0,
    )


def cases(
    logs: Iterable[str | Path],
    policies: Sequence[str],
    ratios: Sequence[float] = RATIOS,
    *,
    limit: float | None = 2.0,
    swap: Swap | None = None,
    device: Device | None = None,
) -> list[Case]:
    """Return a `Case` for each combination of a log, a policy and a ratio.

    A log is the file of a recorded program. A ratio is the budget divided by the peak when
    everything is kept. All cases share the other settings.
    """
    return [
        Case(str(log), policy, ratio, limit=limit, swap=swap, device=device)
        for log in logs
        for policy in policies
        for ratio in ratios
    ]


def sweep(wanted: Sequence[Case], *, processes: int = 1) -> Iterator[tuple[int, Outcome]]:
    """Simulate all cases, in any order; yield each outcome with its position in `wanted`."""
    if processes == 1 or len(wanted) == 1:
        for position, case in enumerate(wanted):
            yield position, run_case(case)
        return
    # "spawn" behaves the same on all platforms. "fork" would copy a process that has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        positions = {pool.submit(run_case, case): i for i, case in enumerate(wanted)}
        try:
            for future in as_completed(positions):
                yield positions[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


@functools.lru_cache(maxsize=8)
def _load(log: str) -> Trace:
    return load(log)


def _name(log: str) -> str:
    return Path(log).name.partition(".")[0]
