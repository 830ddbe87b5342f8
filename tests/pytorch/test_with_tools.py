"""Tests of tools around training: profilers, anomaly mode, hooks, data loaders, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rekindle
from rekindle import budget
from rekindle.pytorch.native import is_seen
from tests.pytorch.cores import evicting_before_every_operator
from tests.pytorch.harsh import differing, everything, harshest

Step = Callable[[], object]


def network() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


TOOLS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic mode": deterministic,
    "record_function": lambda: torch.profiler.record_function("step"),
    "profiler": lambda: torch.profiler.profile(record_shapes=True, profile_memory=True),
    "autograd profiler": lambda: torch.autograd.profiler.profile(),
    "save on cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "sdpa kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}
# this tool has saved-tensor hooks of its own, which replace the budget's: nothing is evicted
KEEPS = {"save on cpu"}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", [name for name in TOOLS if name not in KEEPS])
def test_tool_inside_or_around_budget_matches_pytorch(name: str, inside: bool) -> None:
    """The tool is a context, such as a profiler, around both passes or around the whole budget."""
    tool = TOOLS[name]

    def program() -> Step:
        model, batch = network(), torch.rand(200, 16)

        def train() -> Tensor:
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        def step() -> object:
            if inside:
                with tool():
                    loss = train()
            else:
                loss = train()
            return loss, model

        return step

    if inside:
        harshest(program)
    else:
        with tool():
            harshest(program)


def test_torch_profiler_inside_budget_sees_plain_operators() -> None:
    """Rekindle predicts result sizes by calls on the meta device, which must not be visible."""

    def seen() -> list[str]:
        with torch.profiler.profile() as profile:
            x = torch.randn(7, 3, requires_grad=True)
            (x.sin() + x).sum(dim=None).backward()
        events: Any = profile.events()
        names = [event.name for event in events]
        return sorted(name for name in names if name.endswith(("::sin", "::add", "::sum")))

    with budget(None):
        inside = seen()
    assert inside == seen()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
def test_profiler_with_record_shapes_in_budget_matches_pytorch(
    evict: Literal["saved", "auto", "anything"], inside: bool
) -> None:
    """The profiler reads the address of each operand, also in lists, before the operator runs."""
    weight = torch.ones(10, 30, requires_grad=True)

    def profiled(*around: AbstractContextManager[Any]) -> set[tuple[str, str]]:
        profile = torch.profiler.profile(record_shapes=True, profile_memory=True)
        with ExitStack() as stack:
            for context in (*around, profile) if inside else (profile, *around):
                stack.enter_context(context)
            x, y = weight * 2, weight * 3
            z = torch.cat([x, y])
            torch.cat([z, x, z.view(20, 30).sin()]).sum().backward()
        events: Any = profile.events()
        names = ("aten::mul", "aten::cat", "aten::sin", "aten::cos")
        return {(each.name, str(each.input_shapes)) for each in events if each.name in names}

    wanted = profiled()
    assert len(wanted) >= 5
    limited = budget("1GiB", evict=evict)
    assert profiled(evicting_before_every_operator(), limited) == wanted


def test_kernel_in_profiler_that_reads_evicted_tensor_raises() -> None:
    """The profiler itself may read the address of an evicted tensor; other kernels raise."""
    with evicting_before_every_operator(), budget("1GiB", evict="anything"):
        with torch.profiler.profile(record_shapes=True):
            x = torch.ones(100, requires_grad=True) * 2
            y = torch.cat([x, x]) * 3
            torch.ones(1)  # Rekindle evicts all other tensors before this operator
            for evicted in (x, y):
                with pytest.raises(RuntimeError, match="was evicted"):
                    torch._C.TensorBase.data_ptr(evicted)
        assert (x.sum() + y.sum()).item() == 200 + 1200


def test_tensors_of_save_on_cpu_are_evicted_only_by_evict_auto() -> None:
    """Tensors that `save_on_cpu` holds are user-held tensors."""

    def trained(budget: str, **how: Any) -> dict[str, Any]:
        torch.manual_seed(20)
        model, batch = network(), torch.rand(200, 16)
        with rekindle.budget(budget, **how):
            with TOOLS["save on cpu"]():
                loss = model(batch).square().mean()
            loss.backward()
        return everything((loss, model))

    wanted = trained("1GiB")
    with pytest.raises(rekindle.OutOfBudget):
        trained("100KiB", evict="saved")
    assert differing(trained("100KiB"), wanted) == []


class Inside(Dataset[Tensor]):
    """A dataset whose items say if they were made inside a budget."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        tight = torch.rand(1_000, requires_grad=True).sin().sum()
        tight.backward()
        return torch.tensor([budget._active is not None, is_seen()])


# a warning on machines with few cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_workers_are_outside_of_budget(workers: int) -> None:
    """A regression test: a forked worker had a copy of the budget and was refused memory."""
    loader = DataLoader(Inside(), num_workers=workers)
    with rekindle.budget("20KB"):
        inside = torch.cat(list(loader))
        assert budget._active is not None
        assert is_seen()
    assert inside.all() if workers == 0 else not inside.any()


# a warning on machines with few cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_data_loader_workers_match_pytorch(workers: int) -> None:
    """Batches of worker processes are in shared memory."""

    def program() -> Step:
        model = network()
        data = TensorDataset(torch.rand(600, 16))

        def step() -> object:
            loader = DataLoader(data, batch_size=200, num_workers=workers)
            losses = []
            for (batch,) in loader:
                loss = model(batch).square().mean()
                loss.backward()
                losses.append(loss.detach())
            return losses, model

        return step

    harshest(program)


def test_forward_hooks_on_activations_match_pytorch() -> None:
    """The hooks replace, measure and keep the results of layers."""

    def program() -> Step:
        model, batch = network(), torch.rand(200, 16)
        means: list[float] = []
        kept: dict[str, Tensor] = {}
        model[1].register_forward_hook(lambda *args: args[-1] * 1.5)
        model[2].register_forward_pre_hook(lambda _, args: (args[0] + 0.25,))
        model[3].register_forward_hook(lambda *args: means.append(args[-1].mean().item()))
        model[4].register_forward_hook(lambda *args: kept.update(last=args[-1].detach()))
        model[5].register_full_backward_hook(lambda _, given, __: (given[0] * 2,))

        def step() -> object:
            loss = model(batch).square().mean()
            loss.backward()
            return loss, model, means, kept

        return step

    harshest(program)


SEGMENTS: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "each layer": lambda model, x: _each(model, x, use_reentrant=False),
    "each layer, keeping generators": lambda model, x: _each(
        model, x, use_reentrant=False, preserve_rng_state=True
    ),
    "in two": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "nested": lambda model, x: checkpoint(
        lambda x: _each(model[3:], _each(model[:3], x, use_reentrant=False), use_reentrant=False),
        x,
        use_reentrant=False,
    ),
    "every other": lambda model, x: _each(model[1:5:2], model[::2](x), use_reentrant=False),
}


def _each(model: Any, x: Tensor, **how: Any) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x, **how)
    return x


@pytest.mark.parametrize("name", SEGMENTS)
def test_torch_checkpoint_inside_budget_matches_pytorch(name: str) -> None:
    """The budget evicts values outside of the checkpointed block, and values that it recomputes."""
    segment = SEGMENTS[name]

    def program() -> Step:
        model, batch = network(), torch.rand(200, 16)

        def step() -> object:
            x = model(batch)
            loss = segment(model, x).square().mean()
            del x
            loss.backward()
            return loss, model

        return step

    harshest(program)
