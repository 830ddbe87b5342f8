"""Play a scene plainly and within budgets, and say what differs."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal

from torch.profiler import ProfilerActivity, profile

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.pytorch import cores
from tests.pytorch.fuzz.check import letting_go_of_everything
from tests.pytorch.scenes.scenes import SCENES
from tests.pytorch.scenes.world import World

ROOMY: Final = 1 << 32
MOST_ATTEMPTS: Final = 60

#: Above the plain peak: what a budget may need more. Generators' states and NumPy's copies are
#: counted within a budget, and are no memory of PyTorch's allocator.
SLACK_SHARE: Final = 1.08
SLACK_BYTES: Final = 160 << 10

#: Above the plain peak: what a program may need more where it is played at just that. Arrays of
#: NumPy's, such as two of the largest batch, count within a budget, and are no memory of PyTorch's
#: allocator.
PEAK_SHARE: Final = 1.03
NUMPY_BYTES: Final = 32 << 10

#: Above the budget: the clocks of the program and of the allocator's events are two.
CAP: Final = 1.02
CAP_BYTES: Final = 32 << 10

#: Layers whose operators take memory inside themselves. Their first calls tell how much, so that
#: those may pass the budget.
LEARNED: Final = {"convolution", "depthwise", "dilated", "transposed", "image", "lstm"}


@dataclass(frozen=True)
class Mode:
    """How a scene is played: arguments of `rekindle.budget`, and how much it gets."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    amount: Literal["roomy", "tight", "peak"] = "tight"
    everything: bool = False  # all that may be evicted is, before each operator
    weight: float = 1.0


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("roomy", amount="roomy", weight=0.5),
        Mode("tight", weight=4),
        Mode("saved, tight", {"evict": "saved"}, weight=2),
        Mode("anything, tight", {"evict": "anything"}, weight=3),
        Mode("everything evicted", amount="roomy", everything=True, weight=2),
        Mode("anything, everything evicted", {"evict": "anything"}, "roomy", True, weight=2),
        Mode("peak", amount="peak"),
        Mode("learned, tight", {"learn": "wait"}, weight=1),
        Mode("swap, tight", {"swap": "1GiB"}, weight=1),
    )
}


@dataclass
class Played:
    """What one run of a scene left behind."""

    left: dict[str, str]
    drawn: list[str]
    peak: int  # by the allocator, of the whole program
    within: int  # by the allocator's events, made while a budget was active


@dataclass
class Outcome:
    """What is wrong with one program; empty complaint: nothing."""

    seed: int
    scene: str
    mode: str = ""
    drawn: str = ""
    complaint: str = ""
    undetermined: bool = False


def play(seed: int, mode: Mode | None, amount: int = 0) -> Played:
    """Run the program of `seed`; plainly without a mode.

    Raises:
        rekindle.OutOfBudget: the amount is too small.
    """
    windows: list[list[int]] = []

    @contextmanager
    def budget() -> Iterator[Any]:
        if mode is None:
            yield None
            return
        with rekindle.budget(amount, core="native", **mode.arguments) as run:
            windows.append([time.time_ns()])
            try:
                yield run
            finally:  # afterwards evicted tensors that the program holds come back
                windows[-1].append(time.time_ns())

    def change(run: Any, share: float) -> None:
        if mode is not None and mode.amount == "tight":
            with suppress(rekindle.OutOfBudget):  # smaller than what cannot be evicted
                run.budget = max(int(amount * share), 1)

    world = World(seed, budget, change)
    name = scene_of(seed)
    error: list[BaseException] = []

    def program() -> None:
        with world.running():
            try:
                SCENES[name](world)
            except rekindle.OutOfBudget:
                raise
            except Exception as raised:
                error.append(raised)
                world.notes.append(f"{type(raised).__name__}: {str(raised).splitlines()[0]}")

    taken = cores.taken("native") if mode is not None else nullcontext()
    everything = letting_go_of_everything() if mode and mode.everything else nullcontext()
    counted = [0]
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    counting = nullcontext() if mode is not None else _counted(counted)
    with taken, cores.fixed_prices(), everything, counting, watched as observed:
        program()
    left = world.left()
    error.clear()
    peak, within = _peaks(observed, windows)
    return Played(left, [world.place, *world.drawn], max(peak, *counted), within)


@contextmanager
def _counted(most: list[int]) -> Iterator[None]:
    """Note the most that is allocated at once inside, where no budget may be.

    The profiler has no events of threads that a program starts, nor this the memory of storages
    that no operator makes.
    """
    core: Any = native_core()
    assert core.count_allocations()
    assert core.watch()
    try:
        yield
    finally:
        most[:] = [core.watched()[1]]


def _peaks(observed: profile, windows: list[list[int]]) -> tuple[int, int]:
    """Return the most memory at once by the allocator's events: in all, and made within `windows`.

    Memory from before a budget counts within it once it is seen, which no event tells.
    """
    events = [e for e in observed.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = within = 0
    before = dict.fromkeys(range(len(windows)), 0)
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
        for number, (begin, end) in enumerate(windows):
            if event.start_ns() < begin:
                before[number] = alive
            elif event.start_ns() <= end:
                within = max(within, alive - before[number])
    return peak, within


def scene_of(seed: int) -> str:
    """The kind of program that `seed` is."""
    return Random(seed * 7919 + 1).choice(sorted(SCENES))


def judge(seed: int, modes: int = 2, only: tuple[str, ...] = ()) -> Outcome:
    """Play one program plainly twice, and in drawn modes."""
    rng = Random(seed + 1_000_003)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, again = play(seed, None), play(seed, None)
        plain.peak = max(plain.peak, again.peak)  # threads may meet, or not
        outcome = Outcome(seed, scene_of(seed), drawn=", ".join(plain.drawn))
        if plain.left != again.left:
            outcome.undetermined = True
            return outcome
        possible = [mode for mode in MODES.values() if not only or mode.name in only]
        for _ in range(min(modes, len(possible))):
            (mode,) = rng.choices(possible, [each.weight for each in possible])
            possible.remove(mode)
            complaint = _complaint(seed, plain, mode, rng.choice((1.0, 0.9, rng.random())))
            gc.collect()
            if complaint:
                outcome.mode, outcome.complaint = mode.name, complaint
                return outcome
    return outcome


def _complaint(seed: int, plain: Played, mode: Mode, tightness: float) -> str:
    """What is wrong in `mode`, from the least that works (tightness 1) to the plain peak (0)."""
    most = int(plain.peak * SLACK_SHARE) + SLACK_BYTES
    amount = ROOMY if mode.amount == "roomy" else max(int(plain.peak * (1.02 - tightness)), 1 << 12)
    if mode.amount == "peak":
        amount, most = int(plain.peak * PEAK_SHARE), 0
        if scene_of(seed) == "policy gradient" or any("numpy" in each for each in plain.drawn):
            amount += NUMPY_BYTES
    for _ in range(MOST_ATTEMPTS):
        try:
            got = play(seed, mode, amount)
        except rekindle.OutOfBudget as error:
            if error.smallest_budget <= amount and plain.drawn[0] != "changes":
                return f"{amount} bytes are too little, and {error.smallest_budget} are asked for"
            if amount > most:
                return (
                    f"needs {error.smallest_budget} bytes or more, and gets {amount}: plain "
                    f"PyTorch's peak is {plain.peak}; {str(error).splitlines()[0]}"
                )
            amount = max(error.smallest_budget, int(amount * 1.1))
            continue
        names = [name for name in {**plain.left, **got.left}
                 if plain.left.get(name) != got.left.get(name)]  # fmt: skip
        if names:
            shown = "; ".join(
                f"{name}: {plain.left.get(name)} became {got.left.get(name)}"[:300]
                for name in names[:3]
            )
            return f"within {amount} bytes {len(names)} of {len(plain.left)} differ: {shown}"
        capped = got.drawn[0] in ("all", "until the last") and LEARNED.isdisjoint(got.drawn)
        if capped and got.within > amount * CAP + CAP_BYTES:
            return f"the allocator gave out {got.within} bytes within a budget of {amount}"
        return ""
    return f"still too little after {MOST_ATTEMPTS} attempts, at {amount} bytes"
