"""Measure memory, time and overhead of a step, for `rekindle.profile`; then restore the program.

1. Warm up: run two steps within the budget. The first creates the optimizer's state, the second
   shows the peak.
2. Time further steps, alternating between the budget and plain PyTorch; the difference is the
   overhead of bookkeeping. The first step in a budget is slower than later ones, so it is not
   timed. The fastest time counts once a second step comes close to it: on a busy machine most
   steps are too slow.
3. Record one more step within the budget, with a snapshot of the tensors in memory at its peak.
4. Simulate smaller budgets. Where a simulation does not know the answer, run steps (`_measured`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from rekindle import _clock
from rekindle._types import Bytes, Nanoseconds
from rekindle.policies import Policy, Swap, policy_of
from rekindle.pytorch.context import Run, budget
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.observed._before import Undo
from rekindle.pytorch.observed._bookkeeping import prices
from rekindle.pytorch.observed._floor import least_in_slices, on_floor
from rekindle.pytorch.observed._measured import MeasuredSteps
from rekindle.report._data import Choice
from rekindle.report._report import Report
from rekindle.simulator import curve
from rekindle.trace import Trace, keep_all_peak

PATIENCE: Final = 4
"""The most steps that are timed, as a multiple of `repeats`."""
ALIKE: Final = 0.1
"""Relative difference below which two timed steps agree."""


@final
@dataclass(frozen=True, slots=True)
class Observed:
    """The measurements of one step, and its time within several budgets.

    Attributes:
        trace: The trace of the step.
        report: The report of the step.
        plain_ns: Time (ns) without Rekindle; estimated if a budget was given.
        choices: Budgets with the time of a step, the largest budget first.
        on_floor: Lines of advice on the operators that set the smallest budget.
        noise: By how much the slowest timed step exceeds the fastest, as a fraction of the fastest.
    """

    trace: Trace
    report: Report
    plain_ns: Nanoseconds
    choices: tuple[Choice, ...]
    on_floor: tuple[str, ...]
    noise: float = 0.0


def observe(
    step: Callable[[], object],
    *,
    amount: str | Bytes | None = None,
    policy: Policy | None = None,
    device: str | torch.device | None = None,
    repeats: int = 3,
    clock: Callable[[], Nanoseconds] = _clock.now,
    watch: Callable[[str], None] = lambda stage: None,
    swap: str | int | Swap | None = None,
    swap_directory: str | os.PathLike[str] | None = None,
) -> Observed:
    """Run `step` several times and return its trace, report and times.

    Args:
        step: The step. The state of the program that it changes is restored at the end.
        amount: The budget. Default: no limit.
        policy: The policy of the budget.
        device: The device whose memory is measured.
        repeats: The number of timed steps; up to `PATIENCE` times as many while their times
            disagree. With 0 the step runs once, the state is not restored, and the times are sums
            of the costs of operators.
        clock: Returns the time in ns.
        watch: Called with a text on the progress, such as "warming up".
        swap: Also measure budgets for `evict="anything"` and this `swap=`. `repeats` is not 0.
        swap_directory: The argument `swap_directory=` of these budgets.
    """

    def timed(run: Run) -> Nanoseconds:
        _synchronize(run)
        start = clock()
        step()
        _synchronize(run)
        return clock() - start

    def within(*, record: bool = False) -> budget:
        if amount is None:
            return budget.unlimited(device=device, record=record)
        return budget(amount, policy=policy, device=device, record=record)

    if not repeats:
        watch("running")
        with within(record=True) as run:
            step()
        trace, plain_ns = run.trace, max(1, run.trace.compute_ns)
        kept_ns = max(1, run.trace.compute_ns + prices().operator * len(trace.ops))
        choices = _known(run, policy, kept_ns, plain_ns, watch)
        advice = on_floor(trace, choices, run._driver.sliceable)
        return Observed(trace, run.report(), plain_ns, choices, advice)
    undo = Undo()
    plain: list[Nanoseconds] = []
    kept: list[Nanoseconds] = []
    try:
        watch("warming up")
        warm = _warm(step, within(), undo)
        # Alternate between steps with and without a budget, because the machine's load varies.
        for number in range(PATIENCE * repeats):
            if number >= repeats and _is_confirmed(kept) and _is_confirmed(plain):
                break
            watch(f"timing, {number + 1} of {max(number + 1, repeats)}")
            with within() as run, undo:
                step()
                before = _lost(run)
                elapsed = timed(run)
            kept.append(elapsed - (_lost(run) - before))
            if amount is None:
                with undo:
                    plain.append(timed(run))
        watch("recording")
        run = _record_step(step, within(record=True), undo, warm)
        trace, report, sliceable = run.trace, run.report(), run._driver.sliceable
        if not plain:
            plain.append(max(1, min(kept) - prices().operator * len(trace.ops)))
        choices: tuple[Choice, ...] = ()
        if swap is not None and trace.ops:
            undo.save_state()
            plain = [timed(run) for _ in range(repeats)]  # without the dispatch mode, as below
            moving = partial(
                budget,
                policy=policy,
                device=device,
                evict="anything",
                swap=swap,
                swap_directory=swap_directory,
            )
            steps = MeasuredSteps(step, timed, moving, min(plain), repeats, watch)
            choices = steps.with_moves(trace, keep_all_peak(trace))
        elif trace.ops:
            choices = _known(run, policy, min(kept), min(plain), watch)
            whole = choices[-1].budget
            in_slices = bool(choices[-1].sliced)
            least = least_in_slices(trace, whole, sliceable, is_in_slices=in_slices)
            if least < whole:
                undo.save_state()

                def sliced(nbytes: Bytes) -> budget:
                    undo.restore()  # a step that failed may have left gradients
                    return budget(nbytes, policy=policy, device=device, learn=False)

                steps = MeasuredSteps(step, timed, sliced, min(plain), 1, watch)
                smaller = steps.in_slices(least, choices[-1])
                choices += smaller
                sliceable = sliceable if smaller else frozenset()
    finally:
        undo.restore()
    noise = max(max(times) / max(1, min(times)) - 1 for times in (plain, kept))
    advice = on_floor(trace, choices, sliceable)
    return Observed(trace, report, min(plain), choices, advice, noise)


def _known(
    run: Run,
    policy: Policy | None,
    kept_ns: Nanoseconds,
    plain_ns: Nanoseconds,
    watch: Callable[[str], None],
) -> tuple[Choice, ...]:
    """Predict the time of the step within several budgets, by simulation.

    If operators ran in slices, the trace describes the slices. Then only the run's budget is known.

    Args:
        run: The run of the step, which was recorded.
        policy: The policy of the budgets.
        kept_ns: Time (ns) with Rekindle's bookkeeping but without eviction.
        plain_ns: Time (ns) without Rekindle.
        watch: Called with a text on the progress.
    """

    def choice(amount: Bytes, recompute_ns: Nanoseconds, recomputations: int) -> Choice:
        ns = kept_ns + recompute_ns + prices().again * recomputations
        return Choice(amount, ns, ns / plain_ns, recompute_ns, recomputations)

    def stage(done: int, of: int) -> None:
        watch(f"simulating budget {done + 1} of {of}")

    if not run.trace.ops:
        return ()
    sliced = tuple(each.operator for each in run._driver.sliced)
    if sliced and run.budget is not None:
        only = choice(run.budget, run.recompute_ns, run.recomputations)
        return (replace(only, measured=True, sliced=sliced),)
    points = curve(run.trace, policy_of(policy), watch=stage)
    return tuple(choice(each.budget, each.recompute_ns, each.recomputations) for each in points)


def _is_confirmed(times: list[Nanoseconds]) -> bool:
    """Return True if the two fastest step times are close, or if there are fewer than two."""
    quickest, *others = sorted(times) or [0]
    return not others or others[0] <= (1 + ALIKE) * quickest


def trace_of(step: Callable[[], object], device: str | torch.device | None, undo: Undo) -> Trace:
    """Return the trace of a step that finds optimizer state and gradients, as later steps do."""
    try:
        warm = _warm(step, budget.unlimited(device=device), undo)
        context = budget.unlimited(device=device, record=True)
        return _record_step(step, context, undo, warm).trace
    finally:
        undo.restore()


@final
@dataclass(frozen=True, slots=True)
class _Warm:
    """Findings of the two warm-up steps before a step is measured.

    Attributes:
        peak: The peak (bytes) of the second step.
        constants: Tensors that the program still holds after the second step.
        optimizers: The optimizers that stepped.
    """

    peak: Bytes
    constants: list[weakref.ref[Tensor]]
    optimizers: list[torch.optim.Optimizer]


def _warm(step: Callable[[], object], context: budget, undo: Undo) -> _Warm:
    """Run two steps: the first creates the optimizer's state, the second shows the peak."""
    with context as run, undo:
        step()
        run._driver.steps.forget_peak()
        step()
        return _Warm(run.peak, _constants(run), list(run._driver.owners.optimizers))


def _record_step(step: Callable[[], object], context: budget, undo: Undo, warm: _Warm) -> Run:
    """Run one step in `context`, which records it, and take a snapshot at its peak."""
    with context as run, undo:
        driver = run._driver
        # While the dispatch mode `undo` is on, autograd does not write results over gradients. The
        # trace must show where it would without the mode.
        driver.core.predict_in_place(driver.handle)
        driver.owners.optimizers.update(warm.optimizers)
        _register(run, warm)
        driver.peak.expect(int(0.98 * warm.peak))  # the peaks of two steps may differ a little
        step()
    return run


def _lost(run: Run) -> Nanoseconds:
    again = run.recomputations * prices().again if run.recomputations else 0
    return run.recompute_ns + again


def _synchronize(run: Run) -> None:
    if is_accelerator(run._driver.device):
        accelerator.synchronize(run._driver.device)


def _constants(run: Run) -> list[weakref.ref[Tensor]]:
    """Return weak references to the tensors that the program still holds after a step."""
    driver = run._driver
    return [weakref.ref(tensor) for tensor in driver.core.program_tensors(driver.handle)]


def _register(run: Run, warm: _Warm) -> None:
    """Register with the budget the tensors that the last step left, before the next step runs.

    The optimizer's state comes last, in the order of the optimizer. Otherwise the order in the
    trace would depend on what the process ran before.
    """
    of_optimizers = [
        entry
        for optimizer in warm.optimizers
        for entries in optimizer.state.values()
        for entry in entries.values()
        if isinstance(entry, Tensor)
    ]
    last = {id(entry) for entry in of_optimizers}
    found: list[Tensor] = []
    for reference in warm.constants:
        tensor = reference()
        if tensor is not None and id(tensor) not in last:
            found.append(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                found.append(tensor.grad)
    run._driver.register_tensors([*found, *of_optimizers])
