"""What a step will need and take: the runtime watches one, the simulator says what if."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes
from rekindle.policies import DEFAULT, Policy
from rekindle.report import Choice, Profile
from rekindle.simulator import Point, at_batch, curve, fits


def profile(
    step: Callable[[], object],
    *,
    budget: str | Bytes | None = None,
    policy: Policy | None = None,
    device: str | None = None,
    repeats: int = 3,
    clock: Callable[[], Nanoseconds] = time.perf_counter_ns,
    watch: Callable[[str], None] = lambda stage: None,
) -> Profile:
    """What one step needs, who holds it at the peak, and what it would take within less.

    >>> profile = rekindle.profile(step)  # doctest: +SKIP
    >>> profile.budget_for(slowdown=1.1), profile.fits("8GB")  # doctest: +SKIP

    step: a function that takes one whole step: forward, backward, optimizer. It runs several times,
        and what it learns is undone: weights, buffers, gradients, optimizer state and random
        generators are as they were. What it takes from an iterator is taken.
    budget: run it within that (bytes, or text such as "6GiB"), if it does not fit without; default:
        no limit.
    policy: what to let go, in the run and in the prediction; default `Thrifty()`.
    device: the device whose memory is meant; default: CUDA if it is in use, else the CPU.
    repeats: how often it is timed, with the bookkeeping and without. 0: it runs only once, nothing
        is undone, and times are those of its operators.
    clock: what it is timed with, in ns.
    watch: told what is being done, for whoever wants to show it.

    Raises `OutOfBudget` if the step does not fit into `budget`.
    """
    from rekindle.pytorch import observe, prices

    policy = DEFAULT if policy is None else policy
    seen = observe(
        step,
        amount=budget,
        policy=policy,
        device=device,
        repeats=repeats,
        clock=clock,
        watch=watch,
    )
    points = curve(
        seen.trace, policy, watch=lambda done, of: watch(f"simulating budget {done + 1} of {of}")
    )
    again = prices().again

    def choice(point: Point) -> Choice:
        ns = seen.kept_ns + point.recompute_ns + again * point.recomputations
        return Choice(
            point.budget, ns, ns / seen.plain_ns, point.recompute_ns, point.recomputations
        )

    report = replace(
        seen.report,
        title="A profile of one step",
        choices=tuple(choice(point) for point in points),
        keep_all=points[0].budget if points else None,
        smallest_budget=points[-1].budget if points else None,
        plain_ns=seen.plain_ns,
    )
    return Profile(report, seen.trace)


def max_batch(
    step_factory: Callable[[int], Callable[[], object]],
    *,
    budget: str | Bytes = "auto",
    at_most: int = 1 << 20,
    simulated: bool = False,
    policy: Policy | None = None,
    device: str | None = None,
    watch: Callable[[str], None] = lambda stage: None,
) -> int:
    """The largest batch whose training steps fit into `budget`.

    >>> rekindle.max_batch(lambda n: lambda: train(batch[:n]), budget="6GiB")  # doctest: +SKIP

    step_factory: given a size of the batch returns a function that takes one whole step. Sizes are
        tried by doubling, then by bisection; each step runs twice, and what it learns is undone:
        weights, buffers, gradients, optimizer state, random generators.
    budget: bytes, or text such as "6GiB"; "auto": what the device has.
    at_most: sizes above are not tried.
    simulated: only batches of 2 and 4 run, and their traces are continued in a straight line.
        Quick, and needs little memory; try the answer before you rely on it.
    policy, device, watch: as for `rekindle.profile`.

    Raises the error of the smallest batch if not even that fits.
    """
    from rekindle.pytorch import Probe

    policy = DEFAULT if policy is None else policy
    probe = Probe(budget, policy, device)
    limit = probe.budget
    shortages: list[Exception] = []

    def runs(batch: int) -> bool:
        watch(f"trying a batch of {batch}")
        shortage = probe.shortage(step_factory(batch))
        shortages.extend([shortage] if shortage else [])
        return shortage is None

    feasible = runs
    if simulated:
        watch("writing down batches of 2 and 4")
        two, four = ((batch, probe.trace(step_factory(batch))) for batch in (2, 4))

        def simulates(batch: int) -> bool:
            watch(f"simulating a batch of {batch}")
            return fits(at_batch(two, four, batch), limit, policy) is not None

        feasible = simulates
    found = largest(feasible, at_most)
    if found:
        return found
    raise shortages[0] if shortages else _not_even_one(limit)


def largest(feasible: Callable[[int], bool], at_most: int) -> int:
    """The largest number from 1 to `at_most` that is feasible, as all below it are; 0: none."""
    yes, no = 0, 1
    while no <= at_most and feasible(no):
        yes, no = no, 2 * no
    no = min(no, at_most + 1)
    while no - yes > 1:
        middle = (yes + no) // 2
        if feasible(middle):
            yes = middle
        else:
            no = middle
    return yes


def _not_even_one(budget: Bytes) -> OutOfBudget:
    return OutOfBudget(
        f"not even a batch of 1 is simulated to fit into {format_bytes(budget)}; give more, or see "
        "what one needs: rekindle.profile(step_factory(1))",
        needed=0,
        budget=budget,
        held={},
        smallest_budget=budget + 1,
    )
