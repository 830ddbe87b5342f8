"""Tests that two ranks agree on a larger budget between steps if one of them needs more memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.distributed.ranks import join, leave

WIDTH, ROWS, STEPS = 32, (16, 512), 6
"""The second rank has more rows, so it evicts with a budget at which the first does not."""


class _Trainer:
    """Training steps of one rank; `collective` adds an all-reduce of gradients, like DDP."""

    def __init__(self, rank: int, *, collective: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
        self.model: nn.Module = nn.Sequential(*layers)
        if collective:
            self.model = DistributedDataParallel(self.model)
        self.batch = torch.randn(ROWS[rank], WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]


def _growing(rank: int) -> dict[str, Any]:
    """Train with budgets that grow, until the second rank no longer recomputes."""
    expected = _Trainer(rank, collective=True)
    with rekindle.budget.unlimited() as run:
        for _ in range(STEPS):
            expected.step()
    (most,) = _from(1, run.peak)
    trainer, budgets, evictions, said = _Trainer(rank, collective=True), [], [], []
    with rekindle.budget(int(0.6 * most), learn="wait") as run:
        for _ in range(STEPS):
            trainer.step()
            before = run.memory, run.evictions
            said.append(
                rekindle.distributed.agree(run, limit=most + rank, overhead=0.0, growth=1.3)
            )
            again = rekindle.distributed.agree(run, limit=most + rank, overhead=0.0, growth=1.3)
            assert again == said[-1]  # a second call after the same step changes nothing
            # the collectives by which ranks agree on a budget are not counted
            assert (run.memory, run.evictions) == before
            budgets.append(run.budget)
            evictions.append(run.evictions)
    return {
        "most": most,
        "budgets": budgets,
        "said": said,
        "evictions": evictions,
        "equal": all(map(torch.equal, trainer.weights, expected.weights)),
    }


def _from(rank: int, number: int) -> tuple[int]:
    """Broadcast `number` from `rank`, and return it on every rank."""
    found = [number]
    dist.broadcast_object_list(found, src=rank)
    return (found[0],)


def _repeated(rank: int) -> dict[str, Any]:
    """Repeat a step on both ranks, because the second rank ran out of budget."""
    trainer, failures = _Trainer(rank, collective=False), 0
    with rekindle.budget(200_000, evict="saved") as run:
        while True:
            failed = None
            try:
                trainer.step()
            except rekindle.OutOfBudget as error:
                failed, failures = error, failures + 1
            budget = rekindle.distributed.agree(run, limit="1MiB", failed=failed)
            (over,) = _from(1, failed is None)
            if over:
                break
    return {"budget": budget, "own": run.budget, "failures": failures}


def _beyond(rank: int) -> str:
    trainer, failed = _Trainer(rank, collective=False), None
    with rekindle.budget(200_000, evict="saved") as run:
        try:
            trainer.step()
        except rekindle.OutOfBudget as error:
            failed = error
        with pytest.raises(rekindle.OutOfBudget) as caught:
            rekindle.distributed.agree(run, limit=201_000 + rank, failed=failed)
        assert run.budget == 200_000
    return str(caught.value)


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, 2, folder)
    found = {
        "growing": _growing(rank),
        "repeated": _repeated(rank),
        "beyond": _beyond(rank),
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    leave()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_ranks_agree_on_larger_budget_if_one_runs_out(tmp_path: Path) -> None:
    mp.start_processes(_work, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))

    light, heavy = one["growing"], other["growing"]
    assert light["equal"]
    assert heavy["equal"]
    assert light["budgets"] == light["said"] == heavy["budgets"] == heavy["said"]
    budgets, most = heavy["budgets"], heavy["most"]
    assert budgets == sorted(budgets)
    # The budget grows up to `most`, the smaller one of the two ranks' limits.
    assert int(0.6 * most) < budgets[0] < budgets[-1] == most
    assert light["evictions"][-1] == 0 < heavy["evictions"][0]
    # the budget suffices: no further evictions
    assert heavy["evictions"][-1] == heavy["evictions"][-2]

    assert one["repeated"]["budget"] == other["repeated"]["budget"]
    assert one["repeated"]["own"] == other["repeated"]["own"] == other["repeated"]["budget"]
    assert one["repeated"]["failures"] == 0 < other["repeated"]["failures"]
    assert 200_000 < other["repeated"]["budget"] <= 2**20

    assert one["beyond"] == other["beyond"]
    assert one["beyond"].startswith("rank 1 needs a budget of")


def test_agree_without_process_group_resizes_only_own_budget() -> None:
    trainer = _Trainer(1, collective=False)
    with rekindle.budget.unlimited() as run:
        trainer.step()
        # The result is the limit itself, because the machine has more memory than 1 GiB.
        assert rekindle.distributed.agree(run, limit="1GiB") == 2**30
    assert run.budget is None
    with rekindle.budget(int(0.6 * run.peak)) as run:
        before = run.budget
        assert rekindle.distributed.agree(run, limit="1GiB") == before  # no step has ended yet
        trainer.step()
        assert rekindle.distributed.agree(run, limit="1GiB", overhead=50.0) == before
        trainer.step()
        assert rekindle.distributed.agree(run, limit="1GiB", overhead=0.0) == run.budget
        assert before is not None
        assert run.budget == int(1.25 * before)
    with pytest.raises(rekindle.InvalidBudget, match=r"agree\(run, limit='much'\): got text"):
        rekindle.distributed.agree(run, limit="much")
    with pytest.raises(rekindle.InvalidArgument, match=r"growth=1\.0"):
        rekindle.distributed.agree(run, limit="1GiB", growth=1.0)
