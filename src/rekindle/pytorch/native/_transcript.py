"""Turn the journal of the native core into a trace (events) and a record (actions).

The journal lists the events of the engine in their order. The entries that describe an operator
call (the storages that it reads, makes and overwrites) come before the entry of the call. After a
call that writes in place, the saved-tensor handles of the old value refer to the new one. The
journal has no entry for this change, so this file adds the change to the trace.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, final

from rekindle._types import Bytes, OpId, StorageId, ValueId
from rekindle.pytorch.native._higher import shown_name
from rekindle.pytorch.native._module import Core, Handle
from rekindle.schedule import Compute, Discard, Free, Recorder, SwapIn, SwapOut
from rekindle.trace import Trace, TraceBuilder, taking_over

KINDS: Final = (
    "reads", "makes", "views", "overwrites", "takes", "call", "admit", "defer", "hold", "use",
    "pin", "retain", "release", "drop", "gone", "forget", "seal", "spoil", "account", "resize",
    "require", "make_room", "shrink", "evict", "set_evictable_while_held", "lock", "unlock", "mark",
    "unmark", "clear", "listen", "uncounted", "ahead", "prefetch", "planned", "save", "fetch",
    "discards", "measured", "swap_out_failed", "swap_in_failed", "copy_lost", "written",
    "outdated", "step", "anticipate", "compute", "free", "swap_out", "swap_in", "discard",
)  # fmt: skip
"""The kinds of the journal's entries, in the order of native/engine/journal.h."""
_REPLAYABLE: Final = 1


class Transcript(NamedTuple):
    """A journal (list of the engine's events) as the core returns it.

    It consists of rows of 64-bit integers, and of names of operators.
    """

    present: bytes
    """Storages in the engine's graph at the start: id, bytes, references, 1 if user-held."""
    counted: bytes
    """Counted memory outside of the engine's graph at the start, in the form of `present`."""
    entries: bytes
    """The journal's entries of six numbers each: kind, id, number, flags, clock, memory."""
    places: bytes
    """For a recorded step: the number of entries before each operator of the step."""
    workspaces: bytes
    """For each call, its workspace in bytes."""
    backward: bytes
    """For each call, 1 if it ran in a backward pass."""
    over: bytes
    """For each call, the storage whose memory its result could take over; negative: none."""
    names: list[str]

    def trace(self) -> tuple[Trace, list[int], list[int]]:
        """Build a trace from the journal.

        Returns:
            The trace; and for each operator of the step, how many operators and storages the trace
            has before it.

        Raises:
            InvalidTrace: The journal contradicts itself.
        """
        reader = _Reader(self)
        starts: list[int] = []
        numbers: list[int] = []
        places = iter(_words(self.places))
        place = next(places, None)
        for count, entry in enumerate(_rows(self.entries, 6)):
            while place == count:
                starts.append(reader.builder.operators)
                numbers.append(reader.builder.storages)
                place = next(places, None)
            reader.read(KINDS[entry[0]], *entry[1:4])
        while place is not None:
            starts.append(reader.builder.operators)
            numbers.append(reader.builder.storages)
            place = next(places, None)
        return reader.build(), starts, numbers

    def recorder(self) -> Recorder:
        """Return a recorder with all actions of the engine: computed, evicted, swapped.

        For each action, the recorder has the engine's clock and memory before the action.
        """
        recorder = Recorder()
        # Several entries of the journal describe one operator call. True once one of them says that
        # the call writes in place.
        overwrites = False
        for kind, number, _, flags, clock, memory in _rows(self.entries, 6):
            match KINDS[kind]:
                case "overwrites":
                    overwrites = True
                case "admit":
                    recorder.acted(Compute(OpId(number), in_place=overwrites), clock, memory)
                    overwrites = False
                case "compute":
                    recorder.acted(Compute(OpId(number), in_place=bool(flags)), clock, memory)
                case "free":
                    recorder.acted(Free(StorageId(number)), clock, memory)
                case "swap_out":
                    recorder.acted(SwapOut(StorageId(number), keep=bool(flags)), clock, memory)
                case "swap_in":
                    recorder.acted(SwapIn(StorageId(number)), clock, memory)
                case "discard":
                    recorder.acted(Discard(StorageId(number)), clock, memory)
                case _:
                    pass
        return recorder


@final
class Recording:
    """A recording of a run, from the creation of this object to `end`."""

    def __init__(self, core: Core, handle: Handle, *, whole: bool = False) -> None:
        """Start the recording.

        Args:
            core: The native core.
            handle: The run to record.
            whole: Record the whole run from its beginning, and drop no entries.
        """
        self._core = core
        self._handle = handle
        self._number = core.begin_recording(handle, whole)
        self._words: Transcript | None = None  # set by `end`

    def end(self) -> None:
        """End the recording. It can be read afterwards."""
        if self._words is None:
            self._words = Transcript(*self._core.end_recording(self._handle, self._number))

    def trace(self) -> Trace:
        """Return the trace of the recorded events."""
        trace, *_ = self._up_to_now().trace()
        return trace

    def recorder(self) -> Recorder:
        """Return the recorded actions."""
        return self._up_to_now().recorder()

    def _up_to_now(self) -> Transcript:
        """Return the journal of the recording, with all events up to now."""
        if self._words is not None:
            return self._words
        return Transcript(*self._core.recording(self._handle, self._number))


@final
class _Reader:
    """Builds a trace from the entries of a journal (list of the engine's events)."""

    def __init__(self, words: Transcript) -> None:
        self.builder = TraceBuilder("captured", held=True)
        self._values: dict[int, ValueId] = {}
        self._references: Counter[int] = Counter()
        self._calls = zip(
            words.names,
            _words(words.workspaces),
            _words(words.backward),
            _words(words.over),
            strict=True,
        )
        self._in_place: dict[OpId, ValueId] = {}
        self._inputs: list[int] = []
        self._made: list[tuple[int, Bytes]] = []
        # The last call that the engine had to run itself, and its results until it has.
        self._attempt = -1
        self._expected: tuple[ValueId, ...] = ()
        self._overwrites: dict[int, int] = {}
        for storage, nbytes, references, held in _rows(words.present, 4):
            self._values[storage] = value = self.builder.source(nbytes, held=held > 0)
            self._references[storage] = references
            for _ in range(references - (not held)):
                self.builder.retain(value)
            if not (references or held):
                self.builder.release(value)
        self._counted = {
            key: self.builder.source(nbytes) for key, nbytes, _, _ in _rows(words.counted, 4)
        }

    def build(self) -> Trace:
        self._drop_failed_attempt()
        return taking_over(self.builder.build(), self._in_place)

    def read(self, kind: str, storage: int, number: int, flags: int) -> None:
        """Add one entry of the engine's journal to the trace."""
        match kind:
            case "reads":
                self._inputs.append(storage)
            case "makes":
                self._made.append((storage, number))
            case "overwrites":
                self._overwrites[storage] = number
            case "call" if storage == self._attempt:  # the engine tries once more
                self._inputs, self._made, self._overwrites = [], [], {}
            case "admit" | "defer" | "call":
                self._drop_failed_attempt()
                values = self._call(number, bool(flags & _REPLAYABLE))
                if kind == "call":
                    self._attempt, self._expected = storage, values
            case "compute" if storage == self._attempt:
                self._expected = ()
            case "use" | "pin" | "retain" | "release" | "drop" | "seal":
                self._references[storage] += (kind == "retain") - (kind == "release")
                getattr(self.builder, kind)(self._values[storage])
            case "hold":
                self.builder.use(self._values[storage])
            case "gone":
                self.builder.drop(self._values[storage])
            case "uncounted" if storage in self._counted:
                self.builder.drop(self._counted.pop(storage))
            case _:  # traces have no event for the other entries
                pass

    def _drop_failed_attempt(self) -> None:
        """Let the results of a call die that had no room even in slices, and did not run."""
        for value in self._expected:
            self.builder.drop(value)
        self._expected = ()

    def _call(self, cost: int, replayable: bool) -> tuple[ValueId, ...]:
        """Add an operator call to the trace, and return its results.

        The entries before it in the journal gave the storages that the call reads and makes.
        """
        inputs = [self._values[storage] for storage in self._inputs]
        overwrites = [
            (position, self._values[self._overwrites[made]])
            for position, (made, _) in enumerate(self._made)
            if made in self._overwrites
        ]
        inputs += [value for _, value in overwrites if value not in inputs]
        name, workspace, backward, over = next(self._calls)
        if over in self._values:
            source = self._in_place[OpId(self.builder.operators)] = self._values[over]
            inputs += [source] if source not in inputs else []
        values = self.builder.call(
            shown_name(name),
            cost,
            inputs,
            [nbytes for _, nbytes in self._made],
            overwrites=overwrites,
            replayable=replayable,
            is_backward=bool(backward),
            workspace=workspace,
        )
        for (made, _), value in zip(self._made, values, strict=True):
            self._values[made] = value
        # Variables that referred to an overwritten value refer to the value that replaced it.
        for made, old in self._overwrites.items():
            references = self._references.pop(old, 0)
            self._references[made] += references
            for _ in range(references):
                self.builder.retain(self._values[made])
                self.builder.release(self._values[old])
        self._inputs, self._made, self._overwrites = [], [], {}
        return tuple(values)


def _words(content: bytes) -> array[int]:
    """Return the 64-bit integers in `content`, which the native core wrote."""
    words = array("q")
    words.frombytes(content)
    return words


def _rows(content: bytes, length: int) -> Iterator[tuple[int, ...]]:
    """Iterate over `content` in rows of `length` 64-bit integers."""
    numbers: Iterable[int] = _words(content)
    return zip(*[iter(numbers)] * length, strict=True)
