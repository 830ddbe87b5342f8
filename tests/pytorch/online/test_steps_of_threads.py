"""Threads of one budget end steps, and take samples, at once."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from rekindle.pytorch.online._steps import MOST, Steps

THREADS = 4
STEPS = 500


@dataclass
class Counted:
    """An engine whose clock goes on whenever somebody looks."""

    peak: int = 8
    memory: int = 4
    compute_ns: int = 0
    recompute_ns: int = 0
    ticks: Iterator[int] = field(default_factory=itertools.count)

    @property
    def clock(self) -> int:
        return next(self.ticks)

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


def test_each_step_and_each_sample_counts_once() -> None:
    steps = Steps(Counted())
    heard: list[int] = []
    steps.listeners.append(lambda step: heard.append(step.number))

    def train(_: int) -> None:
        for number in range(STEPS):
            steps.over(number, number, 0)
            for _ in range(20):
                steps.sample()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(train, range(THREADS)))
    assert steps.number == THREADS * STEPS
    assert sorted(heard) == list(range(1, THREADS * STEPS + 1))
    clock, memory, lost = steps.samples()
    assert 0 < len(clock) == len(memory) == len(lost) <= MOST
    assert set(memory) == {4}
