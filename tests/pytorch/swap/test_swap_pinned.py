"""Tests of swapping to page-locked host memory, with copies in streams of their own.

The device is simulated, except in one test on CUDA.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch

import rekindle
from rekindle import _clock
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.swap import host_memory
from rekindle.pytorch.swap._pinned_store import PinnedStore
from rekindle.pytorch.swap._streams import Streams
from tests.pytorch.online.test_cuda import train_on_device, train_plainly

CPU = torch.device("cpu")  # memory of the simulated device


class Queue:
    """A simulated stream, which records its commands. `now` is the current stream."""

    log: list[str] = []  # noqa: RUF012 - emptied by each test
    now: Queue

    def __init__(self, name: str) -> None:
        self.name = self.stream_id = name

    def wait_stream(self, other: Queue) -> None:
        Queue.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Mark) -> None:
        Queue.log.append(f"{self.name} waits for the copy in {event.queue}")


class Event:
    """A simulated event of a device. It has completed once `reached` is True."""

    reached = False
    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        Event.clock += 0.25
        self.at = Event.clock

    def query(self) -> bool:
        return Event.reached

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


class Mark(Event):
    """An event that knows its stream."""

    queue = ""

    def record(self) -> None:
        super().record()
        self.queue = Queue.now.name

    def synchronize(self) -> None:
        assert Event.reached, "the host waits"


@contextmanager
def _use(queue: Queue) -> Iterator[None]:
    Queue.now, before = queue, Queue.now
    yield
    Queue.now = before


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> PinnedStore:
    if torch.version.cuda is not None and not torch.cuda.is_available():
        pytest.skip("PyTorch's CUDA build asks for a driver, and there is none")
    names = cycle(["out", "back"])
    copy = torch.Tensor.copy_

    def copy_(self: Any, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking
        Queue.log.append(f"copy in {Queue.now.name}")
        return copy(self, source)

    Queue.now = Queue("program")
    Queue.log.clear()
    monkeypatch.setattr(_clock, "SPEED", None)  # the simulated device has a clock of its own
    monkeypatch.setattr(Event, "reached", False)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queue(next(names)))
    monkeypatch.setattr(torch.cuda, "stream", _use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queue.now)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(accelerator, "pinned", lambda n: torch.empty(n, dtype=torch.uint8))
    return PinnedStore(100_000, CPU, Streams(CPU))


def test_page_locked_copy_keeps_value_until_program_waits_for_it(store: PinnedStore) -> None:
    tensor = torch.randn(1000)
    home = tensor.untyped_storage()
    begun = store.write(home)
    assert begun is not None
    key, way = begun
    assert Queue.log == ["out waits for program", "copy in out"]
    gone = weakref.ref(home)
    wanted = tensor.tolist()
    del tensor, home
    gc.collect()
    assert gone() is not None, "its copy may not have been made"
    way.wait()  # waits on the device: the host would have failed in `synchronize`
    assert Queue.log[2:] == ["program waits for the copy in out"]
    assert gone() is None
    assert not way.ended()

    Queue.log.clear()
    back = store.new_home(4000)
    way = store.read(key, back)
    way.wait()
    assert Queue.log == [
        "back waits for program",
        "copy in back",
        "program waits for the copy in back",
    ]
    assert torch.empty(0).set_(back).tolist() == wanted
    Event.reached = True
    assert way.ended()
    # the simulated device reports 0.25 ms between any two events
    assert (way.ns, way.waiting_ns) == (250_000, 250_000)
    assert store.used == 4096
    store.release(key)
    assert store.used == 0


def test_page_locked_memory_stays_within_its_limit(store: PinnedStore) -> None:
    assert store.limit == 65_536  # the allocator of page-locked memory returns powers of two
    assert store.write(torch.ones(16_384).untyped_storage()) is not None
    assert store.write(torch.ones(1).untyped_storage()) is None
    assert store.pinned == 65_536


def test_several_values_share_one_page_locked_block(
    store: PinnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch rounds a page-locked block up to a power of two, up to twice the bytes of a value."""
    given: list[int] = []

    def pinned(nbytes: int) -> torch.Tensor:
        given.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(accelerator, "pinned", pinned)
    # Each value has 36 KB. A block of its own would have 64 KiB, the next power of two.
    values = [torch.full((9_000,), float(number)) for number in range(40)]
    store = PinnedStore(2 << 20, CPU, Streams(CPU))
    keys = [begun[0] for each in values if (begun := store.write(each.untyped_storage()))]
    assert len(keys) == len(values)
    assert sum(given) == store.pinned == 2 << 20
    for key, value in zip(keys[::2], values[::2], strict=True):
        back = store.new_home(value.nbytes)
        store.read(key, back).wait()
        assert torch.equal(torch.empty(0).set_(back), value)
        store.release(key)
    again = [store.write(each.untyped_storage()) for each in values[::2]]
    assert None not in again
    assert sum(given) == 2 << 20  # no new block: the memory of released values is used


def test_value_is_not_swapped_if_page_locking_fails(
    store: PinnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(accelerator, "pinned", refuse)
    assert store.write(torch.ones(10).untyped_storage()) is None
    assert store.used == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_swapping_on_cuda_matches_pytorch() -> None:
    wanted, weights, budget = train_plainly()
    swap = rekindle.policies.Swap(only=True)
    with rekindle.budget(budget, device="cuda", swap=swap) as run:
        got, same = train_on_device()
    swapped = run.report().swapped
    assert swapped is not None
    assert swapped.out > 0
    assert swapped.back > 0
    assert run.recomputations == 0
    assert got == wanted
    assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    assert torch.cuda.max_memory_allocated() <= budget


@pytest.mark.parametrize(
    ("device", "message"), [("mps", "on CUDA and on the CPU"), ("cuda", 'swap="32GiB"')]
)
def test_swap_on_device_other_than_cpu_and_cuda_is_refused(device: str, message: str) -> None:
    with pytest.raises(rekindle.Unsupported, match=message):
        host_memory("1GiB", "x", torch.device(device))
