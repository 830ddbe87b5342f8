"""Run a scene (a kind of random program) in plain PyTorch and within budgets, and compare them."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal
from unittest.mock import patch

import torch

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.pytorch import cores
from tests.pytorch.fuzz.check import evicting_before_every_operator
from tests.pytorch.scenes.layers import WIDTH
from tests.pytorch.scenes.scenes import SCENES
from tests.pytorch.scenes.world import World

ROOMY: Final = 1 << 32
MOST_ATTEMPTS: Final = 60

#: A budget of `SLACK_SHARE` times the peak of plain PyTorch, plus `SLACK_BYTES`, must suffice. The
#: peak alone may not, because it does not include generator states and copies by NumPy, which a
#: budget counts.
SLACK_SHARE: Final = 1.08
SLACK_BYTES: Final = 160 << 10

#: In the mode "peak" the budget is `PEAK_SHARE` times the peak of plain PyTorch, plus
#: `NUMPY_BYTES`. A budget also counts NumPy arrays, which PyTorch's allocator does not make:
#: for example two copies of the largest batch.
PEAK_SHARE: Final = 1.03
NUMPY_BYTES: Final = 32 << 10

#: The allocator may have at most the budget times `CAP`, plus `UNNOTICED`, in use at once.
CAP: Final = 1.0

#: Bytes for workspaces so small that the core does not measure them.
UNNOTICED: Final = 1 << 10

#: In this scene, a thread that starts before the budget makes batches ahead. The budget counts a
#: batch only when the program reads it. So `BATCHES_OUTSIDE` batches may exist that it does not
#: count: two that are ready, and two more while the thread makes one.
OUTSIDE: Final = "prefetching thread"
BATCHES_OUTSIDE: Final = 4


@dataclass(frozen=True)
class Mode:
    """How a scene is run: arguments of `rekindle.budget`, and the amount that it gets."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    amount: Literal["roomy", "tight", "peak"] = "tight"
    everything: bool = False  # True to evict all that may be evicted before each operator
    counted: int = 0  # about as many operators are only counted at first (memory/only_counting.h)
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
        Mode("only counted", amount="roomy", counted=1 << 40),
        Mode("counted, then everything evicted", {}, "roomy", True, counted=300, weight=2),
        Mode("counted, then saved evicted", {"evict": "saved"}, "roomy", True, counted=300),
        Mode("peak", amount="peak"),
        Mode("learned, tight", {"learn": "wait"}, weight=1),
        Mode("swap, tight", {"swap": "1GiB"}, weight=1),
    )
}


@dataclass
class Played:
    """The results of one run of a scene."""

    left: dict[str, str]
    drawn: list[str]
    peak: int  # most bytes that the allocator returned at once
    within: int  # most bytes of these within a budget
    batch: int  # bytes of the largest batch


class NoRoomSomewhere(Exception):
    """Raised if PyTorch replaced an `OutOfBudget` by an error of its own."""


@dataclass
class Outcome:
    """The complaint about one program; empty if there is none."""

    seed: int
    scene: str
    mode: str = ""
    drawn: str = ""
    complaint: str = ""
    undetermined: bool = False


def play(seed: int, mode: Mode | None, amount: int = 0) -> Played:
    """Run the program of `seed` within a budget, or in plain PyTorch if `mode` is None.

    Raises:
        rekindle.OutOfBudget: The amount is too small.
        NoRoomSomewhere: The amount is too small, and PyTorch raised its own error.
    """
    tally = Tally()

    @contextmanager
    def budget() -> Iterator[Any]:
        if mode is None:
            yield None
            return
        with rekindle.budget(amount, **mode.arguments) as run, tally.of_a_budget():
            yield run  # afterwards user-held tensors are recomputed

    def change(run: Any, share: float) -> None:
        if mode is not None and mode.amount == "tight":
            with suppress(rekindle.OutOfBudget):  # smaller than the bytes that cannot be evicted
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
                # `load_state_dict` raises its own error with this text
                if "nothing is left to evict" in str(raised):
                    raise NoRoomSomewhere from raised
                error.append(raised)
                world.notes.append(f"{type(raised).__name__}: {str(raised).splitlines()[0]}")

    taken = cores.counting() if mode is not None else deep_copies_counted()
    if mode is not None and mode.counted:
        operators = Random(seed).randrange(mode.counted)
        cores.tune(lambda driver: driver.core.count_only(driver.handle, operators))
    everything = evicting_before_every_operator() if mode and mode.everything else nullcontext()
    with taken, everything, tally.counting():
        program()
    left = world.left()
    error.clear()
    batch = world.rows * 8 * WIDTH * torch.float32.itemsize
    return Played(left, [world.place, *world.drawn], tally.peak, tally.within, batch)


@contextmanager
def deep_copies_counted() -> Iterator[None]:
    """Allocate deep copies by the allocator that tallies count.

    PyTorch uses another allocator for them. A budget counts deep copies, so the peak of plain
    PyTorch must include them, too.
    """

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        made = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        return made.copy_(storage, non_blocking=False)

    with patch.object(torch.UntypedStorage, "clone", clone):
        yield


class Tally:
    """The bytes that the CPU's allocator returns to all threads."""

    def __init__(self) -> None:
        self.peak = 0  #: the peak of bytes in use
        self.within = 0  #: the peak within a budget, above the bytes in use when it began
        self._core: Any = native_core()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count bytes while the context is open."""
        self._core.count_allocations()
        self._core.tally(True)
        try:
            yield
        finally:
            self._look()
            self._core.tally(False)

    @contextmanager
    def of_a_budget(self) -> Iterator[None]:
        """Count bytes that are allocated inside the block as bytes of a budget.

        Memory allocated before the block also counts against the budget, once an operator reads it
        inside. This method does not count it, because the allocator does not report reads.
        """
        before, _ = self._look()
        try:
            yield
        finally:
            _, most = self._look()
            self.within = max(self.within, most - before)

    def _look(self) -> tuple[int, int]:
        now, most = self._core.tallied()
        self.peak = max(self.peak, most)
        return now, most


def scene_of(seed: int) -> str:
    """Return the kind of program that `seed` draws."""
    return Random(seed * 7919 + 1).choice(sorted(SCENES))


def judge(seed: int, modes: int = 2, only: tuple[str, ...] = ()) -> Outcome:
    """Run one program twice in plain PyTorch, and then in random modes; return the complaint."""
    rng = Random(seed + 1_000_003)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, again = play(seed, None), play(seed, None)
        plain.peak = max(plain.peak, again.peak)  # threads may overlap or not
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
    """Run the program of `seed` in `mode`, and return the complaint about it, or "".

    `tightness` 1 is the smallest budget that works, 0 is the peak of plain PyTorch.
    """
    most = int(plain.peak * SLACK_SHARE) + SLACK_BYTES
    amount = ROOMY if mode.amount == "roomy" else max(int(plain.peak * (1.02 - tightness)), 1 << 12)
    if mode.amount == "peak":
        amount, most = int(plain.peak * PEAK_SHARE), 0
        if scene_of(seed) == "policy gradient" or any("numpy" in each for each in plain.drawn):
            amount += NUMPY_BYTES
    for _ in range(MOST_ATTEMPTS):
        try:
            with cores.fixed_prices():
                got = play(seed, mode, amount)
                if _most_within(seed, got, amount) < got.within:
                    # The first call of an operator shows the core its workspace. Once the core
                    # knows the workspace, the same program stays within the budget.
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
        except NoRoomSomewhere:
            amount = int(amount * 1.1)
            continue
        names = [name for name in {**plain.left, **got.left}
                 if plain.left.get(name) != got.left.get(name)]  # fmt: skip
        if names:
            shown = "; ".join(
                f"{name}: {plain.left.get(name)} became {got.left.get(name)}"[:300]
                for name in names[:3]
            )
            return f"within {amount} bytes {len(names)} of {len(plain.left)} differ: {shown}"
        if got.within > _most_within(seed, got, amount):
            return f"the allocator gave out {got.within} bytes within a budget of {amount}"
        return ""
    return f"still too little after {MOST_ATTEMPTS} attempts, at {amount} bytes"


def _most_within(seed: int, played: Played, amount: int) -> float:
    """Return how many bytes the allocator may return within a budget of `amount`."""
    if played.drawn[0] == "changes":  # the times at which the budget changes are not known here
        return math.inf
    outside = BATCHES_OUTSIDE * played.batch if scene_of(seed) == OUTSIDE else 0
    return amount * CAP + UNNOTICED + outside
