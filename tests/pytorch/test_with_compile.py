"""Tests of compiled code and higher-order operators within a budget.

Their results are recomputed as a whole, stay in memory, or the budget raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import rekindle
from rekindle import Run
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native._higher import shown_name
from rekindle.pytorch.operators import REGION, _regions, regions_shown
from rekindle.pytorch.operators._regions import Region
from tests.pytorch import cores
from tests.pytorch.cores import evicting_before_every_operator
from tests.pytorch.harsh import WIDTH, deeper, differing, everything, vector

pytestmark = [
    pytest.mark.filterwarnings("default"),  # a warning of the compiler itself
    pytest.mark.usefixtures("workspaces_unknown"),  # operators of other tests may have used more
]

Compile = Callable[[nn.Sequential], Callable[[Tensor], Tensor]]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Reset the compiler: past its limit of compilations PyTorch runs eagerly, with other bits."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64, error_on_recompile=False):
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A block that draws random numbers, updates statistics and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(nn.functional.dropout(self.linear(x), 0.1)))


def whole(backend: str) -> Compile:
    return lambda model: torch.compile(model, backend=backend, fullgraph=True)


def each_block(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*(torch.compile(block) for block in model))


def trained(compiler: Compile, amount: str | None) -> tuple[dict[str, object], Run | None]:
    """Return the results of two steps, each of two forward passes and their backward passes."""
    torch._dynamo.reset()
    torch.manual_seed(20)
    model = nn.Sequential(*(Block() for _ in range(4)))
    compiled = compiler(model)
    losses: list[Tensor] = []
    with nullcontext() if amount is None else rekindle.budget(amount) as run:
        for _ in range(2):
            parts = [compiled(torch.rand(200, 16)).square().mean() for _ in range(2)]
            for part in reversed(parts):
                part.backward()
            losses += [part.detach() for part in parts]
    return everything((losses, model)), run


@contextmanager
def names_of_recomputed() -> Iterator[set[str]]:
    """Collect the names of recomputed operators while the context is open."""
    names: set[str] = set()
    native: list[Any] = []
    cores.tune(native.append)
    yield names
    for driver in native:
        names.update(map(shown_name, driver.core.recomputed_ops(driver.handle)))


def test_operators_compiled_with_backend_eager_are_recomputed() -> None:
    wanted, _ = trained(whole("eager"), None)
    got, run = trained(whole("eager"), "120KiB")
    assert differing(got, wanted) == []
    assert run is not None
    assert run.peak <= 120 * 1024
    assert run.recomputations > 2 * 4 * 2  # more than the number of compiled regions


def test_values_saved_by_aot_eager_backend_are_not_evicted() -> None:
    """The backend's forward pass is an `autograd.Function`, which is not recomputed."""
    wanted, _ = trained(whole("aot_eager"), None)
    got, run = trained(whole("aot_eager"), "1MiB")
    assert differing(got, wanted) == []
    assert run is not None
    assert run.recomputations == 0
    with pytest.raises(rekindle.OutOfBudget):
        trained(whole("aot_eager"), f"{run.peak // 2}B")


@pytest.mark.slow
def test_inductor_region_is_recomputed_as_one_operator() -> None:
    wanted, _ = trained(each_block, None)
    _, roomy = trained(each_block, "1MiB")
    assert roomy is not None
    assert roomy.recomputations == 0
    half = roomy.peak // 2
    with names_of_recomputed() as again:
        got, run = trained(each_block, f"{half}B")
    assert differing(got, wanted) == []
    assert run is not None
    assert run.peak <= half
    assert {REGION} <= again <= {REGION, "aten::pow", "aten::rand"}


@pytest.mark.slow
def test_values_that_compiled_region_saves_count_in_budget() -> None:
    """A region saves at least one activation for each block, which cannot be evicted."""
    wanted, _ = trained(whole("inductor"), None)
    got, run = trained(whole("inductor"), "1MiB")
    assert differing(got, wanted) == []
    assert run is not None
    activation = 200 * 16 * 4
    assert run.peak > 2 * 4 * activation
    with pytest.raises(rekindle.OutOfBudget, match=REGION) as raised:
        trained(whole("inductor"), f"{4 * activation}B")
    assert raised.value.needed >= 4 * activation


def test_compiled_region_in_older_torch_is_not_one_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `InductorCompiledCallable`, as in torch 2.10, PyTorch cannot wrap a region."""
    from torch._higher_order_ops import wrap as module
    from torch._inductor import config

    before = config.wrap_inductor_compiled_regions
    with regions_shown():
        assert config.wrap_inductor_compiled_regions
    monkeypatch.delattr(module, "InductorCompiledCallable")
    with regions_shown():
        assert config.wrap_inductor_compiled_regions == before


@pytest.mark.slow
def test_workspace_of_compiled_region_counts_in_budget() -> None:
    """The scores of the attention exist only while the region runs."""
    module: Any = native_core()
    if module is None or not module.count_allocations():
        pytest.skip("nobody counts")
    attend = torch.compile(lambda x: (x @ x.t()).softmax(-1) @ x)
    scores, result = 4 * 1024 * 1024, 4 * 1024 * 64
    # the workspace of other compiled code is still unknown
    torch._dynamo.config.error_on_recompile = True
    with torch.no_grad(), rekindle.budget.unlimited(record=True) as run:
        for _ in range(3):
            attend(torch.ones(1024, 64))
    trace = run.trace
    inside = [op.workspace for op in trace.ops if op.name == REGION]
    assert len(inside) == 3
    assert all(each >= scores for each in inside[1:])
    assert run.peak >= scores + result
    x = torch.ones(1024, 64)
    with torch.no_grad(), pytest.raises(rekindle.OutOfBudget), rekindle.budget(scores):
        attend(x)


@pytest.mark.slow
def test_results_of_code_compiled_before_budget_are_not_evicted() -> None:
    """Rekindle does not see such code. Its results count once an operator reads them."""
    torch._dynamo.reset()
    weight = vector(True)
    compiled = torch.compile(lambda x: (x.sin() * x).exp())
    wanted = torch.autograd.grad(compiled(weight).sum(), weight)
    with rekindle.budget("1MiB") as run:
        loss = compiled(weight).sum()
        assert run.memory >= 2 * weight.nbytes
        got = torch.autograd.grad(loss, weight)
    assert torch.equal(got[0], wanted[0])
    assert run.recomputations == 0


@pytest.mark.slow
def test_compiled_region_that_writes_arguments_matches_pytorch() -> None:
    """Values that are recomputed from old contents of the arguments stay right (R4, sources)."""

    def step() -> object:
        torch._dynamo.reset()
        torch.manual_seed(20)
        weight, table = vector(True), vector()

        @torch.compile
        def look_up(x: Tensor) -> Tensor:
            result = x * table.sum()
            table.mul_(1.5)
            return result

        x = weight
        for _ in range(4):
            x = look_up((x * table.clone()).sin())
        x.sum().backward()
        return x, weight, table

    wanted = everything(step())
    assert differing(everything(step()), wanted) == []
    with evicting_before_every_operator(), rekindle.budget("1MiB") as run:
        got = everything(step())
    assert differing(got, wanted) == []
    assert run.recomputations > 0


@pytest.mark.slow
def test_compiled_region_with_topk_is_not_recomputed() -> None:
    torch._dynamo.reset()

    @torch.compile
    def routed(x: Tensor) -> Tensor:
        values, _ = x.topk(WIDTH // 2)
        return values.exp()

    weight = vector(True)
    wanted = torch.autograd.grad(routed(weight.exp()).sum(), weight)
    torch._dynamo.reset()
    with names_of_recomputed() as again, evicting_before_every_operator(), rekindle.budget("1MiB"):
        got = torch.autograd.grad(routed(weight.exp()).sum(), weight)
    assert torch.equal(got[0], wanted[0])
    assert again == {"aten::exp"}


@pytest.mark.slow
@pytest.mark.parametrize("drifts", [False, True])
def test_compiled_region_with_atomics_is_recomputed_after_trial(
    monkeypatch: pytest.MonkeyPatch, drifts: bool
) -> None:
    """The region is recomputed only if a trial run gives equal bits."""
    graph = fx.Graph()
    x, index = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    add = torch.ops.aten.index_add.default
    graph.output((graph.call_function(add, (x, 0, index, x)),))
    region = Region(lambda arguments: arguments, fx.GraphModule({}, graph))
    assert region.may_differ([torch.ones(1, device="meta")])
    assert not region.may_differ([torch.ones(1)])
    torch._dynamo.reset()
    monkeypatch.setattr(Region, "may_differ", lambda *_: True)
    runs, run = count(), Region.func
    monkeypatch.setattr(
        Region,
        "func",
        lambda *args: tuple(each + drifts * next(runs) for each in run(*args)),
    )
    weight = vector(True)
    with names_of_recomputed() as again, evicting_before_every_operator(), rekindle.budget("1MiB"):
        torch.compile(lambda x: x.sin().exp())(weight.exp()).sum().backward()
    assert again == ({"aten::exp"} if drifts else {"aten::exp", REGION})


def test_flex_attention_forward_in_budget_matches_pytorch() -> None:
    """The test runs only the forward pass, because PyTorch has no gradient of it on a CPU."""
    heads = torch.rand(1, 2, 32, 16)
    wanted = flex_attention(heads, heads, heads)
    with rekindle.budget("1MiB"):
        assert torch.equal(flex_attention(heads, heads, heads), wanted)


@pytest.mark.slow
def test_region_with_unknown_higher_order_op_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rekindle cannot see whether the operator writes to arguments of the region."""
    monkeypatch.setattr(_regions, "FUNCTIONAL", set())

    @torch.compile(fullgraph=True)
    def branched(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() * y, lambda y: y.cos() * y, (x.exp(),))

    def step() -> tuple[Tensor, ...]:
        before = weight.sin()
        loss = (branched(before) * before.cos()).sum()
        return loss, *torch.autograd.grad(loss, weight)

    weight = vector(True)
    wanted = step()
    torch._dynamo.reset()
    with names_of_recomputed() as again, evicting_before_every_operator(), rekindle.budget("1MiB"):
        got = step()
    assert all(map(torch.equal, got, wanted))
    assert REGION not in again


def test_operators_of_stance_force_eager_are_recomputed() -> None:
    torch._dynamo.reset()
    weight = vector(True)
    with names_of_recomputed() as again, evicting_before_every_operator(), rekindle.budget("1MiB"):
        with torch.compiler.set_stance("force_eager"):
            loss = torch.compile(deeper)(weight).sum()
        loss.backward()
    assert again >= {"aten::sin", "aten::mul", "aten::exp"}


@pytest.mark.slow
def test_scan_operator_inside_budget_matches_pytorch() -> None:
    """The results of `scan` count only after it has run, so they may exceed the budget."""

    def results(budget: str | None) -> tuple[dict[str, object], int]:
        torch.manual_seed(20)
        weight = torch.rand(10, 300, requires_grad=True)
        other = vector(True)

        def step() -> Tensor:
            x = weight
            for _ in range(2):
                _, x = scan(lambda c, x: (c * 0.5 + x, c * x.sin()), torch.zeros(300), x)
            return x.sum() + deeper(other, 10).sum()

        if budget is None:
            loss = step()
            loss.backward()
            return everything((loss, weight, other)), 0
        with rekindle.budget(budget) as run:
            loss = step()
            loss.backward()
        return everything((loss, weight, other)), run.recomputations

    wanted, _ = results(None)
    got, recomputations = results("220KB")
    assert differing(got, wanted) == []
    assert recomputations > 0


def test_while_loop_without_gradient_matches_pytorch() -> None:
    with rekindle.budget("1MiB"), torch.no_grad():
        count, x = while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), torch.ones(4))
        )
    assert (count.item(), x.tolist()) == (3, [8.0] * 4)


def test_torch_cond_inside_budget_matches_pytorch() -> None:
    weight = vector(True)

    def branched(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() * y, lambda y: y.cos() * y, (x,))

    wanted = torch.autograd.grad(branched(weight).sum(), weight)
    with rekindle.budget("1MiB"):
        got = torch.autograd.grad(branched(weight).sum(), weight)
        assert torch.equal(branched(weight.detach()), weight.sin() * weight)
    assert torch.equal(got[0], wanted[0])


@pytest.mark.slow
def test_code_compiled_inside_budget_uses_no_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no CUDA graphs, so a replacement only records the requests."""
    from torch._inductor import config, cudagraph_utils, output_code

    asked: list[str] = []

    def capturing(
        inputs: Any, compiled: Any, cudagraphs: Any, constants: Any, forward: Any
    ) -> None:
        asked.append("backward" if compiled.fx_kwargs["is_backward"] else "forward")

    for name in _regions._CAPTURING:
        monkeypatch.setattr(output_code, name, capturing)
    monkeypatch.setattr(cudagraph_utils, "check_lowering_disable_cudagraph", lambda *_: None)
    # large, so that generator states hardly matter
    weight = torch.rand(100 * WIDTH).requires_grad_()

    def gradient() -> Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x.sin().exp().sum(), mode="reduce-overhead")
        x = weight
        for _ in range(4):
            x = x.sin()
        return torch.autograd.grad(compiled(x), [weight])[0]

    with config.patch(force_disable_caches=True):
        wanted = gradient()
        assert asked == ["forward", "backward"]
        with rekindle.budget("16MiB") as run:
            assert torch.equal(gradient(), wanted)
            run.budget = run.memory + 5 * weight.nbytes
            assert torch.equal(gradient(), wanted)
        assert asked == ["forward", "backward"]
        assert run.recomputations > 0
        gradient()
        assert asked == ["forward", "backward"] * 2


@pytest.mark.parametrize("ahead", [False, True], ids=["inside", "before"])
def test_dynamo_traces_no_callback_of_the_core(ahead: bool) -> None:
    def compile_and_train() -> None:
        for layer in model:
            layer.compile(backend="eager")
        model(x).square().mean().backward()

    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), torch.randn(8, 16)
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    if ahead:
        compile_and_train()
    with rekindle.budget("1MiB"):
        compile_and_train()
    assert not [why for why in breaks if "rekindle" in why]
