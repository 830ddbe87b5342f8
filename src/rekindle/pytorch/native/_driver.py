"""The Python object for one run within a budget, which the native core manages.

`Driver` calls the core. It also holds the objects that exist in Python only: owners, places, steps,
recordings.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, final
from warnings import warn

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, format_ns
from rekindle.policies import DEFAULT, Policy, Swap, score_of
from rekindle.pytorch.native._engine import EngineHandle
from rekindle.pytorch.native._higher import UNITS, shown_name
from rekindle.pytorch.native._module import Core, Handle, backward_node
from rekindle.pytorch.native._moved import MovedState
from rekindle.pytorch.native._snapshots import bytes_saved, in_words
from rekindle.pytorch.native._steps import Figures, Steps
from rekindle.pytorch.native._transcript import Recording
from rekindle.pytorch.native._watchers import KnowsThreads, StepUndo, Watcher
from rekindle.pytorch.online import (
    InterruptedPasses,
    Owners,
    Places,
    Site,
    Snapshot,
    WarmOptimizers,
    elsewhere,
    leaves,
    memory_of,
    users_line,
)
from rekindle.pytorch.operators import is_plain
from rekindle.pytorch.swap import Copies, Transfers
from rekindle.schedule import Recorder

MUCH_LOST: Final = 10_000_000_000
"""Least time (ns) lost to recomputation that causes a warning."""


class Kept(NamedTuple):
    """An operator whose results are never evicted, because it cannot be recomputed safely.

    Attributes:
        operator: The name of the operator.
        why: The reason.
        calls: The number of its calls so far.
        nbytes: The bytes of its results so far.
    """

    operator: str
    why: str
    calls: int
    nbytes: Bytes


class Sliced(NamedTuple):
    """An operator that ran in slices, because it had no room as a whole.

    Attributes:
        operator: The name of the operator.
        calls: The number of its calls so far that ran in slices. A recomputation counts too.
        slices: The most slices of one call.
        time: The time of these calls (ns), including the slices of inputs that they computed.
    """

    operator: str
    calls: int
    slices: int
    time: Nanoseconds


class Backoff(NamedTuple):
    """Counts of what happened when the device had less memory than the budget.

    Attributes:
        times: Number of allocations that failed (device OOM) although the budget had room.
        budget: The budget now (bytes), maybe lowered by these failures. Negative: no limit.
        by_sum: Number of these failures after which no contiguous piece could be freed, so the
            policy evicted by total size.
        for_places: Number of times that values were evicted to free a contiguous piece before an
            allocation.
    """

    times: int
    budget: Bytes
    by_sum: int
    for_places: int


#: All drivers (one for each budget), by the id that the native core passes to callbacks.
drivers: weakref.WeakValueDictionary[int, Driver] = weakref.WeakValueDictionary()


@final
class PeakSnapshot:
    """The snapshot of the memory at the peak, which the core takes at each new peak."""

    def __init__(self, driver: Driver) -> None:
        self._driver = weakref.ref(driver)

    @property
    def now(self) -> Snapshot:
        """The snapshot at the highest peak so far, with names and categories."""
        driver = self._driver()
        if driver is None:
            return Snapshot()
        self.note_states()
        return in_words(driver.core.peak_snapshot(driver.handle))

    def note_states(self) -> None:
        """If there is a new peak, record which memory is optimizer state, while that exists.

        An optimizer may be gone by the time the snapshot of the peak is read.
        """
        driver = self._driver()
        if driver is not None and driver.core.has_new_peak(driver.handle):
            driver.core.note_states(driver.handle, list(driver.owners.optimizers))

    def expect(self, nbytes: Bytes) -> None:
        """Take a snapshot now, and one at each new peak of at least `nbytes`."""
        driver = self._driver()
        if driver is not None:
            driver.core.expect_peak(driver.handle, nbytes)
            if driver.places is not None:
                self.look()

    def look(self) -> None:
        """Store the present peak's snapshot in `Driver.looks`, which keeps the first and last."""
        driver = self._driver()
        if driver is not None:
            driver.looks[1:] = [self.now]


@final
class Audit:
    """A comparison of each recomputed value with the original one, bit by bit.

    It costs a pass over the result of every operator.
    """

    def __init__(self, core: Core, handle: Handle) -> None:
        self._core = core
        self._handle = handle
        self._lines: list[str] = []  # the source line of the program, for each operator call

    def note(self, operators: int) -> None:
        """Record the program's current line for each operator that ran since the last call.

        Args:
            operators: The number of operators that ran so far.
        """
        self._lines += [users_line()] * (operators - len(self._lines))

    @property
    def different(self) -> tuple[Site, ...]:
        """The distinct operators whose recomputation gave a different result, in order."""
        found = self._core.recomputed_differently(self._handle)
        return tuple({Site(shown_name(name), self._lines[op]): None for name, op in found})


@final
class Driver:
    """One run of the native core: one `rekindle.budget(...)` with its engine and its memory."""

    def __init__(
        self,
        core: Core,
        budget: Bytes | None,
        device: torch.device,
        assumed: bool = False,
        learns: bool = False,
        evicts_held_last: bool = False,
        anything: bool = False,
        swaps: tuple[Copies, Swap] | None = None,
        policy: Policy = DEFAULT,
    ) -> None:
        self.core = core
        amount = -1 if budget is None else budget
        score, chooser = score_of(policy), None
        # Without a score, the policy is not built into the native core, so the core calls Python.
        if score is None:
            score, chooser = (0, False, False, False), policy.bind()
        self.handle = core.new_driver(
            amount, str(device), assumed, learns, evicts_held_last, score, chooser
        )
        # `PythonCallbacks.gone` undoes this when the budget's last saved-tensor handle is freed.
        leaves.activate()
        #: True for evict="anything": operators without grad get recipes as well.
        self.anything = anything
        #: True if weights, gradients and optimizer state may move to the host.
        self.moves_state = anything and swaps is not None
        if anything:
            core.evict_anything(self.handle)
        #: Knows the threads of the process. None if memory that the program's own variables hold is
        #: never evicted (`evict="saved"`).
        self.held: KnowsThreads | None = None
        #: the learner of plans; None if this run learns no plans
        self.watcher: Watcher | None = None
        self.copies: Copies | None = None
        self.transfers: Transfers | None = None
        if swaps is not None:
            self.copies, swap = swaps
            self.transfers = self.copies.transfers
            core.swap(
                self.handle, self.copies, -1 if swap.host is None else swap.host,
                swap.out_bytes_per_s, swap.in_bytes_per_s, swap.only,
            )  # fmt: skip
        self.engine = EngineHandle(core, self.handle, budget, swaps=swaps is not None)
        self.device = device
        # Guards the Python objects of this run. The native core has a lock of its own.
        self.lock = threading.RLock()
        self.capture: Recording | None = None  #: recording of a part of the run
        self.whole: Recording | None = None  #: recording of the whole run, if requested
        self.figures: Figures | None = None  #: figures of the recording `whole`, once it has ended
        self.places: Places | None = None
        self.audit: Audit | None = None
        #: Functions chosen by `rekindle.recomputable` that are not recomputed, each with the
        #: reason.
        self.functions_kept: dict[str, str] = {}
        #: Modules that started threads whose operators the core does not see. While such a thread
        #: ran, no memory that variables hold was evicted.
        self.unknown_threads: dict[str, None] = {}
        #: First and last snapshot of memory at a peak, taken while source lines are recorded.
        self.looks: list[Snapshot] = []
        self.owners = Owners(partial(core.add_module_tensor, self.handle))
        #: what moves to the host; None if nothing may
        self.moved = None if swaps is None else MovedState(core, self.handle, self.owners)
        self.steps = Steps(self.engine)
        self.undo: StepUndo | None = None  #: restores the weights if the running step fails
        self.interrupted = InterruptedPasses()
        self._warned = False  # `warn_of_losses` has warned already
        self._warm = WarmOptimizers()  # optimizers whose state existed before this run
        self.peak = PeakSnapshot(self)
        #: `operators_run` at the last `OutOfBudget`, and a copy of the error without traceback.
        self.refused: tuple[int, OutOfBudget] | None = None
        drivers[core.driver_id(self.handle)] = self

    @property
    def at_peak(self) -> Snapshot:
        """The snapshot of the memory at the peak."""
        return self.peak.now

    @property
    def operators_run(self) -> int:
        """A number that changes with every operator: the engine's clock."""
        return self.engine.clock

    @property
    def evictions(self) -> int:
        """Number of evictions so far."""
        return self.engine.now().evictions

    @property
    def recomputations(self) -> int:
        """Number of recomputed operators so far."""
        return self.engine.now().recomputations

    @property
    def lost_ns(self) -> Nanoseconds:
        """Time lost to the budget (ns): recomputed operators, and the bookkeeping of evictions."""
        now = self.engine.now()
        return max(now.lost_ns, now.recompute_ns)

    def warn_of_losses(self) -> None:
        """Warn once if recomputation takes more time than the computation itself."""
        now = self.engine.now()
        budget = self.engine.budget
        if budget is None or self._warned or now.lost_ns < max(MUCH_LOST, now.compute_ns):
            return
        self._warned = True
        everything = now.memory + self.core.evicted_bytes(self.handle)
        warn(
            f"recomputation took {format_ns(now.lost_ns)} so far, and the computation itself "
            f"{format_ns(now.compute_ns)}: the budget of {format_bytes(budget)} is so small that "
            f"training is slow. Without evictions {format_bytes(everything)} would be in use now; "
            f"write rekindle.budget({max(everything + budget, 2 * budget) // 2}) or more",
            stacklevel=2,
        )

    @property
    def kept(self) -> list[Kept]:
        """The operators whose results are never evicted, because recomputing them is not safe."""
        return [
            Kept(shown_name(name), why, calls, nbytes)
            for name, why, calls, nbytes in self.core.kept(self.handle)
            # leave out custom autograd functions, which are listed in `functions_kept`
            if not name.startswith(UNITS)
        ]

    @property
    def sliced(self) -> list[Sliced]:
        """The operators that ran in slices, because they had no room as a whole."""
        return [
            Sliced(shown_name(name), calls, slices, time)
            for name, calls, slices, time in self.core.sliced(self.handle)
        ]

    @property
    def sliceable(self) -> frozenset[str]:
        """The names of the operators that run in slices if they have no room as a whole."""
        return frozenset(self.core.sliceable(self.handle))

    @property
    def backoff(self) -> Backoff:
        """Counts of device OOM errors: the device had less memory than the budget."""
        return Backoff(*self.core.backoff(self.handle))

    def elsewhere(self) -> str | None:
        """Return a warning if no tensor of the program was on the budget's device, else None."""
        used = [torch.device(name) for name in self.core.devices_used(self.handle)]
        return elsewhere(self.device, {device: device == self.device for device in used})

    def register_tensors(self, tensors: list[Tensor]) -> None:
        """Count the memory of `tensors` toward the budget from now on.

        Raises:
            OutOfBudget: The tensors do not fit together. None of them is counted.
        """
        self.core.register_tensors(self.handle, tensors)

    def meet_owners(self) -> None:
        """Register all weights of the running model, because an operator read some of them.

        The state that optimizers already have for these weights is registered as well. All of this
        memory counts toward the budget from now on. Weights that were made inside the budget are
        registered already: then only the model's call is recorded.
        """
        new = self.core.new_parameters(self.handle)
        model = self.owners.running_model()
        if self.owners.has_all_calls:
            self.core.models_due(self.handle, False)
        if not new:
            return
        if model is not None:
            self.register_tensors(list(memory_of(model, self.device)))
            new += self.core.new_parameters(self.handle)
        self.register_tensors(list(self.owners.states_of(new, self._warm)))

    def stepping(self, on: bool, *, undone: bool = True) -> None:
        """Record that this thread's step of an optimizer begins or ends.

        Room for its memory was made when it began.

        Args:
            on: True if the step begins.
            undone: The step is undone if it fails.
        """
        self.core.models_due(self.handle, False)  # each model has been called for this step
        # Room is made for one parameter at a time. If that fails half way, exceed the budget.
        self.core.stepping(self.handle, on, self.moves_state and not undone)
        if self.moves_state and not on:
            self.core.step_ended(self.handle)

    def undo_no_more(self) -> None:
        """Drop the undo of the optimizer's step if that step is over."""
        if self.undo is not None and not self.undo.running:
            self.undo = None
            self.core.tell_ranges(self.handle, False)

    def begin_step(self, optimizer: torch.optim.Optimizer, *, saves: bool) -> tuple[bool, bytes]:
        """Prepare the step of `optimizer`: count what it reads, and pin what it writes.

        Tensors that the step writes lose their recipes (how to recompute them), because recomputing
        them would need all earlier steps.

        Args:
            optimizer: The optimizer.
            saves: Also do what `save_before_step` does, if all tensors of the optimizer are plain.

        Returns:
            True if its parameters are plain tensors with dense gradients; and a key that is equal
            for steps with equal gradients.
        """
        return self.core.begin_optimizer_step(
            self.handle, optimizer.param_groups, _dict_of(optimizer.state), saves
        )

    def save_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Recompute and pin evicted values that need contents which the step overwrites.

        This is rule R4, sources.
        """
        groups, state = optimizer.param_groups, _dict_of(optimizer.state)
        self.core.save_before_optimizer_step(self.handle, groups, state)

    def make_room(self, needed: Bytes, who: str) -> None:
        """Evict until `needed` bytes fit, or raise `OutOfBudget` that names the operator `who`."""
        self.core.make_room(self.handle, needed, who)

    def mark_externally_writable(self, home: torch.UntypedStorage) -> None:
        """Protect recipes that read the storage `home`, because other code may write to it.

        The native core notices no such write. See rule R4, sources.
        """
        self.core.mark_externally_writable(self.handle, home._cdata)

    def about_to_write_unseen(self, home: torch.UntypedStorage) -> None:
        """Recompute and pin evicted values that need the contents of the storage `home`.

        Code that is no operator is about to overwrite them. See rule R4, sources.
        """
        self.core.about_to_write_unseen(self.handle, home._cdata)

    def version_raised(self, home: torch.UntypedStorage) -> None:
        """Keep values in memory that need the old contents of the storage `home`.

        The program has raised the version of its tensors, so code that is no operator writes it.
        """
        self.core.version_raised(self.handle, home._cdata)

    @contextmanager
    def unknown_runs(self, name: str, tensors: list[Tensor]) -> Iterator[None]:
        """Inside the block, keep `tensors` and what the higher-order operator `name` makes.

        The report says why.
        """
        why = "Rekindle cannot see which arguments this higher-order operator writes"
        self.functions_kept[name] = why
        reading = self.core.begin_reading(
            self.handle, [each for each in tensors if is_plain(type(each))], False, True
        )
        self.core.never_recompute(self.handle, 1)
        try:
            yield
        finally:
            self.core.never_recompute(self.handle, -1)
            self.core.end_reading(self.handle, reading)

    def record_without_grad(self, record: bool) -> None:
        """Begin or end a scope in which operators with grad mode off get no recipes.

        They get recipes only with evict="anything".

        Args:
            record: False begins such a scope, True ends it.
        """
        if self.anything:
            self.core.record_without_grad(self.handle, -1 if record else 1)

    def about_to_resize(
        self, home: torch.UntypedStorage, nbytes: int, newest: int
    ) -> Callable[[], None] | None:
        """Record that the program is about to resize the storage `home` to `nbytes`.

        Args:
            home: The storage.
            nbytes: Its new size.
            newest: If FSDP frees the storage until a backward pass: the sequence number of the
                newest autograd node of the module's result. Negative if the contents do not come
                back.

        Returns:
            A function to call after the resize, or None if the core does not track the storage.
        """
        known = self.core.about_to_resize(self.handle, home._cdata, nbytes, newest)
        return partial(self.core.resized, self.handle) if known else None

    @contextmanager
    def trading(self, t1: Tensor, t2: Tensor) -> Iterator[None]:
        """Inside the block, hold no references to the tensors, so that PyTorch can swap them."""
        with self.owners.without(t1, t2):
            self.core.suspend_origin_tracking(self.handle, t1)
            self.core.suspend_origin_tracking(self.handle, t2)
            try:
                yield
            finally:
                self.core.resume_origin_tracking(self.handle)

    def close(self) -> None:
        """End the budget. From now on, the core processes each freed storage at once."""
        self.peak.note_states()
        if self.moved is not None:
            self.moved.end()
        if self.watcher is not None:
            self.watcher.close()
            self.watcher = None
        if self.anything or (self.held is not None and self.core.placeholders(self.handle)):
            self._write_no_more()
        self.held = None
        try:
            self.core.deactivate(self.handle)
        except BaseException as error:
            if evicted := self.core.placeholders(self.handle):
                error.add_note(
                    f"{evicted} tensors that variables hold are still evicted, because their "
                    "operators failed. Once the cause is gone, run.keep(tensor) restores each"
                )
            raise
        if self.copies is not None:
            self.copies.complain()

    def begin_audit(self) -> Audit:
        """From now on, compare each recomputed value with the original one."""
        self.core.audit(self.handle)
        self.core.notes_places(self.handle, True)
        self.audit = Audit(self.core, self.handle)
        return self.audit

    def noted(self, operators: int) -> None:
        """Record the program's current source line for each operator that ran since the last call.

        Args:
            operators: The number of operators that ran so far.
        """
        for each in (self.places, self.audit):
            if each is not None:
                each.note(operators)

    def begin_recording(self) -> None:
        """Record the whole run from now on: all events, and the source line of each operator."""
        self.whole = Recording(self.core, self.handle, whole=True)
        self.places = Places(partial(backward_node, self.core))
        self.core.notes_places(self.handle, True)

    def _write_no_more(self) -> None:
        """End the recordings, because values recomputed after the budget's end may exceed it."""
        if self.whole is not None and self.figures is None:
            now = self.engine.now()
            self.figures = now.compute_ns, now.recompute_ns, now.evictions, now.recomputations
        for capture in (self.whole, self.capture):
            if capture is not None:
                capture.end()

    @property
    def is_recorded(self) -> bool:
        """True while a trace is recorded."""
        return self.whole is not None or self.capture is not None

    def recorded(self) -> Recorder:
        """Return every action of the run so far. Empty unless the whole run is recorded."""
        return Recorder() if self.whole is None else self.whole.recorder()

    def also_capture(self) -> Recording:
        """Start a recording of a part of the run, which `capture_no_more` ends."""
        self.capture_no_more()
        self.capture = Recording(self.core, self.handle)
        return self.capture

    def capture_no_more(self) -> None:
        """End the recording that `also_capture` started."""
        if self.capture is not None:
            self.capture.end()
            self.capture = None

    def bytes_saved(self) -> Bytes:
        """Return the bytes that autograd has saved now and that can be evicted."""
        return bytes_saved(self.core.snapshot(self.handle, []))

    def snapshot(self) -> Snapshot:
        """Return a snapshot of what holds memory now.

        It visits all storages, so do not call it per operator. Gradients are found through their
        parameters, and may be freed while another thread runs a backward pass. If a thread that
        started inside the budget has run a backward pass, or is the caller, the snapshot contains
        only the amount of memory.
        """
        return in_words(self.core.snapshot(self.handle, list(self.owners.optimizers)))


def _dict_of(state: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
    """Return the state of an optimizer, which may be any mapping, as a dict."""
    return state if isinstance(state, dict) else dict(state.items())
