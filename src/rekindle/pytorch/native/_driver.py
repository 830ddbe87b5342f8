"""The native driver as the rest of the house sees a driver: numbers, a report, `keep`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, final
from warnings import warn

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, format_ns
from rekindle.policies import DEFAULT, Policy, Swap, score_of
from rekindle.pytorch.native._answers import drivers
from rekindle.pytorch.native._engine import NativeEngine
from rekindle.pytorch.native._higher import shown_name
from rekindle.pytorch.native._snapshots import in_words
from rekindle.pytorch.native._transcript import NativeCapture
from rekindle.pytorch.online import (
    Figures,
    KnowsThreads,
    Owners,
    Places,
    Site,
    Snapshot,
    Steps,
    StepUndo,
    TransfersOnHost,
    WarmOptimizers,
    elsewhere,
    leaves,
    memory_of,
    users_line,
)
from rekindle.schedule import Recorder

MUCH_LOST: Final = 10_000_000_000
"""Nanoseconds: less time lost is nothing to warn of."""


class Watcher(Protocol):
    """Who knows the program's steps."""

    def begins(self, met: int) -> None:
        """A step begins with an operator that the core knows nothing of."""
        ...

    def step(self) -> None:
        """A step is over, and another one begins."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class CopiesOnHost(Protocol):
    """Who makes them."""

    @property
    def transfers(self) -> TransfersOnHost:
        """Those that are over."""
        ...

    def complain(self) -> None:
        """Warns of what went wrong."""
        ...


class NativeShortfall(NamedTuple):
    """How often the device had less than the budget says; what that is now, negative: none; how
    often no place among neighbors in memory helped; how often something was evicted for a place
    before the allocator was asked."""

    times: int
    budget: Bytes
    by_sum: int
    for_places: int


@final
class NativePeak:
    """Who held memory when there was most of it. The core notes that itself, at each new peak."""

    def __init__(self, driver: NativeDriver) -> None:
        self._driver = weakref.ref(driver)

    @property
    def now(self) -> Snapshot:
        """In words."""
        driver = self._driver()
        if driver is None:
            return Snapshot()
        self.note_states()
        return in_words(driver.core.peak_snapshot(driver.handle))

    def note_states(self) -> None:
        """Ask optimizers what is their state, while they and that are there."""
        driver = self._driver()
        if driver is not None and driver.core.has_new_peak(driver.handle):
            driver.core.note_states(driver.handle, list(driver.owners.optimizers))

    def expect(self, nbytes: Bytes) -> None:
        """Take a snapshot now, and one of each new peak of `nbytes` or more."""
        driver = self._driver()
        if driver is not None:
            driver.core.expect_peak(driver.handle, nbytes)
            if driver.places is not None:
                self.look()

    def look(self) -> None:
        """Keep the words of the first snapshot and of this one, for the kinds of a trace."""
        driver = self._driver()
        if driver is not None:
            driver.looks[1:] = [self.now]


@final
class NativeAudit:
    """What recomputation gave, compared with the first time. Costs a pass over every result."""

    def __init__(self, core: ModuleType, handle: Any) -> None:
        self._core = core
        self._handle = handle
        self._lines: list[str] = []  # of the program, for each operator

    def note(self, operators: int) -> None:
        """There are so many operators by now: those of late ran at this line."""
        self._lines += [users_line()] * (operators - len(self._lines))

    @property
    def different(self) -> tuple[Site, ...]:
        """The operators that gave something else when they ran again, in order, each once."""
        found = self._core.recomputed_differently(self._handle)
        return tuple({Site(shown_name(name), self._lines[op]): None for name, op in found})


@final
class NativeDriver:
    """One native engine and the memory that it decides about."""

    def __init__(
        self,
        core: ModuleType,
        budget: Bytes | None,
        device: torch.device,
        assumed: bool = False,
        learns: bool = False,
        lends: bool = False,
        anything: bool = False,
        swaps: tuple[CopiesOnHost, Swap] | None = None,
        policy: Policy = DEFAULT,
    ) -> None:
        self.core = core
        amount = -1 if budget is None else budget
        score, chooser = score_of(policy), None
        if score is None:  # the core does not know it, and asks it
            score, chooser = (0, False, False, False), policy.bind()
        self.handle = core.new(amount, str(device), assumed, learns, lends, score, chooser)
        #: Whether anything may go, what is made with grad mode off as well.
        self.anything = anything
        if anything:
            core.let_go_of_anything(self.handle)
        self.lending: KnowsThreads | None = None  #: of a driver that evicts what variables hold
        self.watcher: Watcher | None = None  #: only of a driver that learns
        self.copies: CopiesOnHost | None = None
        self.transfers: TransfersOnHost | None = None
        if swaps is not None:
            self.copies, swap = swaps
            self.transfers = self.copies.transfers
            core.swap(
                self.handle, self.copies, -1 if swap.host is None else swap.host,
                swap.out_bytes_per_s, swap.in_bytes_per_s, swap.only,
            )  # fmt: skip
        self.engine = NativeEngine(core, self.handle, budget, swaps=swaps is not None)
        self.device = device
        self.lock = threading.RLock()  # of what is in Python around the core
        self.capture: NativeCapture | None = None  #: of a part of the run
        self.whole: NativeCapture | None = None  #: of the whole run, if it is asked for
        self.figures: Figures | None = None  #: those of the record, if it is over
        self.places: Places | None = None
        self.audit: NativeAudit | None = None
        self.looks: list[Snapshot] = []  #: while places are noted: the first, and the last
        self.owners = Owners(partial(core.add_module_tensor, self.handle))
        self.steps = Steps(self.engine)
        self.undo: StepUndo | None = None  #: of the step that is running
        self._stepping = False
        self._warned = False  # of time lost
        self._warm = WarmOptimizers()  # those with a state from before, by their parameters
        self.peak = NativePeak(self)
        #: When the last `OutOfBudget` was, and a copy of it, which has no frames.
        self.refused: tuple[int, OutOfBudget] | None = None
        drivers[core.number(self.handle)] = self
        leaves.come_back()  # until the core is gone, which handles outlive us with

    @property
    def at_peak(self) -> Snapshot:
        """Who held memory when there was most of it."""
        return self.peak.now

    @property
    def operators_run(self) -> int:
        """What moves with each of them."""
        return self.engine.clock

    @property
    def evictions(self) -> int:
        return self.engine.now().evictions

    @property
    def recomputations(self) -> int:
        return self.engine.now().recomputations

    @property
    def lost_ns(self) -> Nanoseconds:
        """Time lost: recomputed operators, and what it took to choose, evict and rebuild."""
        now = self.engine.now()
        return max(now.lost_ns, now.recompute_ns)

    def warn_of_losses(self) -> None:
        """Warn, once, if most of the time goes into recomputation."""
        now = self.engine.now()
        if self._warned or now.lost_ns < max(MUCH_LOST, now.compute_ns):
            return
        self._warned = True
        everything = now.memory + self.core.evicted_bytes(self.handle)
        budget = int(self.engine.budget)
        warn(
            f"recomputation took {format_ns(now.lost_ns)} so far, the computation itself "
            f"{format_ns(now.compute_ns)}: a budget of {format_bytes(budget)} is too small to be "
            f"fast. Without evictions there would be {format_bytes(everything)} in use now; write "
            f"rekindle.budget({max(everything + budget, 2 * budget) // 2}) or more",
            stacklevel=2,
        )

    @property
    def shortfall(self) -> NativeShortfall:
        """Of the device, beneath the budget."""
        return NativeShortfall(*self.core.shortfall(self.handle))

    def keep_reserved(self) -> None:
        """The budget limits what the device's allocator reserves, not what it gives out."""
        self.core.keep_reserved(self.handle)

    def elsewhere(self) -> str | None:
        """What to say if the program was on another device all the time."""
        met = [torch.device(name) for name in self.core.devices_met(self.handle)]
        return elsewhere(self.device, {device: device == self.device for device in met})

    def program_tensors(self) -> list[Tensor]:
        """Return the tensors that the program still has of values in memory, the oldest first."""
        return self.core.program_tensors(self.handle)

    def pin(self, tensor: Tensor) -> None:
        """The memory of `tensor` is never evicted."""
        self.core.keep(self.handle, tensor)

    def meet(self, tensor: Tensor) -> None:
        """The memory of `tensor` counts from now on."""
        self.core.meet(self.handle, tensor)

    def meet_owners(self) -> None:
        """Weights were met: the rest of their model counts as well, and their optimizers' state
        from before."""
        met = self.core.met(self.handle)
        model = self.owners.running_model()
        if model is not None:
            for tensor in memory_of(model, self.device):
                self.meet(tensor)
            met += self.core.met(self.handle)
        for state in self.owners.states_of(met, self._warm):
            self.meet(state)

    @property
    def stepping(self) -> bool:
        """Amid an optimizer's step, which nothing may interrupt: workspaces get what room there
        is."""
        return self._stepping

    @stepping.setter
    def stepping(self, on: bool) -> None:
        self._stepping = on
        self.core.stepping(self.handle, on)

    def undo_no_more(self) -> None:
        """Unless the step that may have to be undone is still running."""
        if self.undo is not None and not self.undo.running:
            self.undo = None
            self.core.tell_ranges(self.handle, False)

    def tensors_within(self, value: object) -> list[Tensor]:
        """Return the tensors in nested containers; of one made of others (a DTensor), those."""
        return self.core.tensors_within(value)

    def begin_step(self, optimizer: Any, *, saves: bool) -> tuple[bool, bytes]:
        """Count what the step of `optimizer` will read; what it will write is a source.

        Args:
            optimizer: Its step is about to begin.
            saves: If all its tensors are plain, do what `save_before_step` does as well.

        Returns:
            Whether its parameters are plain tensors with dense gradients; what tells its kind.
        """
        return self.core.begin_optimizer_step(
            self.handle, optimizer.param_groups, _dict_of(optimizer.state), saves
        )

    def save_before_step(self, optimizer: Any) -> None:
        """Recompute and pin what depends on the contents that the step will overwrite (R4)."""
        groups, state = optimizer.param_groups, _dict_of(optimizer.state)
        self.core.save_before_optimizer_step(self.handle, groups, state)

    def forget_sources(self) -> bool:
        """What is kept for nothing but to compute again what is there goes; whether it did."""
        return self.core.forget_sources(self.handle)

    def limit(self, budget: Bytes) -> None:
        """The budget is another one from now on."""
        self.engine.budget = budget

    def make_room(self, needed: Bytes, who: str) -> None:
        self.core.make_room(self.handle, needed, who)

    def give_away(self, home: torch.UntypedStorage) -> None:
        """From now on others may write to `home` (R4)."""
        self.core.give_away(self.handle, home._cdata)

    def bring_back(self, tensor: Tensor) -> None:
        """The memory of `tensor` is there."""
        self.core.bring_back(self.handle, tensor)

    def keep_there(self, tensor: Tensor) -> None:
        """Likewise, and it stays as long as the program has it."""
        self.core.keep_there(self.handle, tensor)

    def lock_there(self, tensors: list[Tensor], *, saved: bool = False) -> int:
        """Keep the memory of `tensors` until `unlock_there` is called with what this returns.

        `saved`: keep what autograd saved as well.
        """
        return self.core.lock_there(self.handle, tensors, saved)

    def unlock_there(self, number: int) -> None:
        """The inverse of `lock_there`."""
        self.core.unlock_there(self.handle, number)

    def record_without_grad(self, record: bool) -> None:
        """One reason less, or one more, that what is made with grad mode off has no recipe; it has
        one only where anything may go."""
        if self.anything:
            self.core.record_without_grad(self.handle, -1 if record else 1)

    def about_to_resize(self, home: torch.UntypedStorage, nbytes: int) -> Callable[[], None] | None:
        """What is in `home` is about to be cut off, or to grow. Returns what to call when it has
        been, if it is known."""
        known = self.core.about_to_resize(self.handle, home._cdata, nbytes)
        return partial(self.core.resized, self.handle) if known else None

    @contextmanager
    def trading(self, t1: Tensor, t2: Tensor) -> Iterator[None]:
        """Inside, nothing follows the two."""
        with self.owners.without(t1, t2):
            self.core.step_back(self.handle, t1)
            self.core.step_back(self.handle, t2)
            try:
                yield
            finally:
                self.core.follow_again(self.handle)

    def close(self) -> None:
        """The context is over: from now on what dies is acted on at once."""
        self.peak.note_states()
        if self.watcher is not None:
            self.watcher.close()
            self.watcher = None
        if self.anything or (self.lending is not None and self.core.husks(self.handle)):
            self._write_no_more()
        self.lending = None
        self.core.leave(self.handle)
        if self.copies is not None:
            self.copies.complain()

    def begin_audit(self) -> NativeAudit:
        """From now on compare each recomputed value with what was there the first time."""
        self.core.audit(self.handle)
        self.core.note_places(self.handle, True)
        self.audit = NativeAudit(self.core, self.handle)
        return self.audit

    def noted(self, operators: int) -> None:
        """Note where the program is: so many operators ran by now."""
        for each in (self.places, self.audit):
            if each is not None:
                each.note(operators)

    def write_down(self) -> None:
        """All that happens from now on, and where in the program each operator is."""
        self.whole = NativeCapture(self.core, self.handle, whole=True)
        self.places = Places()
        self.core.note_places(self.handle, True)

    def _write_no_more(self) -> None:
        """The budget is over, and what comes back now may not fit: it is in no record."""
        if self.whole is not None and self.figures is None:
            now = self.engine.now()
            self.figures = now.compute_ns, now.recompute_ns, now.evictions, now.recomputations
        for capture in (self.whole, self.capture):
            if capture is not None:
                capture.end()

    @property
    def written_down(self) -> bool:
        """Whether anybody asked for what happens now."""
        return self.whole is not None or self.capture is not None

    def recorded(self) -> Recorder:
        """Every action, if the whole run is written down."""
        return Recorder() if self.whole is None else self.whole.recorder()

    def also_capture(self) -> NativeCapture:
        """What happens from now on, until `capture_no_more`."""
        self.capture_no_more()
        self.capture = NativeCapture(self.core, self.handle)
        return self.capture

    def capture_no_more(self) -> None:
        """The end of what was begun by `also_capture`."""
        if self.capture is not None:
            self.capture.end()
            self.capture = None

    def snapshot(self) -> Snapshot:
        """Who holds memory now. Walks everything: not for every operator.

        Only how much there is, once a thread that started inside ran a backward pass, or if this is
        such a thread: gradients are known by their parameters, and may be freed meanwhile.
        """
        return in_words(self.core.snapshot(self.handle, list(self.owners.optimizers)))


def _dict_of(state: Any) -> dict[Any, Any]:
    """Return the state of an optimizer, which may be any mapping, as a dict."""
    return state if isinstance(state, dict) else dict(state.items())
