"""Dynamic Tensor Rematerialization (DTR): decide online what to evict and what to recompute.

Source: Kirisame et al., ICLR 2021 (arXiv 2006.09616), section 3 and appendix C.

The driver (the simulator, or a test) reports each event of the program by calling a method of
`Engine`. The method yields actions, and the driver performs each action before it asks for the
next. The engine has no torch, no clock and no I/O: its own clock is the sum of the costs of all
calls that ran.

A program computes a value by a **call** of an operator. The value lies in a **storage**, the unit
of eviction. An evicted storage is recomputed by running its call again, after the call's inputs
have been recomputed in the same way.

For example, a program computes a = f(x), b = g(a), c = h(b), and the budget holds x and two more
storages. Before h runs, the policy has to choose a victim, say a, and the engine yields `Free(a)`.
When the backward pass reads a, the engine evicts another victim and yields `Compute(f)` again. The
input x has no recipe. It is a **source**, and is never evicted.

Differences from the authors' prototype and simulator:

- The budget is a cap. Room is made before an operator runs, not after, and includes the operator's
  workspace (`Call.workspace`).
- Storages that the program's own variables hold (`Storage.held`) are not candidates for eviction.
- An operator that writes in place takes over the storage of its input (`Call.overwrites`). When it
  is recomputed, it writes a private copy. It writes the recomputed input itself only if nothing
  else can ask for that input.
- Inputs are recomputed depth first, as in the paper. If all remaining storages are locked then, the
  engine undoes the attempt, and recomputes in the order in which the program ran the calls. Along a
  chain that is longer than the memory, it keeps checkpoints. The last attempt is depth first again,
  with locks taken as late as possible.
- A storage that the program can no longer reach is evicted at once, unless autograd referred to it
  last, and an evicted value that the program can reach is recomputed from it. It leaves the graph
  when no recomputation needs it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._checkpoints import choose_checkpoints
from rekindle.engine._exchange import Exchange
from rekindle.engine._frame import Cyclic, Frame, NoRoom, Thrashed, Waiting
from rekindle.engine._graph import Call, Storage, Value
from rekindle.engine._host import HostMemory
from rekindle.schedule import Action, Compute, SwapIn

# `Engine.prefetch` leaves this fraction of the budget free for the next operators.
_LEFT_FREE: Final = 1 / 16
# Largest fraction of the budget for sources that `Engine.anticipate` swaps in before their use.
_AHEAD: Final = 1 / 16


class Engine(Exchange):
    """The DTR algorithm: keep the program's `memory` within `budget` bytes.

    This class handles the events of the program, and brings evicted values back into memory (by
    recomputing them or swapping them in). The base class `Exchange` evicts. Only the benchmark of
    the DTR paper derives a class from this one, with the rules of the authors' simulator.
    """

    # -- events ---------------------------------------------------------------------------------

    def call(self, call: Call, *, held: bool = False) -> Iterator[Action]:
        """Run `call` for the first time, after bringing its missing inputs back into memory.

        Args:
            call: The call, with its inputs and outputs filled in.
            held: True if variables of the program hold the outputs from now on.
        """
        for _, source in call.overwrites:
            if not source.storage.replayable:
                yield from self.forget(source.storage)
        yield from self._materialize(call, None, held)

    def hold(self, storage: Storage) -> None:
        """Note that a variable of the program holds `storage` again, without its contents."""
        self._hold(storage)

    def use(self, value: Value) -> Iterable[Action]:
        """Bring `value` into memory, and note that a variable of the program holds it now."""
        if not value.defined:
            return self._bring_back(value)
        self._touch(value.storage)
        self._hold(value.storage)
        return ()

    def _bring_back(self, value: Value) -> Iterator[Action]:
        """Recompute or swap in the missing `value`, and mark its storage as user-held."""
        yield from self.require(value)
        self._hold(value.storage)

    def pin(self, value: Value) -> Iterator[Action]:
        """Bring `value` into memory if it is missing, and never evict its storage afterwards."""
        yield from self.require(value)
        value.storage.pinned = True
        self._classify(value.storage)

    def retain(self, storage: Storage) -> None:
        """Count one more reference to `storage`, such as autograd's, that permits its eviction."""
        storage.references += 1

    def release(self, storage: Storage) -> Iterable[Action]:
        """Undo one `retain` of `storage`, and evict or free it if that was its last reference."""
        storage.references -= 1
        return self._evict_or_remove(storage) if storage.dead else ()

    def drop(self, storage: Storage) -> Iterable[Action]:
        """Record that no variable of the program holds `storage` any more.

        The storage is evicted or freed now if the program has no other reference to it either: only
        a variable had kept its memory.
        """
        storage.held = False
        self._classify(storage)
        return self._evict_or_remove(storage, may_stay=False) if storage.dead else ()

    def gone(self, storage: Storage) -> list[Storage]:
        """Record that the program freed the memory of `storage` and has no reference to it left.

        Returns:
            The storages that left memory: `storage` if it was resident, and the storages that were
            kept only to recompute it.
        """
        storage.held = False
        if not storage.resident or not storage.consumers:
            return self._prune(storage)
        # The memory is free now. Recomputations of other storages may still read this storage, so
        # it stays in the graph, like an evicted one.
        self.memory -= storage.nbytes
        self._vanish(storage)
        self._chooser.evicted(storage)
        return [storage]

    def forget(self, storage: Storage) -> Iterator[Action]:
        """Save all values made from the source `storage`, because the program overwrites it next.

        Evicted storages that the program can reach and whose recomputation reads `storage` are
        recomputed first. Afterwards nothing made from `storage` can be recomputed (R4, sources).
        """
        needy = storage.made_through() if self._evicted_wanted else []
        # Lock the resident storages of `needy`, so that they are not evicted while the others are
        # recomputed.
        saved = [made for made in needy if made.resident]
        for made in saved:
            self._lock(made)
        try:
            for made in needy:
                if not made.dead:
                    for value in made.values:
                        yield from self.require(value)
                    self._lock(made)
                    saved.append(made)
        finally:
            for made in saved:
                self._unlock(made)
        # The saved values are sources (without a recipe) now. A source is useless if recipes read
        # it only to recompute values that the program holds anyway. Remove these recipes, so that
        # the source can be freed.
        useless = [storage]
        while useless:
            self._unrecomputable.clear()
            for call in list(useless.pop().consumers):
                yield from self._free(self._lose_recipe(call))
            useless += [source for source in self._unrecomputable if source.useless]

    def seal(self, storage: Storage) -> Iterator[Action]:
        """Make `storage` unrecomputable, because an unknown write changed its contents.

        The storage must be resident. It stays in memory as a source (a storage without a recipe).
        """
        for call in list(storage.makers):
            yield from self._free(self._lose_recipe(call))

    def spoil(self, storage: Storage) -> Iterator[Action]:
        """Evict `storage`, whose contents are lost because a call failed while overwriting it.

        The program has no reference to `storage`.
        """
        yield from self._evict(storage)

    # -- for drivers ------------------------------------------------------------------------------

    def admit(self, call: Call, *, held: bool) -> list[Storage]:
        """Enter `call` into the graph after its first run. The driver has made room for it before.

        Args:
            call: The call that ran.
            held: True if variables of the program hold the outputs.

        Returns:
            Storages that nothing needs any more. They have left the graph, and the driver frees
            them.
        """
        call.ran = True
        self.clock += call.cost
        self.compute_ns += call.cost
        self._ran()
        for output, source in call.overwrites:
            self.memory -= self._take_over(output, source)
            call.replayable = call.replayable and source.storage.replayable
        self.memory += call.nbytes
        if self.memory + call.workspace > self.peak:
            self.peak = self.memory + call.workspace
        self._link(call)
        for storage in call.made:
            storage.resident = True
        for value in call.outputs_but_last(None):
            storage = value.storage
            value.defined = True
            storage.last_access = self.clock
            if not call.replayable:
                self._used(storage)
            if held:
                storage.held = True
            else:
                storage.references += 1
                self._classify(storage)
        if not call.overwrites:
            return []
        freed: list[Storage] = []
        for _, source in call.overwrites:
            freed += self._prune(source.storage)
        return freed

    def defer(self, call: Call) -> None:
        """Enter `call`, whose outputs have no room, into the graph as if they were evicted.

        The call did not run. Its outputs count as user-held; a use computes them.
        """
        call.ran = True
        self._link(call)
        for value in call.outputs:
            storage = value.storage
            storage.last_access = self.clock
            storage.held = True
            self._evicted_wanted = True
            self._chooser.evicted(storage)

    def account(self, cost: Nanoseconds, nbytes: Bytes = 0, workspace: Bytes = 0) -> None:
        """Count an operator whose results do not enter the graph.

        Args:
            cost: Its duration (ns).
            nbytes: Bytes of results that are counted against the budget, but have no storage in the
                graph. Negative if such bytes were freed.
            workspace: Bytes that the operator needed while it ran.
        """
        self.clock += cost
        self.compute_ns += cost
        if cost:
            self._ran()
        self.unlisted += nbytes
        self.memory += nbytes
        if self.memory + workspace > self.peak:
            self.peak = self.memory + workspace

    def resize(self, storage: Storage, nbytes: Bytes) -> None:
        """Record that the program resized the user-held `storage` to `nbytes`."""
        self.memory += nbytes - storage.nbytes
        self.peak = max(self.peak, self.memory)
        storage.nbytes = nbytes

    def _link(self, call: Call) -> None:
        """Add `call` and its new storages to the engine's graph."""
        for storage in call.made:
            self._storages[storage] = None
            storage.cost = call.cost
            storage.replayable = call.replayable
        # If some outputs of the call are views, they change the cost of an existing storage.
        if len(call.made) < len(call.outputs):
            for storage in call.storages():
                if storage.makers[0] is not call:
                    if not storage.on_host:
                        storage.cost += call.cost
                    storage.replayable = storage.replayable and call.replayable
                    self._chooser.repriced(storage)
        if call.replayable:
            call.consume()
        elif self.host is not None:
            for storage in call.storages():
                self._renew(storage)

    # -- bringing evicted values back into memory -----------------------------------------------

    def require(self, value: Value) -> Iterator[Action]:
        """Bring `value` into memory if it is missing. Its storage does not become user-held."""
        storage = value.storage
        self._touch(storage)
        if self._copies(value):
            yield from self._swap_in(storage)
        if not value.defined:
            yield from self._materialize(value.call, value, False)

    def _copies(self, value: Value) -> bool:
        """Return True if `value` can be swapped in, and recomputing it would not be faster."""
        storage, host = value.storage, self.host
        if host is None or not storage.on_host or storage.resident:
            return False
        if host.only or not storage.replayable:
            return True
        waiting = host.link.waiting_now(storage.nbytes, self.clock)
        return waiting <= self._climb_ns(value, waiting, host)

    def _climb_ns(self, value: Value, limit: Nanoseconds, host: HostMemory) -> Nanoseconds:
        """Return a lower bound of the time (ns) to recompute `value`.

        The time is that of the call that made `value`, and of all calls and transfers that bring
        its missing inputs back: an input with a copy on the host is swapped in, and any other is
        recomputed. The search through the inputs ends once the sum reaches `limit`.
        """
        total = value.call.cost
        calls = {value.call}
        stack = [value.call]
        while stack and total < limit:
            for source in stack.pop().inputs:
                if source.defined or source.call in calls:
                    continue
                calls.add(source.call)
                if source.storage.on_host:
                    total += host.link.in_ns(source.storage.nbytes)
                else:
                    total += source.call.cost
                    stack.append(source.call)
        return total

    def _swap_in(self, storage: Storage) -> Iterator[Action]:
        """Swap `storage` in from the host. If that fails, the driver calls `swap_in_failed`."""
        yield from self.make_room(storage.nbytes, storage.values[0].call)
        self.subject = storage
        yield SwapIn(storage.id)
        host = self.host
        assert host is not None
        if not storage.on_host:
            return
        host.swapped_in += storage.nbytes
        host.link.fetch(storage.nbytes, self.clock)
        self.memory += storage.nbytes
        self.peak = max(self.peak, self.memory)
        self._appear(storage)
        self._chooser.returned(storage)
        self._classify(storage)

    def swap_in_failed(self, storage: Storage) -> None:
        """Drop the host copy of `storage`, because the `SwapIn` just yielded failed in the driver.

        If `storage` cannot be recomputed, the driver raises an error instead and keeps the copy.
        """
        host = self.host
        assert host is not None
        self._chooser.returned(storage)
        host.drop(storage)
        if storage.replayable:
            self._reprice(storage)
            self._chooser.evicted(storage)

    def copy_lost(self, storage: Storage) -> None:
        """Drop the host copy of `storage`, whose transfer failed after the driver reported it done.

        May be called between any two actions. A storage that is not resident has to be recomputed.
        The host is assumed to be full, as in `swap_out_failed`: its limit becomes the bytes of the
        copies that it holds now.
        """
        host = self.host
        if host is None or not storage.on_host:
            return
        for moves in (host.saving, host.coming):
            if moves.pop(storage, None) is not None:
                self._unlock(storage)
        if storage in self.discarded:
            self.discarded.remove(storage)
            host.drop(storage)
        elif storage.resident:
            host.drop(storage)
            self._renew(storage)
        else:
            self.swap_in_failed(storage)
        host.limit = host.nbytes

    def fetch(self, storage: Storage) -> Iterator[Action]:
        """Swap in the evicted `storage` ahead of its use, because a plan says so.

        Nothing happens if `storage` has no copy on the host.
        """
        if storage.on_host and not storage.resident:
            storage.last_access = self.clock
            yield from self._swap_in(storage)

    def anticipate(self) -> Iterator[Action]:
        """Swap in the source that the program uses next, in place of one that is used later.

        Drivers call this method after an operator. The order is known once a step has ended. The
        storage stays resident until the program uses it or nothing else can be evicted.
        """
        host = self.host
        if host is None or not host.order.known or self.planned:
            return
        yield from self._unlock_prefetched(host)
        while (storage := self._expected(host)) is not None:
            distance = host.order.distance(storage)
            assert distance is not None
            while self.memory + storage.nbytes > self.budget:
                victim = self._furthest(distance, host)
                if victim is None:
                    return
                yield from self._send(victim, host)
            yield from self._swap_in(storage)
            if storage.resident:
                self._lock(storage)
                host.coming[storage] = storage.last_access

    def _expected(self, host: HostMemory) -> Storage | None:
        """Return the source that is used next, if it should be swapped in now, else None."""
        storage = host.order.nearest(each for each in host.away() if not each.dead)
        if storage is None or storage.nbytes > self.budget:
            return None
        ahead = sum(each.nbytes for each in host.coming)
        return storage if not ahead or ahead + storage.nbytes <= self.budget * _AHEAD else None

    def prefetch(self, room: Bytes | float = float("inf")) -> Iterator[Action]:
        """Swap in storages ahead of their use while there is room, the most recently used first.

        Drivers call this method after an operator of a backward pass, which reads the values saved
        last first. Nothing is evicted for a prefetch, and some of the budget stays free for the
        next operator. A prefetched storage stays resident until the program uses it or nothing else
        can be evicted.

        Args:
            room: The most bytes to swap in.
        """
        host = self.host
        if host is None:
            return
        yield from self._unlock_prefetched(host)
        while not self.planned and host.link.idle_in(self.clock):
            storage = host.next_back(self.clock, sources=not host.order.known)
            room = min(room, self.budget - self.memory)
            if storage is None or storage.nbytes > room - self.budget * _LEFT_FREE:
                return
            room -= storage.nbytes
            storage.last_access = self.clock
            yield from self._swap_in(storage)
            if storage.resident:
                self._lock(storage)
                host.coming[storage] = storage.last_access

    def _materialize(self, call: Call, wanted: Value | None, held: bool) -> Iterator[Action]:
        """Run `call`, after recomputing or swapping in its missing inputs."""
        self._spares_checkpoints = True
        try:
            yield from self._climb(call, wanted, held, eager_locks=True)
            return
        except NoRoom:
            # The storages that this attempt locked may occupy the memory that is missing.
            if (yield from self._recomputes_in_order(call, wanted, held)):
                return
        finally:
            self._spares_checkpoints = False
        if self.checkpoints:
            self._give_up_checkpoints()
            if (yield from self._recomputes_in_order(call, wanted, held)):
                return
        # Evict all candidates, and retry with late locks: lock each input of a call only once all
        # inputs before it are resident. Until then the input can be evicted to make room.
        yield from self.shrink(-1)
        yield from self._climb(call, wanted, held, eager_locks=False)

    def _recomputes_in_order(
        self, call: Call, wanted: Value | None, held: bool
    ) -> Generator[Action, None, bool]:
        """Recompute in the order of the program. Return False if there is no room."""
        try:
            yield from self._recompute_in_order(call, wanted, held)
        except NoRoom:
            return False
        return True

    def _recompute_in_order(self, call: Call, wanted: Value | None, held: bool) -> Iterator[Action]:
        """Run `call` and the calls it depends on, in the order in which the program first ran them.

        A recomputed value stays locked until all waiting calls that read it have run. So a value is
        hardly ever recomputed twice, and the calls need about as much memory as at their first run.
        Depth first (`_climb`), calls that wait for each other can lock far more. If the results of
        all calls do not fit into memory, some stay as checkpoints.

        Args:
            call: The call to run.
            wanted: The output to recompute. None if the call runs for the first time.
            held: True if variables of the program hold the outputs.
        """
        waiting = Waiting()
        self._enqueue(waiting, call, wanted)
        kept = choose_checkpoints(waiting.in_order(), self._free_bytes(), self.is_candidate)
        try:
            while (frame := waiting.first()) is not None:
                call = frame.call
                missing = self._next_missing(frame)
                if missing is not None and self._copies(missing):
                    yield from self._swap_in(missing.storage)
                    continue
                if missing is not None:
                    # This input was in memory when the recomputation began, and was evicted since.
                    if missing.call in waiting.frames:
                        raise Cyclic
                    self._enqueue(waiting, missing.call, missing)
                    continue
                yield from self._run(frame, held)
                waiting.pop()
                for value in call.outputs:
                    for reader in waiting.readers.pop(value, ()):
                        if value.defined and value in reader.pending:
                            reader.pending.remove(value)
                            self._lock(value.storage)
                            reader.locked.append(value.storage)
                self._keep_checkpoint(kept.pop(call, ()))
                self._close(frame)
                for value in call.inputs:
                    yield from self._free(self._prune(value.storage))
        finally:
            for left in waiting.in_order():
                for storage in waiting.frames[left].locked:
                    self._unlock(storage)

    def _enqueue(self, waiting: Waiting, call: Call, wanted: Value | None) -> None:
        """Add `call` to the waiting calls, and those that recompute its missing inputs."""
        new = [(call, wanted)]
        while new:
            call, wanted = new.pop()
            if call in waiting.frames:
                continue
            frame = Frame(call, wanted)
            waiting.push(frame)
            self._open(frame, False)
            for value in dict.fromkeys(call.inputs):
                if not value.defined:
                    waiting.readers.setdefault(value, []).append(frame)
                    if not self._copies(value):
                        new.append((value.call, value))

    def _climb(
        self, call: Call, wanted: Value | None, held: bool, *, eager_locks: bool
    ) -> Iterator[Action]:
        """Run `call` and the calls it depends on: depth first over the inputs, in their order.

        An explicit stack of frames replaces recursion, because a chain of evicted values can be
        thousands of calls long.

        Args:
            call: The call to run.
            wanted: The output to recompute. None if the call runs for the first time.
            held: True if variables of the program hold the outputs.
            eager_locks: Lock all resident inputs of a call before recomputing its missing inputs.
                If False, lock each input only once all inputs before it are resident.
        """
        frames = [Frame(call, wanted)]
        calls = {call}
        gave_up: set[Call] = set()  # calls whose locked inputs were swapped out for another call
        self._open(frames[0], eager_locks)
        try:
            while frames:
                frame = frames[-1]
                missing = self._next_missing(frame)
                comes = missing is not None and self._copies(missing)
                if missing is not None and not comes:
                    # Recompute this input first. Its call gets a frame: the state of a call in
                    # progress.
                    if missing.call in calls:
                        raise Cyclic
                    calls.add(missing.call)
                    frames.append(Frame(missing.call, missing))
                    self._open(frames[-1], eager_locks)
                    continue
                try:
                    if missing is not None:
                        yield from self._swap_in(missing.storage)
                    else:
                        yield from self._run(frame, held)
                except NoRoom:
                    # The calls that wait for this one have locked inputs. In the attempt with late
                    # locks (`eager_locks` is False) these inputs may be swapped out.
                    outer = [
                        other for other in frames[:-1] if other.locked and other.call not in gave_up
                    ]
                    if eager_locks or self.host is None or not outer:
                        raise
                    gave_up.update(other.call for other in outer)
                    yield from self._give_up(outer, self.host)
                    continue
                if comes:
                    continue
                frames.pop()
                calls.remove(frame.call)
                self._close(frame)
                for value in frame.call.inputs:
                    # In the last attempt, dead values stay: to recompute one of them again, while
                    # other inputs are locked, could need more memory than there is.
                    if eager_locks:
                        yield from self._done_with(value.storage)
                    else:
                        yield from self._free(self._prune(value.storage))
        finally:
            for frame in reversed(frames):
                self._close(frame)

    def _give_up(self, frames: list[Frame], host: HostMemory) -> Iterator[Action]:
        """Swap out the locked inputs of waiting calls, to make room for the innermost call.

        In one recomputation, each call gives up its inputs at most once, also if it is opened
        again: else the time would double with each call of a chain whose values the host has no
        room for. When the call is the innermost one again, its inputs are brought back
        and then stay locked.
        """
        for frame in frames:
            locked, frame.locked = frame.locked, []
            frame.pending = [*reversed(frame.call.inputs)]
            for storage in locked:
                self._unlock(storage)
            for storage in dict.fromkeys(locked):
                if storage.order >= 0 and not storage.on_host and host.lacks(storage.nbytes) <= 0:
                    yield from self._swap_out(storage, host)

    def _open(self, frame: Frame, eager_locks: bool) -> None:
        """Lock the inputs of a call that are in memory, if `eager_locks`, and queue the others."""
        for value in frame.call.inputs:
            storage = value.storage
            self._touch(storage)
            if eager_locks and value.defined:
                self._lock(storage)
                frame.locked.append(storage)
            else:
                frame.pending.append(value)
        frame.pending.reverse()

    def _next_missing(self, frame: Frame) -> Value | None:
        """Lock the queued inputs of a call in order, and stop before the first evicted one.

        Returns:
            The evicted input, or None if all inputs are in memory, and locked now.
        """
        while frame.pending:
            if not frame.pending[-1].defined:
                return frame.pending[-1]
            value = frame.pending.pop()
            self._lock(value.storage)
            frame.locked.append(value.storage)
        return None

    def _close(self, frame: Frame) -> None:
        """Unlock the inputs of a call.

        If all inputs are locked, they are unlocked in the order of the inputs, because they become
        candidates for eviction in the order of unlocking.
        """
        done = not frame.pending
        locked = [value.storage for value in frame.call.inputs] if done else frame.locked
        for storage in locked:
            self._unlock(storage)

    def _run(self, frame: Frame, held: bool) -> Iterator[Action]:
        """Make room for the call of `frame`, run the call, and enter its results into the graph."""
        call = frame.call
        in_place = bool(call.overwrites) and (not call.ran or frame.may_consume())
        lent = sum(source.storage.nbytes for _, source in call.overwrites) if in_place else 0
        yield from self.make_room(call.nbytes - lent + call.workspace, call)
        self.subject = call
        yield Compute(call.id, in_place)
        if not call.ran:
            yield from self._free(self.admit(call, held=held))
        else:
            wanted = frame.wanted.storage if frame.wanted else None
            copied = [s for s in call.made if s.on_host and not s.resident and s is not wanted]
            self._readmit(frame, in_place)
            unasked = [storage for storage in call.made if storage not in self._storages]
            # A call recomputes all of its outputs. Free the outputs that have left the graph,
            # because nothing can use them.
            for storage in unasked:
                storage.resident = False
                self.memory -= storage.nbytes
            yield from self._free(unasked)
            # Evict the outputs that nobody asked for, if the host has a copy of them.
            for storage in copied:
                if storage in self._storages:
                    yield from self._evict(storage)

    def _readmit(self, frame: Frame, in_place: bool) -> None:
        """Update memory, clock and candidates after the call of `frame` was recomputed."""
        call = frame.call
        self.clock += call.cost
        self.recompute_ns += call.cost
        limit = self._recompute_limit
        if limit is not None and self.recompute_ns > limit:
            raise Thrashed(self.recompute_ns, limit)
        self.memory += call.nbytes
        if in_place:
            for output, source in call.overwrites:
                self.memory -= self._take_over(output, source)
        if self.memory + call.workspace > self.peak:
            self.peak = self.memory + call.workspace
        for storage in call.made:
            # If this output was in memory already, the driver frees the recomputed copy.
            if storage.resident:
                self.memory -= storage.nbytes
            else:
                storage.resident = True
                if storage in self._storages:
                    self._chooser.returned(storage)
        for value in call.outputs:
            value.defined = value.storage.resident
        for value in call.outputs_but_last(frame.wanted):
            if value.storage in self._storages:
                self._classify(value.storage)

    def _take_over(self, output: Value, source: Value) -> Bytes:
        """Let `output` take over the memory of `source`, which an in-place call overwrites.

        Returns:
            The size of the storage of `source` in bytes.
        """
        old, new = source.storage, output.storage
        # The program may hold the evicted output already (`Storage.evictable_while_held`).
        new.held, old.held = new.held or old.held, False
        new.pinned, old.pinned = old.pinned, False
        self._vanish(old)
        if old.restorable:
            self._chooser.evicted(old)
        return old.nbytes
