"""Predict memory and time of training steps: `rekindle.profile` and `rekindle.max_batch`.

`profile` runs one step and records its trace; then the simulator predicts the step's time within
smaller budgets. A trace describes neither weights and optimizer state that move to the host, with
`swap=`, nor operators that run in slices: real steps run within these budgets. `max_batch` runs
real steps of several batch sizes. With `simulated=True` it runs only small batches, and simulates
larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from os import PathLike
from typing import final

from rekindle import _checks as checks
from rekindle import _clock
from rekindle._errors import InvalidArgument, OutOfBudget, Unsupported
from rekindle._progress import ProgressLine
from rekindle._public import publish
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, parse_bytes
from rekindle.policies import Policy, Swap, policy_of
from rekindle.report import Choice, Profile
from rekindle.simulator import at_batch, fits, smallest_budget


def profile(
    step: Callable[[], object],
    *,
    budget: str | Bytes | None = None,
    policy: Policy | type[Policy] | str | None = None,
    device: str | None = None,
    repeats: int = 3,
    clock: Callable[[], Nanoseconds] = _clock.now,
    watch: Callable[[str], None] | None = None,
    swap: str | Bytes | Swap | None = None,
    swap_directory: str | PathLike[str] | None = None,
) -> Profile:
    """Measure what one step needs, and predict its time within smaller budgets.

    The step runs several times, and everything that it changes is restored: weights, buffers,
    gradients, optimizer state, random generators. Iterators are not restored: a data loader goes on
    after the batches that the step took. If one operator sets the smallest predicted budget, but
    can run in slices, up to a dozen smaller budgets are measured: two more steps run in each.

    Args:
        step: A function that makes one whole step: forward, backward, optimizer.
        budget: Run within this budget (bytes, or text such as "6GiB") if the step does not fit
            without one. Default: no limit.
        policy: The policy that selects storages to evict, in the run and in the prediction.
            Default: `Thrifty()`.
        device: The device whose memory is measured. Default: CUDA if the program uses it, else the
            CPU.
        repeats: How often to time the step. Each time, it runs once with Rekindle's bookkeeping and
            once without it. On a busy machine, up to four times as many repetitions are made. With
            0 the step runs once and nothing is restored; the time of the step is then the sum of
            the times of its operators.
        clock: The clock that times the step, in ns.
        watch: A function that is called with a line about the current stage. Default: a progress
            line on a terminal, a line every ten seconds in a log.
        swap: As for `rekindle.budget`. The smallest budget and the times are then those for
            `evict="anything"` and `swap=`, with which weights, gradients and optimizer state move
            to the host. They are measured, not predicted: real steps run within several budgets.
        swap_directory: As for `rekindle.budget`.

    Returns:
        A `Profile`: the holders of memory at the peak, the smallest feasible budget, and the
        predicted or measured time of a step for each budget.

    Raises:
        OutOfBudget: The step does not fit into `budget`.
        Unsupported: `swap` is given with a `budget`, or with `repeats=0`.

    Example:
        ```python
        profile = rekindle.profile(step)
        print(profile)
        profile.budget_for(slowdown=1.1), profile.fits("8GB")
        ```
    """
    from rekindle.pytorch import observe

    checks.step(step, "rekindle.profile({})")
    checks.number(repeats, 0, "rekindle.profile(step, repeats={})", "3")
    if budget is not None and budget != "auto":
        budget = parse_bytes(budget, line="rekindle.profile(step, budget={})")
    policy = policy_of(policy)
    if swap is not None:
        _check_swap(budget, repeats)
    elif swap_directory is not None:
        raise InvalidArgument(
            f"rekindle.profile(step, swap_directory={str(swap_directory)!r}): got no swap=, "
            'without which nothing is swapped; write rekindle.profile(step, swap="32GiB", '
            "swap_directory=...)"
        )
    with ProgressLine() as progress:
        show = watch or progress
        seen = observe(
            step,
            amount=budget,
            policy=policy,
            device=device,
            repeats=repeats,
            clock=clock,
            watch=show,
            swap=swap,
            swap_directory=swap_directory,
        )
        if not seen.trace.ops:
            raise InvalidArgument(
                "rekindle.profile: got a step that ran no operator of PyTorch, wanted one that "
                "trains; write rekindle.profile(lambda: step(batch))"
            )
    choices = seen.choices
    on_smallest = seen.on_floor if swap is None else _on_moving(choices[-1], swap)
    report = replace(
        seen.report,
        title="A profile of one step",
        choices=choices,
        keep_all=choices[0].budget if choices else None,
        smallest_budget=choices[-1].budget if choices else None,
        plain_ns=seen.plain_ns,
        advice=(*seen.report.advice, *on_smallest, *_on_noise(choices, seen.noise)),
    )
    return Profile(report, seen.trace, seen.noise)


def _check_swap(budget: str | Bytes | None, repeats: int) -> None:
    """Raise `Unsupported` if `profile` cannot measure steps whose state moves."""
    if budget is not None:
        raise Unsupported(
            f"rekindle.profile(step, budget={budget!r}, swap=...): no step can be recorded while "
            "weights and optimizer state move to the host. Leave out budget=; or write "
            "rekindle.estimate(model, batch, optimizer=optimizer, swap=...), which needs no memory"
        )
    if not repeats:
        raise Unsupported(
            "rekindle.profile(step, repeats=0, swap=...): to measure budgets with state on the "
            "host, a step runs several times. Leave out repeats=, or write a function for "
            "rekindle.profile that takes one step, and can be called again"
        )


def _on_moving(smallest: Choice, swap: object) -> tuple[str, ...]:
    """Return a line of advice: how to use the smallest budget in which state moves."""
    fits = f"{format_bytes(smallest.budget)} with {format_bytes(smallest.host)} on the host"
    line = f'rekindle.budget({smallest.budget}, evict="anything", swap={swap!r})'
    return (f"The step fits into {fits}, in {smallest.slowdown:.2f} times the time: {line}",)


def _on_noise(choices: tuple[Choice, ...], noise: float) -> tuple[str, ...]:
    """Return a line of advice if noise made a predicted slowdown smaller than 1."""
    least = min((choice.slowdown for choice in choices), default=1.0)
    if least >= 1.0:
        return ()
    advice = (
        f"A predicted time below 1.00 x, such as {least:.2f} x, comes from noise in the "
        f"measurements: the same step took up to {noise:.0%} longer in one repetition than in "
        "another. Write more repeats=, or measure on a machine with less other work."
    )
    return (advice,)


@final
class Batch(int):
    """A batch size, as an int.

    Attributes:
        slowdown: The time of a step divided by its time without recomputation; 1.0: no slowdown.
    """

    slowdown: float

    def __new__(cls, size: int, slowdown: float) -> Batch:
        batch = super().__new__(cls, size)
        batch.slowdown = slowdown
        return batch

    def __repr__(self) -> str:
        return f"{int(self)} (a step takes {self.slowdown:.2f} x its plain time)"


def max_batch(
    step_factory: Callable[[int], Callable[[], object]],
    *,
    budget: str | Bytes = "auto",
    slowdown: float | None = None,
    at_most: int = 1 << 20,
    simulated: bool = False,
    policy: Policy | type[Policy] | str | None = None,
    device: str | None = None,
    watch: Callable[[str], None] | None = None,
    swap: str | Bytes | Swap | None = None,
    swap_directory: str | PathLike[str] | None = None,
) -> Batch:
    """Find the largest batch whose training step fits into a budget.

    Batch sizes are doubled until one does not fit, then bisected. For each size the step runs
    twice, and everything that it changes is restored: weights, buffers, gradients, optimizer state,
    random generators.

    Args:
        step_factory: A function from a batch size to a function that makes one whole step.
        budget: The budget in bytes or as text ("6GiB"). "auto": the free memory of the device,
            with a margin.
        slowdown: The most that recomputation may slow a step: 1.3 means 30 % more time. Default: no
            limit.
        at_most: Sizes above this one are not tried.
        simulated: Run only batches of 2 and 4 and extrapolate their traces. This is quick and needs
            little memory, but less exact: run a real step of the returned size before you rely on
            the size. It runs no operator in slices, with which larger batches may fit.
        policy: As for `rekindle.profile`.
        device: As for `rekindle.profile`.
        watch: A function that is called with a line about the current stage. Default: a progress
            line on a terminal, a line every ten seconds in a log.
        swap: As for `rekindle.budget`. The steps then run with `evict="anything"` and `swap=`, so
            that weights, gradients and optimizer state may move to the host.
        swap_directory: As for `rekindle.budget`.

    Returns:
        The batch size, an int with an attribute `slowdown`.

    Raises:
        OutOfBudget: Not even a batch of 1 fits.
        InvalidArgument: `step_factory` does not return a function.
        Unsupported: `simulated` is given with `swap`.

    Example:
        ```python
        rekindle.max_batch(lambda n: lambda: train(batch[:n]), budget="6GiB")
        ```
    """
    from rekindle.pytorch import Probe, prices

    line = "rekindle.max_batch(step_factory, {})"
    checks.function(step_factory, "rekindle.max_batch({})", "lambda n: lambda: step(batch[:n])", 1)
    checks.number(at_most, 1, line.format("at_most={}"), "4096")
    if slowdown is not None:
        checks.number(slowdown, 1.0, line.format("slowdown={}"), "1.3")
    if budget != "auto":
        budget = parse_bytes(budget, line=line.format("budget={}"))
    if simulated and swap is not None:
        raise Unsupported(
            "rekindle.max_batch(step_factory, simulated=True, swap=...): no simulation knows "
            "weights and optimizer state that move to the host; leave out simulated= or swap="
        )
    progress = ProgressLine()
    watch = watch or progress
    policy = policy_of(policy)
    most = float("inf") if slowdown is None else slowdown
    probe = Probe(budget, policy, device, swap, swap_directory)
    limit = probe.budget
    shortages: list[Exception] = []
    price: dict[int, float] = {}
    too_slow: list[float] = []

    def allowed(batch: int, price_now: float) -> bool:
        if price_now <= most:
            price[batch] = price_now
        else:
            too_slow.append(price_now)
        return batch in price

    def step_of(batch: int) -> Callable[[], object]:
        step: object = step_factory(batch)
        if not callable(step):
            raise InvalidArgument(
                f"rekindle.max_batch: step_factory({batch}) returned {type(step).__name__}, wanted "
                "a function that takes one step; write rekindle.max_batch(lambda n: lambda: "
                "step(batch[:n]))"
            )
        return step

    def runs(batch: int) -> bool:
        watch(f"trying a batch of {batch}{_so_far(price)}")
        shortage, price_now = probe.tried(step_of(batch))
        if shortage is not None:
            shortages.append(shortage)
            return False
        return allowed(batch, price_now)

    feasible = runs
    if simulated:
        watch("recording batches of 2 and 4")
        two, four = ((batch, probe.trace(step_of(batch))) for batch in (2, 4))

        def simulates(batch: int) -> bool:
            watch(f"simulating a batch of {batch}{_so_far(price)}")
            trace = at_batch(two, four, batch)
            record = fits(trace, limit, policy)
            if record is not None:
                again = record.recompute_ns + prices().again * record.recomputations
                return allowed(batch, 1 + again / max(1, record.compute_ns))
            if batch == 1:
                smallest = smallest_budget(trace, policy, above=limit + 1)
                shortages.append(_does_not_fit(limit, smallest))
            return False

        feasible = simulates
    try:
        found = largest(feasible, at_most)
    finally:
        progress.done()
    if found:
        return Batch(found, price[found])
    raise shortages[0] if shortages else _too_slow(limit, too_slow[0], most, simulated)


def _so_far(price: dict[int, float]) -> str:
    if not price:
        return ""
    best = max(price)
    return f"; {best} fits at {price[best]:.2f} x"


def largest(feasible: Callable[[int], bool], at_most: int) -> int:
    """Find the largest number for which `feasible` is True, by doubling, then bisection.

    Args:
        feasible: A function of a number, True up to some number and False above that number.
        at_most: The largest number to try.

    Returns:
        A number from 1 to `at_most`, or 0 if not even 1 is feasible.
    """
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


def _does_not_fit(budget: Bytes, smallest: Bytes) -> OutOfBudget:
    return OutOfBudget(
        "rekindle.max_batch: in simulation, a batch of 1 does not fit into "
        f"{format_bytes(budget)}: it needs {format_bytes(smallest)}; write "
        f"rekindle.max_batch(step_factory, budget={smallest})",
        needed=smallest - budget,
        budget=budget,
        held={},
        smallest_budget=smallest,
    )


def _too_slow(budget: Bytes, price: float, most: float, simulated: bool) -> OutOfBudget:
    """Return the error for a batch of 1 that runs within `budget`, but takes too long."""
    where = "in simulation, " if simulated else ""
    return OutOfBudget(
        f"rekindle.max_batch: {where}a batch of 1 fits into {format_bytes(budget)}, but a "
        f"step takes {price:.2f} times as long as without a budget, wanted at most {most:.2f} "
        "times; write a larger budget=, or rekindle.max_batch(step_factory, "
        f"slowdown={ceil(100 * price) / 100:.2f})",
        needed=0,
        budget=budget,
        held={},
        smallest_budget=budget,
    )


publish("rekindle", [Batch, max_batch, profile])
