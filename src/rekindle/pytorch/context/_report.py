"""Make the `Report` of a run: peak memory, what held it, memory over time, advice.

`Run.report` calls `report_of`. The figures come from the driver, the Python object for one budget
of the native core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from rekindle._types import Bytes
from rekindle.pytorch.context._advice import (
    advice_on,
    on_excess,
    on_kept,
    on_lost_key,
    on_shortfall,
    on_sliced,
    on_unknown_threads,
)
from rekindle.pytorch.native import SHOWN, Driver, Steps
from rekindle.pytorch.online import (
    IN_USE,
    INPUTS,
    OUTSIDE,
    SAVED,
    Holder,
    Place,
    Places,
    Snapshot,
)
from rekindle.report._data import Holders, Swapped, Timeline
from rekindle.report._report import Report
from rekindle.schedule import Record
from rekindle.trace import Retain, Trace


def report_of(
    driver: Driver,
    budget: Bytes | None,
    trace: Trace | None = None,
    record: Record | None = None,
) -> Report:
    """Return the report of the run so far.

    Args:
        driver: The Python object of the native core for this budget.
        budget: The budget in bytes, or None without a limit.
        trace: The trace of the run, if it was recorded. The report then shows memory over time
            and by module.
        record: The evictions and recomputations of the same run; needed with `trace`.
    """
    engine, places, at_peak = driver.engine, driver.places, driver.at_peak
    report = Report(
        budget=budget,
        peak=driver.steps.peak,
        compute_ns=engine.compute_ns,
        recompute_ns=engine.recompute_ns,
        lost_ns=driver.lost_ns,
        evictions=driver.evictions,
        recomputations=driver.recomputations,
        at_peak=_holders(at_peak, places),
        timeline=_sampled(driver.steps),
        swapped=swapped_by(driver),
        moved=() if driver.moved is None else driver.moved.copies,
        staying={} if driver.moved is None else driver.moved.staying,
        advice=(
            *on_excess(driver.steps.peak, budget),
            *_on_shortfall(driver, budget),
            *on_lost_key(engine.now().rejoined),
            *on_kept(driver.kept, driver.functions_kept),
            *on_sliced(driver.sliced),
            *on_unknown_threads([*driver.unknown_threads]),
            *advice_on(at_peak.memory, at_peak.categories, driver.device),
        ),
    )
    if trace is None or record is None or places is None:
        return report
    modules = [place.module for place in places.of_op]
    return report.over_time(trace, record, kinds=_kinds(driver, trace), modules=modules)


def _on_shortfall(driver: Driver, budget: Bytes | None) -> tuple[str, ...]:
    shortfall = driver.backoff
    return () if budget is None else on_shortfall(shortfall.times, int(shortfall.budget))


def _sampled(steps: Steps) -> Timeline:
    """Return the samples of memory in use that the engine took during the last steps."""
    clock, memory, recompute_ns = steps.samples()
    if len(clock) < 2:
        return Timeline()
    spent = [after - before for before, after in pairwise(recompute_ns)]
    note = f"The last {SHOWN} steps and what came since." if steps.number > SHOWN else ""
    return Timeline(
        tuple(clock), {"memory in use": tuple(memory)}, (), (0, *spent), f"Sampled. {note}".strip()
    )


def swapped_by(driver: Driver) -> Swapped | None:
    """Return bytes swapped out and in, and the time of the transfers; None without swapping."""
    host, transfers = driver.engine.host, driver.transfers
    if host is None or transfers is None:
        return None
    out, back = host.swapped_out, host.swapped_in
    if driver.moved is not None and driver.moves_state:
        # The engine does not count a copy that replaces an outdated one.
        copies = driver.moved.copies
        out, back = sum(row.out for row in copies), sum(row.back for row in copies)
    return Swapped(out, back, host.peak, transfers.transfer_ns, transfers.waiting_ns)


def _holders(peak: Snapshot, places: Places | None) -> Holders:
    if places is None:
        return Holders(
            peak.memory, peak.clock, peak.where, peak.categories,
            operators=dict(peak.sites), resident=peak.resident, cached=peak.cached,
        )  # fmt: skip

    def module(place: Place, holder: Holder) -> str:
        return places.parameters.get(holder.parameter, place.module)

    def line(place: Place, holder: Holder) -> str:
        # The source line of an operator is known only if the operator ran inside the budget.
        # Parameters and inputs were made outside.
        outside = holder.parameter or holder.category == INPUTS
        return f"({holder.category})" if outside else place.line

    return Holders(
        peak.memory,
        peak.clock,
        peak.where,
        peak.categories,
        _sums(peak, places, module),
        _sums(peak, places, line),
        dict(peak.sites),
        peak.resident,
        peak.cached,
    )


def _sums(peak: Snapshot, places: Places, key: Callable[[Place, Holder], str]) -> dict[str, Bytes]:
    """Return the bytes of all storages at the peak, summed by `key`, the largest sum first.

    Args:
        peak: The snapshot at the peak.
        places: Module and source line of each operator.
        key: Returns the name to sum under, for a storage and the operator that made it.
    """
    nowhere = Place(OUTSIDE, "")
    sums: Counter[str] = Counter()
    for holder in peak.holders.values():
        known = holder.op is not None and holder.op < len(places.of_op)
        place = places.of_op[holder.op] if known else nowhere  # type: ignore[index]
        sums[key(place, holder) or OUTSIDE] += holder.nbytes
    return dict(sums.most_common())


def _kinds(driver: Driver, trace: Trace) -> list[str]:
    """Return the category (such as gradient) of every storage of the trace, freed ones included."""
    with driver.lock:
        now = driver.snapshot()
    kinds = [IN_USE] * len(trace.storages)
    for event in trace.events:
        if isinstance(event, Retain):
            kinds[trace.values[event.value]] = SAVED
    for op in trace.ops:
        if op.name == "source":
            for storage in trace.new_storages(op):
                kinds[storage] = INPUTS
    for look in (now, *driver.looks):  # a later snapshot of memory overrides an earlier one
        for storage, holder in look.holders.items():
            if holder.category not in (IN_USE, SAVED) and storage < len(kinds):
                kinds[storage] = holder.category
    return kinds
