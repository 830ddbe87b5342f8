"""Tests of operators that are only counted, because memory is far below the budget."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.on_device.machine import same
from tests.pytorch import cores
from tests.pytorch.scenes.play import Tally

MIB = 1 << 20

pytestmark = pytest.mark.skipif(native_core() is None, reason="no native core")


def is_counting(run: Any) -> bool:
    return run._driver.core.counts_only(run._driver.handle)


def count_only(run: Any, operators: int = 1 << 40) -> None:
    """Only count the next operators, whatever the budget."""
    run._driver.core.count_only(run._driver.handle, operators)


def mlp(width: int = 32, layers: int = 20) -> nn.Sequential:
    pairs = ((nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


class Training:
    """A model with its optimizer, made anew from one seed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, rows: int = 64) -> None:
        x = torch.randn(rows, 32)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def left(self) -> list[Tensor]:
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *states, torch.get_rng_state()]


def test_program_far_below_budget_is_only_counted() -> None:
    plain = Training()
    for _ in range(40):
        plain.step()
    wanted = plain.left()
    ours = Training()
    with rekindle.budget("64MiB") as run:
        for _ in range(40):
            ours.step()
        assert is_counting(run)
    assert same(ours.left(), wanted)


@pytest.mark.parametrize("options", [{"evict": "anything"}, {"swap": "1GiB"}])
def test_budget_that_evicts_anything_or_swaps_always_records(options: Any) -> None:
    ours = Training()
    with rekindle.budget("64MiB", **options) as run:
        for _ in range(40):
            ours.step()
        assert not is_counting(run)


def test_program_near_its_budget_is_recorded() -> None:
    ours = Training()
    with rekindle.budget("64MiB") as run:
        ours.step()
    with rekindle.budget(4 * run.peak, learn=False) as run:
        for _ in range(40):
            ours.step()
        assert not is_counting(run)


def test_budget_without_limit_records_operators() -> None:
    ours = Training()
    with rekindle.budget(None) as run:
        for _ in range(40):
            ours.step()
        assert not is_counting(run)


def test_larger_batch_ends_counting_and_stays_within_budget() -> None:
    plain = Training()
    for rows in (64,) * 30 + (8192,) * 3:
        plain.step(rows)
    wanted, ours, tally = plain.left(), Training(), Tally()
    with tally.counting(), rekindle.budget("16MiB", learn=False) as run, tally.of_a_budget():
        for _ in range(30):
            ours.step(64)
        assert is_counting(run)
        for _ in range(3):
            ours.step(8192)
        assert not is_counting(run)
        recomputed = run.recomputations
    assert recomputed > 0
    assert same(ours.left(), wanted)
    assert tally.within <= 16 * MIB


def test_counted_operator_gets_at_most_a_twentieth_at_once() -> None:
    """The operator then runs as any other: it evicts, or raises before memory is allocated."""
    column, row = torch.rand(1024, 1), torch.rand(1, 1024)
    tally = Tally()
    budget = rekindle.budget("8MiB", learn=False, split="never")
    with tally.counting(), budget as run, tally.of_a_budget():
        count_only(run)
        made = column @ row
        assert not is_counting(run)
        assert torch.equal(made[5], column[5] * row[0])
        del made
        count_only(run)
        with pytest.raises(rekindle.OutOfBudget, match=r"needs 16\.0 MiB"):
            torch.cat([column] * 2) @ torch.cat([row] * 2, dim=1)
    assert tally.within <= 8 * MIB


def test_boxed_operator_that_is_refused_memory_runs_again() -> None:
    x = torch.rand(1024, 600)
    with rekindle.budget("14MiB", learn=False) as run:
        count_only(run)
        made = torch.cumsum(torch.cat([x, x]), 0)
        assert not is_counting(run)
    assert torch.equal(made, torch.cumsum(torch.cat([x, x]), 0))


@pytest.mark.parametrize("ends", [False, True])
def test_write_to_tensor_saved_while_counting_is_reported(ends: bool) -> None:
    with rekindle.budget("64MiB", learn=False) as run:
        count_only(run)
        x = torch.rand(100, requires_grad=True)
        y = x.exp()
        z = y.sum()
        y.mul_(2)
        if ends:
            count_only(run, 1)
            torch.ones(1)
            assert not is_counting(run)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*version 1"):
            z.backward()


def _new_memory(y: Tensor) -> None:
    y.data = torch.full((100,), 3.0)


def _written_unseen(y: Tensor) -> None:
    y.data.mul_(2)


@pytest.mark.parametrize("change", [_new_memory, _written_unseen])
@pytest.mark.parametrize("ends", ["never", "before", "after"])
def test_value_saved_while_counting_follows_its_tensor(
    change: Callable[[Tensor], None], ends: str
) -> None:
    """Plain PyTorch computes with the contents that the tensor has at the backward pass."""

    def gradient(run: Any) -> Tensor:
        def end() -> None:
            if run is not None:
                count_only(run, 1)
                torch.ones(1)
                cores.evict_all(run._driver)

        torch.manual_seed(0)
        if run is not None:
            count_only(run)
        x = torch.rand(100, requires_grad=True)
        w = torch.rand(100)
        y = x * w  # saves w
        if ends == "before":
            end()
        change(w)
        if ends == "after":
            end()
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = gradient(None)
    with rekindle.budget("64MiB", learn=False) as run:
        assert torch.equal(gradient(run), wanted)


def test_second_derivative_over_end_of_counting_matches_pytorch() -> None:
    def values(run: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp(8, 4)
        x = torch.rand(16, 8, requires_grad=True)
        if run is not None:
            count_only(run, 30)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        if run is not None:
            cores.evict_all(run._driver)
        slope.norm().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    wanted = values(None)
    with rekindle.budget("64MiB", learn=False) as run:
        assert same(values(run), wanted)


def chunked_loss(budget: int | None) -> tuple[list[Tensor], int]:
    """Run many small operators, then steps that save 20 MiB and then need 120 MiB at once."""
    torch.manual_seed(0)
    weight = (torch.randn(512, 512) / 23).requires_grad_()
    with rekindle.budget(budget, learn=False) as run:
        x = torch.ones(8)
        for _ in range(5000):
            x = x + 1
        counted = budget is not None and is_counting(run)
        for _ in range(2):
            h = torch.randn(2048, 512)
            for _ in range(4):
                h = torch.tanh(h @ weight)
            scratch = torch.zeros(120, 2**18)
            scratch[:8].add_(1)
            factor = float(scratch.sum())
            del scratch
            (h.sum() * factor).backward()
    assert weight.grad is not None
    assert counted == (budget is not None)
    return [weight.grad], run.peak


def test_step_larger_than_those_before_is_recorded() -> None:
    """What the step saves before it needs much memory can be evicted, so the step fits."""
    wanted, peak = chunked_loss(None)
    assert peak > 140 * MIB
    got, _ = chunked_loss(131 * MIB)
    assert same(got, wanted)


def test_counting_begins_again_after_larger_step() -> None:
    ours = Training()
    with rekindle.budget("64MiB", learn=False) as run:
        for rows in (64,) * 30 + (256,):
            ours.step(rows)
        assert not is_counting(run)
        for _ in range(30):
            ours.step(256)
        assert is_counting(run)


def test_report_names_what_was_saved_while_counting() -> None:
    with rekindle.budget("64MiB", learn=False) as run:
        count_only(run)
        kept = mlp()(torch.rand(512, 32))
        report = str(run.report())
    del kept
    assert "saved for backward" in report
    assert "aten::tanh" in report


def test_smaller_budget_ends_counting() -> None:
    ours = Training()
    with rekindle.budget("64MiB", learn=False) as run:
        for _ in range(40):
            ours.step()
        assert is_counting(run)
        run.budget = 2 * run.peak
        ours.step()
        assert not is_counting(run)


def test_memory_counted_in_mode_is_free_after_step() -> None:
    ours = Training()
    ours.step()
    with rekindle.budget("64MiB", learn=False) as run:
        ours.step()
        count_only(run)
        ours.step()
        before = run._driver.engine.memory
        for _ in range(5):
            ours.step()
        assert run._driver.engine.memory == before


def test_tensor_first_read_while_counting_counts_against_budget() -> None:
    outside = torch.rand(256, 256)
    with rekindle.budget("64MiB", learn=False) as run:
        count_only(run)
        before = run._driver.engine.memory
        outside.sum()
        assert run._driver.engine.memory - before >= outside.nbytes


def test_threads_that_train_while_counting_match_pytorch() -> None:
    def train(into: dict[int, list[Tensor]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(16, 16, generator=generator, requires_grad=True) for _ in range(8)]
        for _ in range(40):
            x = torch.randn(32, 16, generator=generator)
            for weight in weights:
                x = (x @ weight).tanh()
            x.square().mean().backward()
            for weight in weights:
                assert weight.grad is not None
                weight.data.sub_(0.1 * weight.grad)
                weight.grad = None
        into[seed] = weights

    def all_threads() -> dict[int, list[Tensor]]:
        found: dict[int, list[Tensor]] = {}
        threads = [Thread(target=train, args=(found, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    wanted = all_threads()
    with rekindle.budget("64MiB", learn=False) as run:
        got = all_threads()
        assert is_counting(run)
    assert all(same(got[seed], wanted[seed]) for seed in wanted)
