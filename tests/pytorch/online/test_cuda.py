"""CUDA: what can be checked without a device, and what needs one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.engine import Engine
from rekindle.policies import DTR
from rekindle.pytorch.online._cuda import EventPrices
from rekindle.pytorch.online._driver import Driver
from rekindle.pytorch.operators._operators import operator
from rekindle.pytorch.operators._signature import Invocation, Signature
from tests.pytorch.harsh import WIDTH, vector


class Event:
    """An event of a device that gets to it when it is told."""

    reached = False
    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        Event.clock += 0.25
        self.at = Event.clock

    def query(self) -> bool:
        return Event.reached

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def _signature() -> Signature:
    relu = operator(torch.ops.aten.relu.default)
    # Of its own: those of `signature_of` are shared with all tests that run in this process.
    signature = Signature(relu, Invocation(relu, (torch.ones(3),), {}).key)
    signature.needed = 4_000_000
    return signature


def test_prices_come_from_events_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "reached", False)
    prices, signature = EventPrices(), _signature()
    ran: list[int] = []
    for _ in range(4):
        prices.run(signature, lambda *args: ran.append(1), (), {})
    assert (len(ran), signature.priced) == (4, False)
    assert signature.cost == 1_000 + 4_000  # a guess: 4 MB at 1 TB/s, and the launch
    monkeypatch.setattr(Event, "reached", True)
    prices.run(signature, lambda *args: ran.append(1), (), {})
    assert (len(ran), signature.priced, signature.cost) == (5, True, 250_000)


def test_memory_of_another_device_is_not_counted_and_takes_part_in_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number on the CPU, as PyTorch allows it beside tensors of a device; here: what is small."""
    counted = Driver.counted

    def on_the_device(driver: Driver, home: torch.UntypedStorage) -> int:
        return counted(driver, home) if home.nbytes() > 8 else 0

    monkeypatch.setattr(Driver, "counted", on_the_device)

    torch.manual_seed(0)
    weight, factor = vector(requires_grad=True), torch.tensor(0.5)

    def gradient() -> Tensor:
        x: Tensor = weight
        for _ in range(12):
            x = (x * factor + torch.full((), 0.25)).sin()
        return torch.autograd.grad(x.sum(), [weight])[0]

    wanted = gradient()
    with rekindle.budget(12 * 4 * WIDTH) as run:
        assert torch.equal(gradient(), wanted)
    assert run.recomputations > 0


def test_what_the_allocator_gave_out_elsewhere_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"current": 1000}
    stats = {"allocated_bytes": {"all": figures}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(Driver, "counted", lambda self, home: home.nbytes())
    driver = Driver(Engine(10_000, DTR()), torch.device("cuda"))
    driver.open()
    assert driver.engine.memory == 1000
    before = torch.ones(100)  # it was there before
    driver.known(before)
    assert driver.engine.memory == 1000 == driver.engine.peak
    figures["current"] = 1500  # some kernel took memory of its own
    driver.poll()
    assert driver.engine.memory == 1500


def train_on_device() -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of three steps."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4096, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def train_plainly() -> tuple[list[float], list[torch.Tensor], int]:
    """The same, and a budget of half of what it takes; the allocator's peak starts anew."""
    torch.cuda.init()
    train_on_device()  # cuBLAS takes its workspace
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses, weights = train_on_device()
    budget = base + (torch.cuda.max_memory_allocated() - base) // 2
    torch.cuda.reset_peak_memory_stats()
    return losses, weights, budget


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_the_memory_on_a_device() -> None:
    wanted, weights, budget = train_plainly()
    with rekindle.budget(budget, device="cuda") as run:
        got, same = train_on_device()
    assert run.recomputations > 0
    assert got == wanted
    assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    assert torch.cuda.max_memory_allocated() <= budget
