"""Which memory there is: what the program makes or shows becomes storages of the engine."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle.engine import Call, Engine, Storage
from rekindle.pytorch.devices import accelerator, is_accelerator, rounded
from rekindle.pytorch.online._audit import Audit
from rekindle.pytorch.online._beneath import Work
from rekindle.pytorch.online._capture import Capture, Captures
from rekindle.pytorch.online._device import elsewhere, same_device
from rekindle.pytorch.online._explain import Snapshot, snapshot
from rekindle.pytorch.online._on_host import TransfersOnHost
from rekindle.pytorch.online._owners import Owners, is_weight, memory_of
from rekindle.pytorch.online._peak import Peak
from rekindle.pytorch.online._places import Places
from rekindle.pytorch.online._shortfall import Shortfall
from rekindle.pytorch.online._steps import Figures, Steps
from rekindle.pytorch.online._streams import Streams
from rekindle.pytorch.online._warm import WarmOptimizers
from rekindle.pytorch.online._watcher import Watcher
from rekindle.pytorch.online._workspaces import OnDevice, Workspaces
from rekindle.pytorch.operators import STRIDED, Place, Signature, is_plain, tensors_in
from rekindle.pytorch.tensors import FOREIGN, Memory, Table, Watch, is_foreign
from rekindle.schedule import Compute, Recorder

Result = TypeVar("Result")


class Resort(Protocol):
    """Who lets go of what variables of the program hold when nothing else is left."""

    def around(self, run: Callable[..., Result], *args: Any) -> Result:
        """Runs an operator of the program."""
        ...

    def or_lending(self, step: Callable[[], Result]) -> Result:
        """What `step` gives, if it must be once more, with what variables hold."""
        ...

    def bring_back(self, tensor: Tensor) -> None:
        """The memory of `tensor` is there."""
        ...


class Storages(ABC):
    """One engine and the memory that it knows of; a `Driver` acts on it."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.table = Table()
        self.device = device
        self.lock = threading.RLock()
        self.work = Work()
        #: When the last `OutOfBudget` was, and a copy of it, which has no frames.
        self.refused: tuple[int, OutOfBudget] | None = None
        self.evictions = 0  #: of what somebody may still ask for
        self.recomputations = 0
        self.shortfall = Shortfall(engine)  #: of the device, beneath the budget
        self.recorder: Recorder | None = None
        self._record: Recorder | None = None  # the same, also when it is over
        self.figures: Figures | None = None  #: those of the record, if it is over
        self.capture: Capture | Captures | None = None
        self.whole: Capture | None = None  #: of the whole run, if it is asked for
        self.audit: Audit | None = None
        self.watcher: Watcher | None = None
        self.transfers: TransfersOnHost | None = None  #: if values go to the host
        self.resort: Resort | None = None  #: if what variables hold may go as well
        self.owners = Owners()
        self.warm = WarmOptimizers()  #: those with a state from before, by their parameters
        self.places: Places | None = None
        self.streams = Streams(device) if is_accelerator(device) else None
        #: What operators take inside themselves; None: nobody can tell.
        self.workspaces = Workspaces(OnDevice(device)) if is_accelerator(device) else None
        self._places = (device, False), (device, True)
        self.peak = Peak(self.engine, self.table, self.owners)
        self.steps = Steps(self.engine)
        self.assumed = False  #: the device is the one that was in use, nobody said so
        self.looks: list[Snapshot] = []  #: while places are noted: the first, and the last
        self._counts: dict[torch.device, bool] = {}  # whether the budget is for it
        self._held: dict[Storage, None] = {}  # replayable, and maybe kept by the program (R1)
        #: Amid an optimizer's step, which nothing may interrupt: workspaces get what room there is.
        self.stepping = False
        self.operators_run = 0  #: those that the engine knows of
        self.storages_made = 0  #: in the whole run
        #: On CUDA: what the allocator gave out before, to no operator, or to round blocks.
        self._outside: Storage | None = None

    def begin_audit(self) -> Audit:
        """From now on compare each recomputed value with what was there the first time."""
        self.audit = Audit()
        return self.audit

    @property
    def at_work(self) -> bool:
        """Whether operators of ours run in this thread, which dispatch modes see."""
        return self.work.mine

    def open(self) -> None:
        """The context begins: what the device's allocator has given out already counts."""
        if is_accelerator(self.device):
            call = self.new_call("source", 0, False)
            self._outside = self.new_storage(call, accelerator.allocated(self.device))
            self.admit(call)

    def write_down(self) -> None:
        """All that happens from now on, and where in the program each operator is."""
        self.recorder = self._record = Recorder()
        self.whole = self.capture = Capture()
        self.places = Places()

    @property
    def lost_ns(self) -> Nanoseconds:
        """Time lost, as far as it is known: recomputed operators at their measured costs."""
        return self.engine.recompute_ns

    @property
    def written_down(self) -> bool:
        """Whether anybody asked for what happens now."""
        return self.capture is not None or self.recorder is not None

    def recorded(self) -> Recorder:
        """Every action, if the whole run is written down."""
        return self._record or Recorder()

    def write_no_more(self) -> None:
        """The budget is over, and what comes back now may not fit: it is in no record."""
        if self.recorder is not None:
            engine = self.engine
            times = engine.compute_ns, engine.recompute_ns
            self.figures = *times, self.evictions, self.recomputations
        self.recorder = self.capture = None

    def also_capture(self) -> Capture:
        """What happens from now on, until `capture_no_more`."""
        watches = self.table.watches.values()
        counted = [(id(watch), watch.nbytes) for watch in watches if watch.storage is None]
        part = Capture(self.engine.storages, counted, self.storages_made)
        whole = self._written
        self.capture = part if whole is None else Captures(whole, part)
        return part

    def capture_no_more(self) -> None:
        """The end of what was begun by `also_capture`."""
        self.capture = self._written

    @property
    def _written(self) -> Capture | None:
        """Of the whole run, unless that is over."""
        return None if self.recorder is None else self.whole

    # -- storages -------------------------------------------------------------------------------

    def new_call(
        self, name: str, cost: Nanoseconds, replayable: bool, workspace: Bytes = 0
    ) -> Call:
        """A call that nobody knows of yet; it must be admitted before the next is made."""
        self.operators_run += 1
        if self.places is not None:
            self.places.note(self.operators_run)
        call = Call(OpId(self.operators_run - 1), name, cost, (), replayable)
        call.workspace = workspace
        return call

    def new_storage(self, call: Call, nbytes: Bytes) -> Storage:
        """What `call` makes, or what it writes where something else was."""
        storage = call.makes(StorageId(self.storages_made), nbytes).storage
        self.storages_made += 1
        storage.payload = Memory()
        return storage

    def admit(self, call: Call) -> None:
        """`call` ran; the engine hears of it."""
        if self.capture is not None:
            self.capture.called(call)
        if self.audit is not None:
            self.audit.made(call)
        if self.recorder is not None:
            first = Compute(call.id, in_place=bool(call.overwrites))
            self.recorder.acted(first, self.engine.clock, self.engine.memory)
        for storage in self.engine.admit(call, held=True):
            self._let_go(storage)
        for storage in call.made:
            if storage.replayable:
                self._held[storage] = None
        if self.watcher is not None:
            self.watcher.made(call)
        if self.engine.memory > self.peak.above:
            self.look()
        if self.engine.clock >= self.steps.due:
            self.steps.sample()

    def snapshot(self) -> Snapshot:
        """Who holds memory now. Walks everything: not for every operator."""
        return snapshot(self.engine, self.table, self.owners)

    def program_tensors(self) -> list[Tensor]:
        """Return the tensors that the program still has of values in memory, the oldest first."""
        found = (each.payload.program_tensor() for each in self.engine.storages if each.resident)
        return [tensor for tensor in found if tensor is not None]

    def look(self) -> None:
        """Who holds the memory, now that there is more of it than ever."""
        now = self.peak.look()
        if self.places is not None:
            self.looks[1:] = [now]

    def account(self, name: str, cost: Nanoseconds, workspace: Bytes) -> None:
        """An operator ran that made nothing."""
        if self.written_down:
            self.admit(self.new_call(name, cost, False, workspace))
        else:
            self.operators_run += 1
            self.engine.account(cost, 0, workspace)

    def count(self, signature: Signature, result: Any) -> None:
        """An operator ran whose results nobody can recompute: their bytes are counted."""
        table, nbytes = self.table, 0
        for tensor in (result,) if type(result) is Tensor else tensors_in(result):
            if is_plain(type(tensor)) and tensor.layout is STRIDED:
                home = tensor.untyped_storage()
                address = home._cdata
                if table.watch_at(address) is None:
                    size = self.counted(home)
                    table.count(home, address, size, signature.operator.name)
                    nbytes += size
        self.engine.account(signature.cost, nbytes, signature.workspace)
        if self.engine.memory > self.peak.above:
            self.look()
        if self.engine.clock >= self.steps.due:
            self.steps.sample()

    def known(self, tensor: Tensor) -> Storage:
        """The engine's storage of `tensor`; one never seen, or only counted, becomes a source."""
        home = tensor.untyped_storage()
        watch = self.table.watch_at(home._cdata)
        if watch is None:
            return self._adopt(tensor, home)
        return watch.storage or self._list(watch, tensor)

    def known_at(self, watch: Watch) -> Storage:
        """The engine's storage of what lives there."""
        return watch.storage or self._list(watch)

    def meet(self, tensor: Tensor) -> None:
        """A view of `tensor` is made, which costs nothing; but its memory counts from now on."""
        if is_plain(type(tensor)) and tensor.layout is STRIDED:
            home = tensor.untyped_storage()
            if self.table.watch_at(home._cdata) is None:
                with self.lock:
                    self.settle()
                    self._adopt(tensor, home)

    def _list(self, watch: Watch, tensor: Tensor | None = None) -> Storage:
        """What was only counted becomes a source; `tensor` is there, if any is known."""
        if self.capture is not None:
            self.capture.uncounted(id(watch))
        self.engine.account(0, -watch.nbytes)
        call = self.new_call(watch.maker, 0, False)
        storage = self.new_storage(call, watch.nbytes)
        memory: Memory = storage.payload
        memory.watch = watch
        home = watch()
        memory.size = watch.nbytes if home is None else home.nbytes()
        watch.storage = storage
        if home is not None and is_foreign(home):
            memory.flags |= FOREIGN
        if tensor is not None:
            storage.payload.describe(tensor)
        self.admit(call)
        return storage

    def _adopt(self, tensor: Tensor, home: torch.UntypedStorage) -> Storage:
        storage = self._take_in(tensor, home)
        if is_weight(tensor):
            self._meet_owners(home)
        return storage

    def _take_in(self, tensor: Tensor, home: torch.UntypedStorage) -> Storage:
        counted = self.counted(home)
        if self._outside is not None:  # it was part of that until now
            self.engine.resize(self._outside, max(0, self._outside.nbytes - counted))
        if self.engine.memory + counted > self.engine.budget:
            self.make_room(counted, "a parameter" if is_weight(tensor) else "a tensor of yours")
        call = self.new_call("source", 0, False)
        storage = self.new_storage(call, counted)
        storage.payload.describe(tensor)
        if is_foreign(home):
            storage.payload.flags |= FOREIGN
        self.table.settle(storage, home, home._cdata)
        self.admit(call)
        return storage

    def _meet_owners(self, home: torch.UntypedStorage) -> None:
        """A weight was met: the rest of its model counts as well, and its optimizer's state."""
        met = [home._cdata]
        model = self.owners.running_model()
        if model is not None:
            for tensor in memory_of(model, self.device):
                home = tensor.untyped_storage()
                if self.table.watch_at(home._cdata) is None:
                    self._take_in(tensor, home)
                    met.append(home._cdata)
        for state in self.owners.states_of(met, self.warm):
            self.meet(state)

    def counted(self, home: torch.UntypedStorage) -> Bytes:
        """Bytes of `home`, as its allocator gives them, if it is on the device of the budget."""
        device = home.device
        if device not in self._counts:  # once: the name of its type is made anew each time
            self._counts[device] = device == self.device
            if self.assumed:
                same_device(self.device, device)
        return rounded(home.nbytes(), device) if self._counts[device] else 0

    def place_of(self, tensors: list[Tensor]) -> Place:
        """Whether an operator on them runs on the device, or where nothing is counted."""
        return self._places[any(tensor.device == self.device for tensor in tensors)]

    def elsewhere(self) -> str | None:
        """What to say if the program was on another device all the time."""
        return elsewhere(self.device, self._counts)

    def resized(self, storage: Storage) -> None:
        """The program may have changed the size of what it holds."""
        memory: Memory = storage.payload
        memory.alias = None  # it may reach beyond the end now
        home = memory.home()
        memory.size = home.nbytes()
        self.engine.resize(storage, self.counted(home))

    # -- what a driver does ---------------------------------------------------------------------

    @abstractmethod
    def settle(self) -> None:
        """Acts on what happened meanwhile: handles that died, memory that is gone."""

    @abstractmethod
    def make_room(self, needed: Bytes, who: str) -> None:
        """Evicts until `needed` bytes fit, or raises `OutOfBudget`: `who` needs them."""

    @abstractmethod
    def forget(self, source: Storage) -> None:
        """`source` is about to be written: what only it can bring back is saved first (R4)."""

    @abstractmethod
    def _let_go(self, storage: Storage) -> None:
        """The memory of `storage` is gone."""
