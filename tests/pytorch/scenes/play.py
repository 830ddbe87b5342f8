"""Run a scene (a kind of random program), and measure its memory at the CPU's allocator."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Final
from unittest.mock import patch

import torch

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.differ.judge import Outcome, Plain, Program, judge
from tests.differ.modes import MOVED, SPLIT, Mode, Setting, by_name, drawn
from tests.pytorch.scenes.layers import WIDTH
from tests.pytorch.scenes.scenes import SCENES
from tests.pytorch.scenes.world import World

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


MODES = by_name(
    Mode("roomy", amount="roomy", weight=0.5),
    Mode("tight", weight=4),
    Mode("saved, tight", {"evict": "saved"}, weight=2),
    Mode("anything, tight", {"evict": "anything"}, weight=3),
    Mode("everything evicted", amount="roomy", everything=True, weight=2),
    Mode("anything, everything evicted", {"evict": "anything"}, "roomy", everything=True, weight=2),
    Mode("only counted", amount="roomy", counted=1 << 40),
    Mode("counted, then everything evicted", {}, "roomy", everything=True, counted=300, weight=2),
    Mode("counted, then saved evicted", {"evict": "saved"}, "roomy", everything=True, counted=300),
    Mode("peak", amount="peak"),
    Mode("learned, tight", {"learn": "wait"}, weight=1),
    Mode("swap, tight", {"swap": "1GiB"}, weight=1),
    Mode("moved, everything evicted", MOVED, "roomy", everything=True, weight=1),
    Mode("moved, tight", MOVED, "creeping", weight=1.5),
    Mode("split, tight", SPLIT, "creeping", weight=1.5),
    Mode("moved, split, tight", MOVED | SPLIT, "creeping", weight=1),
)


class Tallied(Setting):
    """A setting whose peaks are those of all allocations, those of other threads included.

    It has no dispatch mode, so PyTorch takes the code paths that it takes without Rekindle.
    """

    def __init__(self, mode: Mode | None, amount: int | None = 0, **how: Any) -> None:
        super().__init__(mode, amount, tracked=False, **how)
        self.outside = 0.0  #: bytes in use within a budget that it need not count

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.tally = Tally()
        gc.collect()  # what an earlier run left must not be freed meanwhile
        try:
            with self.tally.counting():
                yield
        finally:
            self.peak = self.tally.peak if self.mode is None else self.tally.within

    @contextmanager
    def budget(self) -> Iterator[Any]:
        within = nullcontext() if self.mode is None else self.tally.of_a_budget()
        with super().budget() as run, within:
            yield run  # afterwards user-held tensors are recomputed

    @property
    def most(self) -> float:
        return super().most * CAP + UNNOTICED + self.outside

    def change(self, run: Any, share: float) -> None:
        if self.mode is not None and self.mode.amount == "tight":
            with suppress(rekindle.OutOfBudget):  # smaller than the bytes that cannot be evicted
                run.budget = max(int((self.amount or 0) * share), 1)


@dataclass(frozen=True)
class Scene(Program):
    """The program that `seed` draws."""

    seed: int
    measured_below: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return scene_of(self.seed)

    @property
    def suggests(self) -> bool:  # type: ignore[override]
        return World(self.seed).place != "changes"

    def text(self, mode: Mode, amount: int) -> str:
        drawn = self.run(self.setting(None))["drawn"]
        return f"{self.name}: {', '.join(drawn)}"

    def setting(self, mode: Mode | None, amount: int | None = 0, **how: Any) -> Setting:
        return Tallied(mode, amount, **how)

    def amount(self, plain: Plain, mode: Mode, tightness: float) -> int:
        if mode.amount != "peak":
            return max(int(plain.peak * (1.02 - tightness)), 1 << 12)
        copies = self.name == "policy gradient"
        copies |= any("numpy" in each for each in plain.first["drawn"])
        return int(plain.peak * PEAK_SHARE) + NUMPY_BYTES * copies

    def most(self, plain: Plain, mode: Mode) -> float:
        return 0 if mode.amount == "peak" else int(plain.peak * SLACK_SHARE) + SLACK_BYTES

    def larger(self, amount: int, attempt: int) -> int:
        return int(amount * 1.1)

    def run(self, setting: Setting) -> dict[str, Any]:
        assert isinstance(setting, Tallied)
        try:
            found = self._play(setting)
            if setting.mode is None or setting.peak <= setting.most:
                return found
        except rekindle.OutOfBudget:
            if setting.peak <= setting.most:
                raise
        # The first call of an operator shows the core its workspace. Once the core knows the
        # workspace, the same program stays within the budget, or is refused before it leaves it.
        return self._play(setting)

    def _play(self, setting: Tallied) -> dict[str, Any]:
        error, world = "", World(self.seed, setting.budget, setting.change)
        if world.place == "changes":  # the times at which the budget changes are not known here
            setting.outside = math.inf
        elif self.name == OUTSIDE:
            setting.outside = BATCHES_OUTSIDE * world.rows * 8 * WIDTH * torch.float32.itemsize
        copied = deep_copies_counted() if setting.mode is None else nullcontext()
        with copied, setting.whole(), world.running():
            try:
                SCENES[self.name](world)
            except rekindle.OutOfBudget:
                raise
            except Exception as raised:
                # `load_state_dict` raises its own error with this text
                if "nothing is left to evict" in str(raised):
                    more = int((setting.amount or 0) * 1.1)
                    raise rekindle.OutOfBudget(str(raised), smallest_budget=more) from raised
                error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
        return {**world.left(), "error": error, "drawn": [world.place, *world.drawn]}


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


def judged(seed: int, modes: int = 2, only: Sequence[str] = ()) -> Outcome:
    """Compare one program with plain PyTorch in random modes."""
    rng = Random(seed + 1_000_003)
    possible = {name: mode for name, mode in MODES.items() if not only or name in only}

    def chosen() -> Iterator[tuple[Mode, float]]:
        for _ in range(min(modes, len(possible))):
            (mode,) = drawn(possible, rng, 1)
            del possible[mode.name]
            yield mode, rng.choice((1.0, 0.9, rng.random()))

    return judge(Scene(seed), chosen())
