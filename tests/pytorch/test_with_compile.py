"""torch.compile and higher-order operators inside a budget: run eagerly, kept whole, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import rekindle
from rekindle.pytorch import _operators
from tests.pytorch.harsh import deeper, differing, everything, harshest, vector

pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own

Step = Callable[[], object]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(20)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_a_compiled_model_runs_eagerly() -> None:
    """A budget recomputes operators, which a compiled program does not have."""

    def program() -> Step:
        model = Layers()
        compiled = torch.compile(model, backend="aot_eager")
        batch = torch.rand(200, 16)

        def step() -> object:
            loss = compiled(batch)
            loss.backward()
            return loss, model

        return step

    assert harshest(program).again["addmm"] > 0


def test_a_model_that_is_compiled_already() -> None:
    """Compiled outside, eager inside, compiled again outside: gradients as without a budget."""
    batch = torch.rand(200, 16)

    def results(around: Callable[[Step], object]) -> dict[str, object]:
        torch.manual_seed(20)
        model = Layers()
        compiled = torch.compile(model, backend="aot_eager")
        torch.manual_seed(3)
        losses = []
        for number in range(3):
            if number == 1:
                around(lambda: losses.append(_trained(compiled, batch)))
            else:
                losses.append(_trained(compiled, batch))
        return everything((losses, model))

    def within(step: Step) -> None:
        with rekindle.budget("100KiB") as run:
            step()
        assert run.recomputations > 0

    assert differing(results(within), results(lambda step: step())) == []


def _trained(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    loss = model(batch)
    loss.backward()
    return loss.detach()


def test_a_whole_graph_is_refused() -> None:
    compiled = torch.compile(Layers(), backend="aot_eager", fullgraph=True)
    with (
        pytest.raises(rekindle.Unsupported, match=r"torch\.compile without fullgraph"),
        rekindle.budget("1MiB"),
    ):
        compiled(torch.rand(200, 16))


def test_flex_attention_is_refused() -> None:
    heads = torch.rand(1, 2, 32, 16)
    with (
        pytest.raises(rekindle.Unsupported, match="scaled_dot_product_attention"),
        rekindle.budget("1MiB"),
    ):
        flex_attention(heads, heads, heads)


@pytest.mark.slow
def test_a_scan_is_kept_whole() -> None:
    """Gradients are right; what it makes counts from when it is there, so the cap may be missed."""

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


def test_a_loop_without_a_gradient() -> None:
    with rekindle.budget("1MiB"), torch.no_grad():
        count, x = while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), torch.ones(4))
        )
    assert (count.item(), x.tolist()) == (3, [8.0] * 4)


def test_a_branch_with_a_gradient_is_refused_one_without_runs() -> None:
    weight = vector(True)

    def branched(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() * y, lambda y: y.cos() * y, (x,))

    plain = weight.detach()
    with rekindle.budget("1MiB"):
        assert torch.equal(branched(plain), plain.sin() * plain)
    with pytest.raises(rekindle.Unsupported, match="Python `if`"), rekindle.budget("1MiB"):
        branched(weight)


def test_what_may_write_its_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is not known to write nothing; here while_loop, as if it were not."""
    monkeypatch.setattr(_operators, "FUNCTIONAL", set())
    refused = pytest.raises(rekindle.Unsupported, match="higher-order operator while_loop")
    with refused, rekindle.budget("1MiB"), torch.no_grad():
        while_loop(lambda i: i < 3, lambda i: (i + 1,), (torch.tensor(0),))
