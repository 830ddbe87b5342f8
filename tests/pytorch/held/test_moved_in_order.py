"""Tests that state moves in the order of its next use, which a step learns from the step before."""

from __future__ import annotations

import _thread
import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.policies import Swap
from tests.native.journals import Entry, entries
from tests.pytorch import cores
from tests.pytorch.bits import threads_set
from tests.pytorch.held.placeholders import is_empty
from tests.pytorch.held.test_moved_state import LARGEST, TIGHT, Task, moving

MOST = 400_000
STEPS = 4
FAST = Swap(1 << 30, out_bytes_per_s=10**10, in_bytes_per_s=10**10)


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    with threads_set(1), cores.fixed_prices():
        yield


def journal(task: Task, budget: int, tmp_path: Path, steps: int = STEPS) -> tuple[list[int], Any]:
    """Return the journal of some steps as numbers, and the run."""
    with moving(tmp_path, budget, swap=FAST) as run:
        driver: Any = run._driver
        driver.core.open_journal(driver.handle, MOST)
        for _ in range(steps):
            task.step()
        words = list(chain.from_iterable(driver.core.journal(driver.handle)))
    assert len(words) < 6 * MOST
    return words, run


def renamed(journal: list[Entry]) -> list[Entry]:
    """Give a storage that an operator wrote in place its first number again."""
    first: dict[int, int] = {}
    for each in journal:
        if each.kind == "overwrites":
            first[each.id] = first.get(each.number, each.number)
    return [
        each._replace(id=first.get(each.id, each.id))
        for each in journal
        if not (each.kind == "makes" and each.id in first)
    ]


class Optimum:
    """What moves in the last step of a journal, and what would move in Belady's order.

    Both have the same room for sources at each moment: what the rest of the memory leaves free.
    """

    def __init__(self, words: list[int], budget: int) -> None:
        self.entries = renamed(list(entries(words)))
        self.budget = budget
        self.nbytes = {each.id: each.number for each in self.entries if each.kind == "makes"}
        self.moves = {each.id for each in self.entries if each.kind == "swap_out"}
        ends = [at for at, each in enumerate(self.entries) if each.kind == "step"]
        self.first, self.last = ends[-2] + 1, ends[-1]
        old = {each.id for each in self.entries[: self.first] if each.kind == "makes"}
        uses = self.uses(self.first, self.last)
        self.lasting = {number for number in uses if number in old}
        self.all_uses = uses

    def uses(self, first: int, last: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for at in range(first, last):
            each = self.entries[at]
            if each.kind == "lock" and each.id in self.moves:
                found.setdefault(each.id, []).append(at)
        return found

    def next_use(self, number: int, now: int) -> float:
        uses = self.all_uses.get(number, [])
        later = [at for at in uses if at >= now]
        if later:
            return later[0]
        return uses[0] + self.last - self.first if number in self.lasting else float("inf")

    def resident(self, upto: int) -> tuple[set[int], set[int]]:
        """Return the sources in memory, and those with a valid copy, before the entry `upto`."""
        there: set[int] = set()
        copied: set[int] = set()
        for each in self.entries[:upto]:
            self.follow(each, there, copied)
        return there, copied

    def follow(self, each: Entry, there: set[int], copied: set[int]) -> None:
        if each.id not in self.moves:
            return
        match each.kind:
            case "makes" | "swap_in":
                there.add(each.id)
            case "swap_out":
                copied.add(each.id)
                if not each.flags:
                    there.discard(each.id)
            case "free" | "gone" | "drop":
                there.discard(each.id)
            case "discard":
                copied.discard(each.id)

    def moved(self) -> int:
        """Return the bytes that moved in the last step."""
        return sum(
            self.nbytes[each.id]
            for each in self.entries[self.first : self.last]
            if each.kind in ("swap_in", "swap_out") and each.id in self.moves
        )

    def kept_before(self) -> set[int]:
        """Return what may not leave when the step begins, because a node of autograd reads it."""
        kept: set[int] = set()
        for each in self.entries[: self.first]:
            if each.kind == "set_evictable_while_held":
                (kept.discard if each.flags else kept.add)(each.id)
        return kept

    def least(self) -> int:
        """Return the bytes that move in Belady's order."""
        there, _ = self.resident(self.first)
        cached, clean = self.resident(self.first)
        locks: Counter[int] = Counter()
        kept = self.kept_before()
        total = 0
        for at in range(self.first, self.last):
            each = self.entries[at]
            self.follow(each, there, set())
            match each.kind:
                case "lock" if each.id in self.moves:
                    locks[each.id] += 1
                    if each.id not in cached:
                        total += self.nbytes[each.id]
                        cached.add(each.id)
                    if each.id in self.lasting and at == self.all_uses[each.id][-1]:
                        clean.discard(each.id)  # the optimizer writes it
                case "unlock":
                    locks[each.id] -= 1
                case "set_evictable_while_held":
                    (kept.discard if each.flags else kept.add)(each.id)
                case "makes" if each.id in self.moves:
                    cached.add(each.id)
                case "gone" | "drop":
                    cached.discard(each.id)
            used = sum(self.nbytes[number] for number in there)
            room = self.budget - (each.memory - used)
            held = sum(self.nbytes[number] for number in cached)
            while held > room:
                free = [each for each in cached - kept if locks[each] <= 0]
                if not free:
                    break
                victim = max(free, key=lambda number: (self.next_use(number, at), number))
                cached.discard(victim)
                held -= self.nbytes[victim]
                if victim not in clean:
                    total += self.nbytes[victim]
                    clean.add(victim)
        return total


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("budget", "most"), [(TIGHT, 1.15), (2 * TIGHT, 1.1)])
def test_bytes_moved_in_step_are_near_those_of_belady(
    options: dict[str, bool], budget: int, most: float, tmp_path: Path
) -> None:
    words, _ = journal(Task(torch.optim.AdamW, **options), budget, tmp_path)
    optimum = Optimum(words, budget)
    assert optimum.least() > 0
    assert optimum.moved() <= most * optimum.least()


def test_equal_runs_move_equal_bytes_in_equal_order(tmp_path: Path) -> None:
    runs = [list(entries(journal(Task(), TIGHT, tmp_path)[0])) for _ in range(2)]
    moves = [[each for each in run if each.kind in ("swap_in", "swap_out")] for run in runs]
    assert moves[0] == moves[1] != []


# -- faults ----------------------------------------------------------------------------------------


def descending() -> Task:
    """Return a task whose optimizer changes each weight by one operator."""
    return Task(torch.optim.SGD, lr=0.1)


def are_of_whole_steps(task: Task, done: int) -> bool:
    """Return True if each weight in memory is that after `done` steps, or after one more."""
    plain, steps = descending(), []
    for _ in range(done + 2):
        steps.append({name: each.clone() for name, each in plain.model.state_dict().items()})
        plain.step()
    return all(
        is_empty(each) or any(torch.equal(each, step[name]) for step in steps[done:])
        for name, each in task.model.named_parameters()
    )


def stopped(task: Task, tmp_path: Path, error: type[BaseException]) -> int:
    """Train until `error` comes. Return the number of whole steps before."""
    done: list[int] = []

    def train() -> None:
        with moving(tmp_path, 5 * LARGEST):
            for number in range(STEPS):
                task.step()
                done.append(number)

    with pytest.raises(error):
        train()
    return len(done)


@pytest.mark.parametrize("way", ["pwrite", "preadv"])
@pytest.mark.parametrize("copies", [5, 20, 35, 50])
def test_interrupt_in_a_copy_loses_nothing(
    way: str, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while a thread of the swap file copies."""
    task = descending()
    original, calls = getattr(os, way), iter(range(10**9))

    def interrupting(*arguments: Any) -> Any:
        if next(calls) == copies:
            _thread.interrupt_main()
        return original(*arguments)

    monkeypatch.setattr(os, way, interrupting)
    done = stopped(task, tmp_path, KeyboardInterrupt)
    assert not any(is_empty(each) for each in task.model.parameters())
    assert are_of_whole_steps(task, done)
