"""A driver whose engine may also swap: values go to the host, instead of being computed again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import final

import torch

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.engine import Call, Engine, Storage
from rekindle.policies import Policy, Swap
from rekindle.pytorch.online import Driver, Result
from rekindle.pytorch.swap._pinned_store import PinnedStore
from rekindle.pytorch.swap._store import Bandwidth, Store
from rekindle.pytorch.swap._swapper import Swapper
from rekindle.pytorch.tensors import FOREIGN, site
from rekindle.schedule import Action, Compute, Discard, Free, SwapIn, SwapOut


@final
class SwappingDriver(Driver):
    """Values without a recipe, too, may go once the program has dropped them."""

    def __init__(
        self,
        budget: Bytes | None,
        policy: Policy,
        device: torch.device,
        swap: Swap,
        store: Store,
        believed: Bandwidth | None = None,
    ) -> None:
        """`believed`: the bandwidth in `swap` was measured, and is corrected if it falls."""
        super().__init__(Engine(budget, policy, swap=swap), device)
        if isinstance(store, PinnedStore):
            self.streams = store.streams
        self.swapper = Swapper(self.engine, self.table, store, believed)
        self.transfers = self.swapper.transfers

    # -- memory ---------------------------------------------------------------------------------

    def admit(self, call: Call) -> None:
        super().admit(call)
        for storage in call.made:
            if not storage.replayable:
                self._held[storage] = None

    def make_room(self, needed: Bytes, who: str) -> None:
        super().make_room(needed, who)
        while not self.swapper.has_room(needed):  # a write failed, and something had to stay
            super().make_room(needed, who)
        self.perform(self.engine.ahead())

    def clear(self, wanted: Bytes) -> None:
        super().clear(wanted)
        self.swapper.wait_for(wanted)

    def rescue(self, again: Callable[[], Result], out: RuntimeError, needed: Bytes) -> Result:
        def when_written() -> Result:
            self.swapper.wait_for_all()
            return again()

        return super().rescue(when_written, out, needed)

    def use(self, storage: Storage) -> None:
        super().use(storage)
        self.swapper.settle(storage)

    def poll(self) -> None:
        super().poll()
        for storage in list(self._held):  # what recipes alone still need
            ours = not storage.replayable and storage.payload.owned is not None
            wanted = storage.consumers and not storage.references
            if ours and wanted and not self.table.is_held(storage):
                self._drop(storage)

    def _drop(self, storage: Storage) -> None:
        """But for what others may write: plain PyTorch computes with what is there then."""
        if not storage.payload.flags & FOREIGN:
            super()._drop(storage)

    def settle(self) -> None:
        super().settle()
        if self.engine.discarded:
            self.perform(self.engine.discards())

    def _is_read(self, storage: Storage) -> bool:
        return self.swapper.is_leaving(storage) or super()._is_read(storage)

    # -- actions --------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action], who: str = "") -> None:
        if not actions:
            return
        try:  # memory for what comes back is made here
            with (
                self.work.going_on(),
                self.swapper.event(),
                closing(self._others(actions)) as others,
            ):
                super().perform(others, who)
        except OutOfBudget as out:
            self.swapper.transfers.add_note_to(out)
            raise

    def _others(self, actions: Iterable[Action]) -> Generator[Action]:
        """Performs what concerns the host; the rest is handed on."""
        for action in actions:
            subject = self.engine.subject
            if isinstance(action, Compute):
                assert isinstance(subject, Call)
                if action.in_place:
                    for _, source in subject.overwrites:
                        self.swapper.settle(source.storage)
                self.swapper.wait_for(subject.nbytes + subject.workspace)
                yield action
                for storage in subject.made:
                    self.swapper.returned(storage)
                continue
            assert isinstance(subject, Storage)
            match action:
                case Free():
                    yield action
                case SwapOut():
                    yield from self._swap_out(subject, action)
                case SwapIn():
                    self._swap_in(subject)
                case Discard():
                    self.swapper.discard(subject)
                    self._did(action)

    def _let_go(self, storage: Storage) -> None:
        super()._let_go(storage)
        self.swapper.gone(storage)

    def _swap_out(self, storage: Storage, action: SwapOut) -> Generator[Action]:
        if self.swapper.begin(storage):
            if not action.keep:
                self.evictions += not storage.dead
                self.vacate(storage)
                self.swapper.gone(storage)
            self._did(action)
        elif not self.engine.swap_out_failed(storage):
            yield Free(storage.id)

    def _swap_in(self, storage: Storage) -> None:
        home = self.swapper.fetch(storage)
        if home is None and (storage.resident or not storage.on_host):
            return  # it never left, or the engine knows already that it has to be computed
        if home is None:
            self.engine.swap_in_failed(storage)
            if storage.replayable:
                return
            raise self.swapper.transfers.lost(site(storage))
        self.swapper.hang(storage, home)
        self._did(SwapIn(storage.id))

    def _did(self, action: Action) -> None:
        if self.recorder is not None:
            self.recorder.acted(action, self.engine.clock, self.engine.memory)
