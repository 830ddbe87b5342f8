"""Tests of learned plans in realistic training loops, with operators between the steps."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rekindle
from rekindle import Run
from tests.pytorch.tracker import measure

WIDTH, BATCH, BATCHES = 64, 256, 4

After = Callable[["Loop", Tensor, Tensor], None]


class Loop:
    """A classifier with dropout, shuffled batches, clipping and a schedule of learning rates."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)
        ]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        data = TensorDataset(
            torch.randn(BATCH * BATCHES, WIDTH), torch.arange(BATCH * BATCHES) % 10
        )
        self.loader = DataLoader(data, BATCH, shuffle=True)
        self.number = 0
        self.reported: list[object] = []

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.loader

    def epoch(self, after: After | None = None, before_step: After | None = None) -> None:
        for x, y in self.batches():
            out = self.model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if before_step is not None:
                before_step(self, out, loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.number += 1
            if after is not None:
                after(self, out, loss)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            right = sum((self.model(x).argmax(1) == y).sum() for x, y in self.batches())
        self.model.train()
        self.reported.append(int(right))

    def save(self) -> None:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "state": self.optimizer.state_dict()}, file)
        self.reported.append(len(file.getvalue()))


def nothing(loop: Loop, out: Tensor, loss: Tensor) -> None: ...


def prints_now_and_then(loop: Loop, out: Tensor, loss: Tensor) -> None:
    if loop.number % 3 == 0:
        loop.reported.append(loss.item())


def counts_what_is_right(loop: Loop, out: Tensor, loss: Tensor) -> None:
    """Count correct predictions without using `torch.no_grad()`, as many programs do."""
    if loop.number % 2 == 0:
        right = (out.argmax(1) == torch.zeros(BATCH, dtype=torch.int64)).float().mean()
        loop.reported.append((right.item(), (loss * 2).item()))


def evaluates_amid_an_epoch(loop: Loop, out: Tensor, loss: Tensor) -> None:
    if loop.number % 3 == 0:
        loop.evaluate()
        loop.save()


def evaluates_with_grad_mode_on(loop: Loop, out: Tensor, loss: Tensor) -> None:
    """Evaluate without `torch.no_grad()`: the forward pass looks like the start of a step."""
    if loop.number % 3 == 0:
        x, y = next(iter(loop.loader))
        loop.reported.append(F.cross_entropy(loop.model(x), y).item())


@functools.cache
def budget_of() -> int:
    def loop() -> Loop:
        made = Loop()
        for _ in range(2):
            made.epoch()
        return made

    return measure(loop).budget(0.5)


def train(loop: Loop, epochs: int = 4, after: After = nothing, before: After = nothing) -> None:
    for _ in range(epochs):
        loop.epoch(after, before)
        loop.evaluate()
        loop.save()


def assert_follows(
    after: After = nothing, before: After = nothing, *, learning: int = 3, left: int = 0
) -> Run:
    """Assert that steps after the first `learning` ones follow a plan, and that bits are equal."""
    budget = budget_of()
    plain = Loop()
    train(plain, 4, after, before)
    loop = Loop()
    with rekindle.budget(budget, learn="wait") as run:
        train(loop, 4, after, before)
    assert loop.reported == plain.reported
    ours, theirs = loop.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert run.steps == 4 * BATCHES
    assert (run.steps_followed, run.steps_left) == (run.steps - learning, left), run.report()
    return run


def test_loop_with_evaluation_and_checkpoints_follows_its_plan() -> None:
    run = assert_follows()
    reported = "13   followed to the end, 0 abandoned, 3 without a plan: 81% of the steps followed"
    assert reported in str(run.report())


@pytest.mark.parametrize(
    "after",
    [
        prints_now_and_then,
        counts_what_is_right,
        evaluates_amid_an_epoch,
        evaluates_with_grad_mode_on,
    ],
)
def test_learned_plan_is_followed_with_operators_between_steps(after: After) -> None:
    assert_follows(after)


@pytest.mark.parametrize(
    "before", [prints_now_and_then, counts_what_is_right, evaluates_amid_an_epoch]
)
def test_learned_plan_is_followed_with_operators_before_step(before: After) -> None:
    assert_follows(before=before)


def test_loop_with_two_optimizers_has_plan_for_each() -> None:
    """Adversarial training has two such optimizers, whose steps alternate."""
    torch.manual_seed(0)
    one, other = Loop().model, Loop().model
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (one, other)]

    def both(number: int) -> None:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        for model, optimizer, depth in zip((one, other), optimizers, (7, 5), strict=True):
            optimizer.zero_grad()
            model[:depth](x).square().mean().backward()
            optimizer.step()

    budget = measure(lambda: [both(0), both(1)]).budget(0.5)
    with rekindle.budget(budget, learn="wait") as run:
        for number in range(10):
            both(number)
    assert run.steps_followed >= 12
    assert run.steps_left <= 1  # both steps begin alike, and one has its plan before the other


def test_smaller_last_batch_has_learned_plan_of_its_own() -> None:
    loop = Loop()
    data = TensorDataset(torch.randn(BATCH * 4 - 16, WIDTH), torch.arange(BATCH * 4 - 16) % 10)
    loop.loader = DataLoader(data, BATCH, shuffle=True)
    with rekindle.budget(budget_of(), learn="wait") as run:
        for _ in range(8):
            loop.epoch(prints_now_and_then)
    assert run.steps == 32
    assert run.steps_left == 0
    assert run.steps_followed >= 24


def test_recording_without_optimizer_stops_at_limit() -> None:
    """An optimizer's step ends a recorded step, so without one the recording would never end."""
    loop = Loop()
    x = torch.randn(BATCH, WIDTH)
    with rekindle.budget(budget_of(), learn="wait") as run:
        learner = run._learner
        assert learner is not None
        run._driver.core.remember_at_most(run._driver.handle, 100)
        for _ in range(10):
            loop.model(x).square().mean().backward()
        assert learner.remembered <= 100
        loop.epoch()
    assert run.steps == BATCHES
