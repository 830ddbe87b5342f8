"""The types of the functions of the C++ module `_torch`, as a `Protocol`.

Each function has the name of the C++ function that implements it (`native/python`), which documents
it in full. Memory is in bytes and time in nanoseconds. Functions that only tests call are declared
in `native/python/for_tests.cpp`, and are not listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NewType, Protocol

from torch import Tensor
from torch.optim import Optimizer

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.operators import BackwardNode

Handle = NewType("Handle", object)
"""The capsule of a session (`Session` in native/memory/session.h). Only the core reads it."""

Storage = int
"""The address of a `c10::StorageImpl`, as `UntypedStorage._cdata` returns it."""

HolderNumbers = tuple[Bytes, int, int, str, int, int, int]
"""One storage in a snapshot: bytes, allocation, flags, site, parameter, storage, maker."""
OwnedNumbers = tuple[int, int, int]
"""The role of an allocation in the model: allocation, kind, parameter."""
SnapshotNumbers = tuple[
    Bytes,
    Nanoseconds,
    Bytes,
    Bytes,
    tuple[str, int, str, int],
    list[HolderNumbers],
    list[OwnedNumbers],
]
"""A snapshot: memory, clock, resident, cached, line, holders, owned."""
TranscriptFields = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, list[str]]
"""The fields of `_transcript.Transcript`, in order."""
RouteNumbers = tuple[list[int], list[int], list[int], list[int], list[int], list[int]]
"""The lists of a `Route`: stops, moves, restores, restored, kept, copies."""


class Core(Protocol):
    """The functions of the native core that Rekindle calls.

    A `driver` argument is the handle of the native object that enforces one budget.
    """

    guided: int  # 1 if the core was compiled with profile-guided optimization, else 0

    # -- the process ------------------------------------------------------------------------------

    def start(
        self,
        callbacks: object,
        tensor: type[Tensor],
        parameter: type[Tensor],
        traits: Sequence[tuple[Any, ...]],
        effects: Sequence[str],
        own: Sequence[str],
        products: Sequence[str],
        may_use_workspace: Sequence[str],
        in_place: Sequence[tuple[Any, ...]],
        /,
    ) -> None:
        """Install the core in PyTorch, once per process."""
        ...

    def shares_key(self) -> bool:
        """Return True if PyTorch has kernels of its own at the core's dispatch key."""
        ...

    def is_fake_call(self, *arguments: object) -> bool:
        """Return True if a call with these arguments concerns those kernels of PyTorch.

        The thread is in a FakeTensor mode in C++, or an argument is a fake tensor.
        """
        ...

    def rejoin(self) -> None:
        """Include the core's dispatch key again in this thread, if other code has cleared it."""
        ...

    def learn_traits(self, operator: str, flags: int, /) -> None:
        """Register the traits (flags) of an operator that was defined after `start`."""
        ...

    def set_clock_speed(self, factor: float, seed: int, /) -> None:
        """Multiply all measured durations by `factor`, for tests (`rekindle._clock`).

        They are also multiplied by random factors, unless `seed` is negative.
        """
        ...

    def put_method(self, owner: type, name: str, function: object, /) -> None:
        """Set a method of a type, which may be a C type that refuses assignment from Python."""
        ...

    def count_allocations(self) -> bool:
        """Start to count allocations of PyTorch's CPU allocator. Return True if possible."""
        ...

    def signatures_seen(
        self,
    ) -> list[tuple[str, tuple[tuple[int, ...], ...], Nanoseconds, Bytes]]:
        """Return operator, sizes, cost and workspace of each measured signature."""
        ...

    def remember_workspaces(self, numbers: Sequence[int], workspaces: Sequence[Bytes], /) -> None:
        """Replace the workspaces that earlier processes measured, by number of the signature."""
        ...

    def take_new_workspaces(self) -> list[tuple[int, Bytes]]:
        """Return workspaces measured since the last call that no earlier process measured."""
        ...

    def drivers_alive(self) -> int:
        """Return the number of drivers, also of ended budgets whose graphs still exist."""
        ...

    def about_to_fork(self) -> None:
        """Take the core's mutex, because this thread is about to fork."""
        ...

    def forked_here(self) -> None:
        """Release the core's mutex in the parent process."""
        ...

    def forked(self) -> None:
        """Release the core's mutex in the child process, which is in no budget."""
        ...

    # -- one run within a budget ------------------------------------------------------------------

    def new_driver(
        self,
        budget: Bytes,
        device: str,
        assumed: bool,
        learns: bool,
        evicts_held_last: bool,
        score: tuple[int, bool, bool, bool],
        chooser: object | None,
        /,
    ) -> Handle:
        """Make a run. Configure it before `activate`.

        Args:
            budget: The budget in bytes; negative: no limit.
            device: The device whose memory is limited.
            assumed: True if the user did not name the device.
            learns: True if the run follows learned plans.
            evicts_held_last: Evict user-held values as a last resort.
            score: The built-in policy (see `policies._score.score_of`): which costs the score
                contains; if it contains the size; if it contains the staleness; if the staleness is
                under a root.
            chooser: A policy written in Python, used instead of `score`, or None.
        """
        ...

    def driver_id(self, driver: Handle, /) -> int:
        """Return the id of the driver, which callbacks get as the argument `number`."""
        ...

    def evict_anything(self, driver: Handle, /) -> None:
        """Evict values that the program's variables hold like all others (`evict="anything"`)."""
        ...

    def swap(
        self,
        driver: Handle,
        copies: object,
        host: Bytes,
        out_bytes_per_s: int,
        in_bytes_per_s: int,
        only: bool,
        /,
    ) -> None:
        """Swap values to the host. `host`: the most bytes there; negative: no limit."""
        ...

    def uses_arena(self, driver: Handle, on: bool, /) -> None:
        """Let PyTorch's CPU allocations come from Rekindle's own allocator (arena), if `on`."""
        ...

    def slices(self, driver: Handle, on: bool, /) -> None:
        """Let operators that have no room run in slices, if `on`."""
        ...

    def keep_reserved(self, driver: Handle, /) -> None:
        """Let the budget limit the memory that the device's allocator reserves."""
        ...

    def predict_in_place(self, driver: Handle, /) -> None:
        """Make recorded traces tell which results PyTorch would write over a gradient in place.

        Without this, traces tell what happens under Rekindle's own dispatch mode, which prevents
        that.
        """
        ...

    def audit(self, driver: Handle, /) -> None:
        """From now on, compare each recomputed value with the value of the first run."""
        ...

    def recomputed_differently(self, driver: Handle, /) -> list[tuple[str, int]]:
        """Return operator and index of each call whose recomputation gave another result."""
        ...

    def notes_places(self, driver: Handle, on: bool, /) -> None:
        """Call Python back at each operator, to note the source line of the program."""
        ...

    def activate(self, driver: Handle, /) -> None:
        """Make the driver the active one of this process."""
        ...

    def deactivate(self, driver: Handle, /) -> None:
        """End the budget: restore evicted values that the program holds."""
        ...

    def bind_thread(self, driver: Handle | None, /) -> None:
        """Make this thread work within the budget of `driver`, or within none."""
        ...

    def set_budget(self, driver: Handle, nbytes: Bytes, /) -> None:
        """Change the budget; negative: no limit."""
        ...

    def never_recompute(self, driver: Handle, change: int, /) -> None:
        """Enter (1) or leave (-1) `rekindle.never_recompute()`."""
        ...

    def record_without_grad(self, driver: Handle, change: int, /) -> None:
        """Enter (1) or leave (-1) a scope in which operators with grad mode off get no recipes."""
        ...

    def check(self, driver: Handle, /) -> None:
        """Raise AssertionError if an invariant of the native core does not hold."""
        ...

    # -- memory -----------------------------------------------------------------------------------

    def make_room(self, driver: Handle, nbytes: Bytes, who: str, /) -> None:
        """Evict until `nbytes` fit, or raise `OutOfBudget`, which names the operator `who`."""
        ...

    def has_room(self, driver: Handle, nbytes: Bytes, /) -> bool:
        """Return True if `nbytes` more bytes would fit after all possible evictions."""
        ...

    def register_tensors(self, driver: Handle, value: object, /) -> None:
        """Count the memory of the tensors in nested containers against the budget from now on."""
        ...

    def keep(self, driver: Handle, tensor: Tensor, /) -> None:
        """Pin the memory of `tensor`: it is never evicted."""
        ...

    def bring_back(self, driver: Handle, tensor: Tensor, /) -> None:
        """Make the memory of `tensor` resident."""
        ...

    def pin_exposed_address(self, driver: Handle, tensor: Tensor, /) -> None:
        """Make `tensor` resident, and keep it so while the program holds it."""
        ...

    def begin_reading(
        self, driver: Handle, tensors: list[Tensor], saved: bool, writes: bool, /
    ) -> int:
        """Make `tensors` resident until `end_reading`, which takes the returned number.

        Args:
            driver: The driver.
            tensors: The tensors.
            saved: Also keep values resident that autograd unpacks meanwhile.
            writes: The reader may also write the tensors. If not, their copies on the host stay
                valid.
        """
        ...

    def pinned(self, driver: Handle, /) -> list[tuple[Tensor | None, Bytes, str, str]]:
        """Return tensor, bytes, operator and reason of each source that stays in memory."""
        ...

    def end_reading(self, driver: Handle, number: int, /) -> None:
        """Allow eviction again of the tensors of the `begin_reading` that returned `number`."""
        ...

    def mark_externally_writable(self, driver: Handle, storage: Storage, /) -> None:
        """Record that code other than PyTorch may write the storage (R4, sources)."""
        ...

    def about_to_write_unseen(self, driver: Handle, storage: Storage, /) -> None:
        """Prepare for one write to the storage that no operator makes (R4, sources)."""
        ...

    def version_raised(self, driver: Handle, storage: Storage, /) -> None:
        """Record that the program has raised the version of the tensors in the storage."""
        ...

    def about_to_resize(
        self, driver: Handle, storage: Storage, nbytes: Bytes, newest: int, /
    ) -> bool:
        """Prepare for a resize of the storage. Return True if `resized` must follow.

        Args:
            driver: The driver.
            storage: The storage.
            nbytes: Its new size.
            newest: As for `Driver.about_to_resize`.
        """
        ...

    def resized(self, driver: Handle, /) -> None:
        """Finish the resize that `about_to_resize` announced."""
        ...

    def watch_set_data(self, watcher: Callable[[Tensor], object] | None, /) -> None:
        """Call `watcher` with each tensor whose attribute `data` is about to be assigned."""
        ...

    def suspend_origin_tracking(self, driver: Handle, tensor: Tensor, /) -> None:
        """Drop the weak reference to `tensor`, for `torch.utils.swap_tensors`."""
        ...

    def resume_origin_tracking(self, driver: Handle, /) -> None:
        """Make weak references again to the tensors passed to `suspend_origin_tracking`."""
        ...

    def placeholders(self, driver: Handle, /) -> int:
        """Return the number of storages that are evicted although the program holds them."""
        ...

    def unpack(self, handle: object, /) -> Tensor:
        """Return the saved tensor of a handle, for compiled autograd."""
        ...

    # -- modules, optimizers, profilers -----------------------------------------------------------

    def add_module_tensor(self, driver: Handle, tensor: Tensor, is_parameter: bool, /) -> None:
        """Record that a module was given `tensor` as a parameter or as a buffer."""
        ...

    def new_parameters(self, driver: Handle, /) -> list[Storage]:
        """Return the storages of weights that operators first used since the last call."""
        ...

    def program_tensors(self, driver: Handle, /) -> list[Tensor]:
        """Return the tensors that the program holds and whose memory is resident, oldest first."""
        ...

    def tensors_within(self, value: object, /) -> list[Tensor]:
        """Return the tensors in nested containers.

        A tensor that wraps others (a DTensor) is replaced by the wrapped ones.
        """
        ...

    def begin_optimizer_step(
        self,
        driver: Handle,
        groups: list[dict[str, Any]],
        state: dict[Tensor, Any],
        saves: bool,
        /,
    ) -> tuple[bool, bytes]:
        """Prepare an optimizer's step. Return True if all tensors are plain, and the step's key."""
        ...

    def save_before_optimizer_step(
        self, driver: Handle, groups: list[dict[str, Any]], state: dict[Tensor, Any], /
    ) -> None:
        """Recompute and pin evicted values that need contents which the step overwrites.

        This is rule R4, sources.
        """
        ...

    def release_recompute_sources(self, driver: Handle, /) -> bool:
        """Free values that are kept only to recompute other values, all of which are in memory.

        Returns:
            True if any value was freed.
        """
        ...

    def stepping(self, driver: Handle, on: bool, must_finish: bool, /) -> None:
        """Record that this thread's step of an optimizer begins or ends.

        Args:
            driver: The driver.
            on: True if the step begins.
            must_finish: Operators of the step exceed the budget rather than fail.
        """
        ...

    def models_due(self, driver: Handle, on: bool, /) -> None:
        """Set whether the core notifies of owners whenever autograd saves a tensor."""
        ...

    def tell_ranges(self, driver: Handle, on: bool, /) -> None:
        """Call Python back for each profiler range, because ranges delimit an optimizer's step."""
        ...

    def profiler_starts(self) -> None:
        """Record that a profiler starts in this thread."""
        ...

    def profiler_stops(self) -> None:
        """Record that the profiler of this thread stops."""
        ...

    def profilers_are_over(self) -> None:
        """Undo `profiler_starts` for all profilers that still run."""
        ...

    # -- figures ----------------------------------------------------------------------------------

    def numbers(self, driver: Handle, /) -> tuple[int, ...]:
        """Return the fields of `online.Numbers`, in order."""
        ...

    def repeated_calls(self, driver: Handle, /) -> int:
        """Return how often an operator call was repeated after the budget refused memory to it."""
        ...

    def set_peak(self, driver: Handle, nbytes: Bytes, /) -> None:
        """Set the reported peak of memory, for example to reset it."""
        ...

    def evicted_bytes(self, driver: Handle, /) -> Bytes:
        """Return the bytes of evicted values to which the program or autograd still refers."""
        ...

    def swapped(self, driver: Handle, /) -> tuple[Bytes, Bytes, Bytes]:
        """Return the bytes swapped out and in so far, and the most bytes on the host."""
        ...

    def moved(self, driver: Handle, /) -> tuple[int, ...]:
        """Return copies out, their bytes, copies in and their bytes, for each kind of value."""
        ...

    def release(self, driver: Handle, /) -> Bytes:
        """Move everything out of memory that may be evicted. Return the bytes that stay."""
        ...

    def resume(self, driver: Handle, /) -> None:
        """Move the state that the program holds back into memory, as long as it fits."""
        ...

    def step_ended(self, driver: Handle, /) -> None:
        """Record that a training step has ended; the next one may use state in the same order."""
        ...

    def devices_used(self, driver: Handle, /) -> list[str]:
        """Return the devices whose memory the program has used."""
        ...

    def backoff(self, driver: Handle, /) -> tuple[int, Bytes, int, int]:
        """Return the fields of `Backoff`, in order."""
        ...

    def kept(self, driver: Handle, /) -> list[tuple[str, str, int, Bytes]]:
        """Return name, reason, calls, bytes of each operator whose results are never evicted."""
        ...

    def sliced(self, driver: Handle, /) -> list[tuple[str, int, int, Nanoseconds]]:
        """Return name, calls, most slices, time (ns) of each operator that ran in slices."""
        ...

    def sliceable(self, driver: Handle, /) -> list[str]:
        """Return names of operators that have run, and that run in slices if they have no room."""
        ...

    def reopen_trials(self) -> None:
        """Let operators be tried again whose results are kept because of a trial."""
        ...

    def interrupts_kept(self, hook: Callable[[Any], object], /) -> Callable[[Any], object]:
        """Return `sys.unraisablehook` around `hook` that raises Ctrl-C in the main thread."""
        ...

    def last_unit(self) -> tuple[bool, str]:
        """Return if the last custom forward pass that ran as one operator may be recomputed.

        The second result is the reason if it may not.
        """
        ...

    def take_samples(self, driver: Handle, /) -> bytes:
        """Return the samples since the last call, as `EngineHandle.take_samples` describes them."""
        ...

    def space_samples(self, driver: Handle, due: Nanoseconds, every: Nanoseconds, /) -> None:
        """Take the next sample of memory at the clock `due`, and then one every `every` ns."""
        ...

    def snapshot(self, driver: Handle, optimizers: list[Optimizer], /) -> SnapshotNumbers:
        """Return what holds memory now."""
        ...

    def peak_snapshot(self, driver: Handle, /) -> SnapshotNumbers:
        """Return what held memory at the peak."""
        ...

    def has_new_peak(self, driver: Handle, /) -> bool:
        """Return True if the snapshot of the peak of memory lacks the state of optimizers."""
        ...

    def note_states(self, driver: Handle, optimizers: list[Optimizer], /) -> None:
        """Record in the snapshot of the peak which memory is state of `optimizers`."""
        ...

    def expect_peak(self, driver: Handle, nbytes: Bytes, /) -> None:
        """Take a snapshot now, and one at each new peak of at least `nbytes`."""
        ...

    def backward_node(self) -> tuple[str, int, bool, Tensor | None] | None:
        """Return the fields of the `BackwardNode` that runs on this thread, or None."""
        ...

    # -- recordings and learned plans -------------------------------------------------------------

    def begin_recording(self, driver: Handle, whole: bool, /) -> int:
        """Start a recording, and return its number."""
        ...

    def recording(self, driver: Handle, number: int, /) -> TranscriptFields:
        """Return a recording so far."""
        ...

    def end_recording(self, driver: Handle, number: int, /) -> TranscriptFields:
        """End a recording, and return it."""
        ...

    def begin_step(self, driver: Handle, record: bool, /) -> None:
        """Allow a training step to begin, and record its operators if `record`."""
        ...

    def end_step(self, driver: Handle, /) -> tuple[int, bool, bool, int, int, str, int, str]:
        """End the step. Return key, complete, taken, length, processor_ns, reason, number, name.

        key: number of the plan. complete: the step followed the plan to its end. taken: it began to
        follow the plan. length: number of recorded operators. processor_ns: processor time of the
        step's thread (-1: unknown). reason, number and name: why the step
        deviated from the plan, and at which operator.
        """
        ...

    def step_has_shape(self, shape: list[int], step: list[int], /) -> bool:
        """Return True if the operators of the finished `step` match the recorded step `shape`."""
        ...

    def op_ids_of_step(self, driver: Handle, /) -> bytes:
        """Return the 64-bit numbers of the operators of the last step."""
        ...

    def recording_of_step(self, driver: Handle, /) -> TranscriptFields | None:
        """Return the recording of the last step, or None."""
        ...

    def remembered(self, driver: Handle, /) -> int:
        """Return the number of operators recorded so far in the running training step."""
        ...

    def add_plan(
        self,
        driver: Handle,
        key: int,
        op_ids: list[int],
        starts: list[int],
        numbers: list[int],
        route: RouteNumbers,
        /,
    ) -> bool:
        """Add a learned plan. Return False if its numbers are inconsistent."""
        ...

    def retain_plans(self, driver: Handle, keys: list[int], /) -> None:
        """Keep only the plans with these keys, which are sorted by last use, the latest first."""
        ...


def backward_node(core: Core) -> BackwardNode | None:
    """Return the autograd node that runs on this thread, or None outside of a backward pass."""
    fields = core.backward_node()
    return None if fields is None else BackwardNode(*fields)
