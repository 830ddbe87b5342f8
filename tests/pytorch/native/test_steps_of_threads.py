"""Tests of several threads that end steps of one budget at the same time."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from rekindle.pytorch.native import Numbers, Steps
from rekindle.pytorch.native._steps import MOST

THREADS = 4
STEPS = 500


@dataclass
class Counted:
    """A stand-in for the engine, whose clock advances whenever it is read."""

    peak: int = 8
    ticks: Iterator[int] = field(default_factory=itertools.count)

    def now(self) -> Numbers:
        return Numbers(4, self.peak, next(self.ticks), *[0] * 10)

    def take_samples(self) -> bytes:
        return b""

    def space_samples(self, due: int, every: int) -> None:
        pass


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_steps_ended_by_several_threads_are_each_counted_once() -> None:
    steps = Steps(Counted())
    heard: list[int] = []
    steps.listeners.append(lambda step: heard.append(step.number))

    def train(_: int) -> None:
        for _ in range(STEPS):
            steps.over()
            for _ in range(20):
                steps.sample()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(train, range(THREADS)))
    assert steps.number == THREADS * STEPS
    assert sorted(heard) == list(range(1, THREADS * STEPS + 1))
    clock, memory, lost = steps.samples()
    assert 0 < len(clock) == len(memory) == len(lost) <= MOST
    assert set(memory) == {4}
