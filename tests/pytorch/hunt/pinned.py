"""Programs that once went wrong, as the hunt printed them."""

from __future__ import annotations

from typing import NamedTuple

MAIN = ("everything evicted", "tight", "anything, everything evicted", "anything, tight")


class Pinned(NamedTuple):
    source: str
    modes: tuple[str, ...] = MAIN


PINNED = {
    "a mean that stays in the memory of all elements": Pinned("""\
torch.manual_seed(217)
net = nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.02)
with budget():
    for step in range(2):
        x, target = torch.randn(6, 8, 8), torch.randn(6, 8, 8)
        weights = dict(net.named_parameters())
        inner = F.mse_loss(functional_call(net, weights, (x,)), target)
        found = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), found)}
        loss = functional_call(net, weights, (x,)).square().mean()
        loss.backward()
        del weights, found, inner
        optimizer.step()
        optimizer.zero_grad()
        note(loss)
"""),
    "other data for a result that its node saved": Pinned("""\
torch.manual_seed(0)
net = nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.02)
with budget():
    for step in range(3):
        x = net(torch.randn(6, 8, 8)).tanh()
        x.data = x.data * 2
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(loss)
"""),
    "what died a moment ago, when nothing else is left": Pinned("""\
torch.manual_seed(663)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    def forward(self, x):
        x = self.first(x)
        x = OnContext.apply(x)
        try:
            torch.empty(1 << 46)
        except (MemoryError, RuntimeError):
            x = x.sin()
        try:
            x @ torch.ones(3, 3)
        except RuntimeError:
            x = x.tanh()
        return x
net = planned(Net(), torch.zeros(6, 8, 8))
optimizer = torch.optim.SGD(parameters(net), 0.02)
with budget():
    for step in range(1):
        x, target = torch.randn(6, 8, 8), torch.randn(6, 8, 8)
        y = net(x)
        loss = F.smooth_l1_loss(y, target, beta=0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(loss)
        mark()
"""),
    "something died while it was asked who has memory": Pinned("""\
torch.manual_seed(705)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    def forward(self, x):
        x = self.first(x)
        x = (x.as_subclass(Sub) * 2).sin().as_subclass(torch.Tensor)
        return (x + 1).sigmoid_()
net = planned(Net(), torch.zeros(6, 8, 8))
optimizer = torch.optim.SGD(parameters(net), 0.02)
with budget():
    for step in range(1):
        x, target = torch.randn(6, 8, 8), torch.randn(6, 8, 8)
        y = net(x)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(loss)
        mark()
"""),
}
