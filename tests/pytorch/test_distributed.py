"""Tests of budgets under `DistributedDataParallel` and `fully_shard`, on gloo.

All programs that need the same number of ranks run in one group of processes. Each rank compares
losses and weights after two steps bit for bit with a run without a budget. It also compares the
number of collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

import rekindle
from tests.distributed.ranks import join, leave
from tests.pytorch.harsh import Watch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
WIDTH = 32
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Network(nn.Module):
    """Six layers. With `sometimes`, another layer is used in every other step."""

    def __init__(self, *, sometimes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(WIDTH), nn.Tanh()
            )
            for _ in range(6)
        )
        if sometimes:
            self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if number % 2 and hasattr(self, "sometimes"):
            x = self.sometimes(x)
        return x


def _ddp(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: DDP(Network(sometimes="find_unused_parameters" in settings), **settings)


def _fsdp(reshard: bool | int, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        network = Network()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in network.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **settings)
        return fully_shard(network, mesh=mesh, reshard_after_forward=reshard, **settings)

    return build


def _nested_fsdp() -> nn.Module:
    """Return nested units with FSDP's default settings; every other one has a checkpoint."""
    network = Network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, layer in enumerate(network.layers):
        fully_shard(layer[0], mesh=mesh)
        fully_shard(layer, mesh=mesh)
        if number % 2:
            network.layers[number] = checkpoint_wrapper(layer)
    return fully_shard(network, mesh=mesh)


class Reduce(torch.autograd.Function):
    """The sum over all ranks, in place, as after a row-parallel layer of Megatron."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class RowParallel(Network):
    """A row-parallel layer: each rank has a part of the weight, and the results are added up."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        for layer in self.layers:
            x = Reduce.apply(layer(x) / 2).sin()
        return x


def _tensor_parallel() -> nn.Module:
    return _cut(Network(), init_device_mesh("cpu", (dist.get_world_size(),)))


def _cut(network: Network, mesh: DeviceMesh) -> Network:
    """Split each pair of linear layers over the ranks: the first by columns, the second by rows."""
    for number, layer in enumerate(network.layers):
        layer.append(nn.Linear(WIDTH, WIDTH))
        ways = {"0": ColwiseParallel(use_local_output=True), "5": RowwiseParallel()}
        layer[3] = nn.Identity()  # no LayerNorm: a rank has only a part of the WIDTH outputs
        layer[2] = nn.Dropout(0.1 * (number % 2))
        parallelize_module(layer, mesh, ways)
    return network


def _two_by_two(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def _hybrid() -> nn.Module:
    """Return a model sharded over two ranks and replicated twice."""
    network, mesh = Network(), _two_by_two("copies", "shards")
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(network, mesh=mesh, reshard_after_forward=False)


def _ddp_of_tensor_parallel() -> nn.Module:
    mesh = _two_by_two("data", "tensor")
    network = _cut(Network(), mesh["tensor"])
    _pre_dp_module_transform(network)  # like torch's own example of two-dimensional parallelism
    return DDP(network, device_mesh=mesh["data"])


def _fsdp_of_tensor_parallel() -> nn.Module:
    mesh = _two_by_two("data", "tensor")
    network = _cut(Network(), mesh["tensor"])
    for layer in network.layers:
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
    return fully_shard(network, mesh=mesh["data"], reshard_after_forward=False)


class ContextParallel(Network):
    """Attention in which each rank has a part of the sequence, and gathers all keys and values.

    Like torch's `context_parallel`, which rotates by all-gather but has no attention on CPUs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in self.layers)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for layer, projection in zip(self.layers, self.projections, strict=True):
            query, mine = projection(x).split([WIDTH, 2 * WIDTH], dim=-1)
            gathered = all_gather_tensor_autograd(mine.contiguous(), 0, dist.group.WORLD)
            key, value = gathered[None].chunk(2, dim=-1)
            x = layer(x + functional.scaled_dot_product_attention(query[None], key, value)[0])
        return x


class Pipelined(nn.Module):
    """The layers of this rank in a pipeline, through which a schedule sends micro-batches."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        part = len(Network().layers) // ranks
        self.layers = nn.Sequential(*Network().layers[rank * part : (rank + 1) * part])
        stage = PipelineStage(self.layers, rank, ranks, torch.device("cpu"))
        loss = lambda x, _: x.square().mean()  # noqa: E731
        self.schedule = kind(stage, n_microbatches=4, loss_fn=loss)

    def step(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(x)
            return torch.zeros(())
        if dist.get_rank() < dist.get_world_size() - 1:
            self.schedule.step()
            return torch.zeros(())
        self.schedule.step(target=x, losses=losses)
        return torch.stack(losses).sum().detach()


SCENARIOS: dict[str, tuple[Callable[[], nn.Module], float]] = {  # model, part of activation memory
    "ddp": (_ddp(), 0.5),
    "ddp, bucket views": (_ddp(gradient_as_bucket_view=True), 0.5),
    "ddp, static graph": (_ddp(static_graph=True), 0.5),
    "ddp, unused parameters": (_ddp(find_unused_parameters=True), 0.5),
    "ddp, no_sync": (_ddp(), 0.5),
    "ddp, a budget for one rank": (_ddp(), 0.5),
    "activations reduced in place": (RowParallel, 0.7),
    "fsdp2, parameters stay": (_fsdp(False), 0.5),
    "fsdp2, parameters go": (_fsdp(True), 0.4),
    "fsdp2, parameters go, mixed precision": (_fsdp(True, mp_policy=HALF), 0.5),
    "fsdp2, parameters go, no_sync": (_fsdp(True), 0.5),
    "fsdp2, parameters go, nested": (_nested_fsdp, 0.8),
    "fsdp2, parameters go in part": (_fsdp(2), 0.5),
    "tensor parallel": (_tensor_parallel, 0.9),
    "pipeline, all forward first": (lambda: Pipelined(ScheduleGPipe), 0.6),
    "pipeline, one forward one backward": (lambda: Pipelined(Schedule1F1B), 0.9),
    "hybrid: fsdp2, and that twice": (_hybrid, 0.5),
    "context parallel": (ContextParallel, 0.75),  # gathered values stay: 0.72
    "ddp of tensor parallel": (_ddp_of_tensor_parallel, 0.9),
    "fsdp2 of tensor parallel": (_fsdp_of_tensor_parallel, 0.9),
}
ON_FOUR_ALONE = (
    "context parallel",
    "fsdp2, parameters go in part",
    "hybrid: fsdp2, and that twice",
    "ddp of tensor parallel",
    "fsdp2 of tensor parallel",
)
ON_TWO = [name for name in SCENARIOS if name not in ON_FOUR_ALONE]
ON_FOUR = [
    "ddp",
    "fsdp2, parameters stay",
    "fsdp2, parameters go",
    "tensor parallel",
    "pipeline, one forward one backward",
    *ON_FOUR_ALONE,
]


@dataclass
class Trained:
    """The results of two steps on one rank."""

    losses: list[float]
    weights: list[Tensor]
    collectives: Counter[str]
    tracked: Watch
    recomputations: int = 0


@contextmanager
def no_sync(network: Any) -> Iterator[None]:
    """Accumulate gradients without reducing them, while the context is open."""
    if isinstance(network, DDP):
        with network.no_sync():
            yield
        return
    network.set_requires_gradient_sync(False)
    network.set_reshard_after_backward(False)
    yield
    network.set_requires_gradient_sync(True)
    network.set_reshard_after_backward(True)


def train(name: str, budget: int | None) -> Trained:
    network = SCENARIOS[name][0]()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    within = nullcontext() if budget is None else rekindle.budget(budget)
    with Watch(resized=name.startswith("fsdp")) as watch, within as run:
        for number in range(2):
            optimizer.zero_grad()
            for last in (False, True) if name.endswith("no_sync") else (True,):
                with nullcontext() if last else no_sync(network):
                    x = torch.randn(64, WIDTH)
                    if isinstance(network, Pipelined):
                        loss = network.step(x)
                        continue
                    loss = network(x, number).square().mean()
                    loss.backward()
            losses.append(loss.item())
            del loss
            optimizer.step()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in network.parameters()]
    talk = ("c10d::", "_c10d_functional::", "fsdp::")
    waiting = "_c10d_functional::wait_tensor"  # not compared: it is called until a collective ends
    collectives = Counter(
        {k: n for k, n in watch.operators.items() if k.startswith(talk) and k != waiting}
    )
    return Trained(
        losses,
        [weight.detach().clone() for weight in weights],
        collectives,
        watch,
        run.recomputations if run else 0,
    )


def judged(name: str) -> dict[str, Any]:
    """Return the findings of one rank."""
    plain = train(name, None)
    low, high = plain.tracked.alive, plain.tracked.peak
    budget: int | None = int(low + SCENARIOS[name][1] * (high - low))
    if name.endswith("one rank") and dist.get_rank():
        budget = None
    got = train(name, budget)
    return {
        "the same": got.losses == plain.losses
        and all(torch.equal(a, b) for a, b in zip(got.weights, plain.weights, strict=True)),
        "collectives": (dict(got.collectives), dict(plain.collectives)),
        "peak": (got.tracked.peak, budget),
        "recomputations": got.recomputations,
    }


def work(rank: int, ranks: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    join(rank, ranks, folder)
    found = {}
    for name in names:
        try:
            found[name] = judged(name)
        except Exception as error:  # the other ranks wait for this one, until they time out
            found[name] = {"error": repr(error)}
            break
    torch.save(found, Path(folder) / f"{rank}.pt")
    leave()


def _found(ranks: int, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    arguments = (ranks, str(folder), names)
    mp.start_processes(work, args=arguments, nprocs=ranks, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _found(2, tmp_path_factory.mktemp("two"), ON_TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _found(4, tmp_path_factory.mktemp("four"), ON_FOUR)


def check(name: str, by_rank: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(by_rank):
        assert "error" not in found[name], found[name]
        assert found[name]["the same"]
        got, plain = found[name]["collectives"]
        assert got == plain, "collectives were replayed, or left out"
        assert sum(plain.values()) > 0
        peak, budget = found[name]["peak"]
        if name.startswith(("ddp", "fsdp2, parameters")) and budget is not None:
            assert peak <= budget
        limited = not (name.endswith("one rank") and rank)
        assert (found[name]["recomputations"] > 0) == limited


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_with_own_budgets_match_pytorch(name: str, two: list[dict[str, Any]]) -> None:
    check(name, two)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_with_own_budgets_match_pytorch(name: str, four: list[dict[str, Any]]) -> None:
    check(name, four)
