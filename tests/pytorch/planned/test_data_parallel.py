"""Tests of planned models under `DistributedDataParallel`, on two gloo ranks.

Each rank makes its own plan, from times that it measured itself. The gradients equal those of the
model without a plan.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.planners import KeepAll, RecomputeAll
from tests.distributed.ranks import join, leave
from tests.pytorch.bits import differing
from tests.pytorch.planned.test_compiled import Net, batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]
Plan = Callable[[nn.Module], nn.Module]


def _ample(compiled: bool) -> Plan:
    return lambda model: rekindle.plan(
        model, (batch(),), budget="1GB", planner=KeepAll(), compile=compiled
    ).apply()


def _tight(compiled: bool) -> Plan:
    def apply(model: nn.Module) -> nn.Module:
        refused = rekindle.plan(model, (batch(),), budget=1, planner=RecomputeAll(),
                                compile=compiled)  # fmt: skip
        budget = refused.smallest_budget
        plan = rekindle.plan(model, (batch(),), budget=budget, planner=RecomputeAll(),
                             compile=compiled)  # fmt: skip
        assert plan.overhead
        return plan.apply()

    return apply


WAYS: dict[str, Plan] = {
    "plain": lambda model: model,
    "planned": _tight(False),
    "compiled": _ample(True),
    "compiled, tight": _tight(True),
}


def _trained(planned: Plan) -> dict[str, Tensor]:
    """Return gradients and weights after two steps on this rank."""
    torch.manual_seed(20)
    model = Net(dropout=0.0)
    runs = DistributedDataParallel(planned(model), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(2):
        optimizer.zero_grad()
        runs(batch(2 * number + dist.get_rank())).square().mean().backward()
        optimizer.step()
    found = {name: each.detach().clone() for name, each in model.named_parameters()}
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return found | {f"{name}.grad": each for name, each in gradients.items() if each is not None}


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        TORCHINDUCTOR_CACHE_DIR=f"{folder}/kernels-{rank}",
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )
    join(rank, 2, folder, timedelta(minutes=10))
    found = {name: _trained(planned) for name, planned in WAYS.items()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_work, args=(str(folder),), nprocs=2, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_planned_ddp_model_sums_gradients_over_ranks(ranks: list[dict[str, Any]]) -> None:
    for way in WAYS:
        assert differing(ranks[0][way], ranks[1][way]) == [], way


def test_planned_ddp_model_matches_pytorch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert differing(rank["planned"], rank["plain"]) == []


def test_compiled_ddp_plan_has_same_bits_at_every_budget(ranks: list[dict[str, Any]]) -> None:
    """The results also equal those of the model within `torch.testing`'s tolerance."""
    for rank in ranks:
        assert differing(rank["compiled, tight"], rank["compiled"]) == []
        for name, value in rank["plain"].items():
            torch.testing.assert_close(rank["compiled"][name], value, msg=name)
