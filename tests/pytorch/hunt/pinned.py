"""List programs that once failed, as the random search (`hunt`) printed their source.

They are regression tests: each must pass.
"""

from __future__ import annotations

from typing import NamedTuple

MAIN = ("everything evicted", "tight", "anything, everything evicted", "anything, tight")


class Pinned(NamedTuple):
    lines: str
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
    "from one lesson to another amid a step": Pinned(
        """\
torch.manual_seed(669)
rng = np.random.default_rng(669)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.threaded_0 = nn.Linear(8, 8)
        self.dropout1d_1 = nn.Dropout1d(0.3)
        self.batch_norm_2 = nn.BatchNorm1d(8)
        self.transposed_5 = nn.ConvTranspose1d(8, 8, 3, padding=1)
    def forward(self, x):
        x = self.first(x)
        a = in_thread(lambda: x.detach().exp().mean().item())
        x = self.threaded_0(x) / (1 + a)
        x = self.dropout1d_1(x)
        x = self.batch_norm_2(x.mT).mT
        with torch.no_grad():
            a = x.softmax(-1).cumsum(-1)
        x = x * a
        x = torch.tensordot(x, torch.outer(x[0, 0], x[0, 1]).tanh(), 1) / 8
        x = self.transposed_5(x.mT).mT
        x = x[torch.randperm(x.shape[0])] + x[:, torch.arange(x.shape[1]).flip(0)]
        return x
net = planned(Net(), torch.zeros(6, 8, 8))
optimizer = torch.optim.Adagrad(parameters(net), 0.02)
middle, out = nn.Linear(8, 8), nn.Linear(4, 8)
side = torch.optim.Adamax([*middle.parameters(), *out.parameters()], 0.01)
with budget():
    for step in range(2):
        size = ((6, 8),)[step % 1]
        x, target = torch.randn(*size, 8), torch.randn(*size, 8)
        y = functional_call(net, {name: p * 1.0 for name, p in net.named_parameters()}, (x,))
        mean, spread = middle(y).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        loss = (
            F.binary_cross_entropy_with_logits(out(drawn), target.sigmoid())
            - 0.05 * (1 + spread - mean.square() - spread.exp()).mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.step()
        side.zero_grad()
        note(loss)
        mark()
""",
        ("learned",),
    ),
    "an address that another took a moment ago": Pinned(
        """\
torch.manual_seed(461)
rng = np.random.default_rng(461)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.conv1d_0 = nn.Conv1d(8, 8, 3, padding=1)
        self.mixture_2 = nn.Parameter(torch.randn(4, 8))
    def forward(self, x):
        x = self.first(x)
        x = self.conv1d_0(x.mT).mT
        try:
            x @ torch.ones(3, 3)
        except RuntimeError:
            x = x.tanh()
        x = torch.logsumexp(-torch.cdist(x, self.mixture_2), -1, keepdim=True) + x
        x = (x.double() * x.double().exp().clamp(max=3)).float()
        return x
net = planned(Net(), torch.zeros(6, 8, 8))
optimizer = torch.optim.NAdam(parameters(net), 0.01)
observed = np.zeros((6, 8, 8), np.float32)
copied = True
for p in parameters(net):
    p.register_hook(lambda g: g * 0.9)
with budget():
    for step in range(3):
        size = ((6, 8),)[step % 1]
        torch.set_default_dtype(torch.float64)
        scale = torch.tensor(0.5)
        torch.set_default_dtype(torch.float32)
        losses = []
        observed[:] = rng.random(observed.shape)
        for _ in range(3):
            x = torch.tensor(observed) if copied else torch.from_numpy(observed) + 0
            y = net(x)
            choices = torch.distributions.Categorical(logits=y.mean(1))
            action = choices.sample()
            observed[:] = observed * 0.9 + action.numpy()[:, None, None] * 0.1
            reward = torch.as_tensor(observed.mean((1, 2)))
            losses.append(
                -(choices.log_prob(action) * reward).mean() - 0.01 * choices.entropy().mean()
            )
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
        for p in net.parameters():
            p.grad = None
        del losses, choices
        note(loss)
        mark()
""",
        ("anything, tight",),
    ),
    "an input that loses its recipe while its operator runs": Pinned(
        """\
torch.manual_seed(964)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    def forward(self, x):
        x = self.first(x)
        x = x @ torch.linalg.matrix_exp(x.mT @ x / 64 - torch.eye(8))
        x = x @ torch.linalg.matrix_exp(x.mT @ x / 64 - torch.eye(8))
        return x
net = Net()
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
""",
        ("anything, random", "anything, tight"),
    ),
    "an input of pixel_shuffle that loses its recipe meanwhile": Pinned(
        """\
torch.manual_seed(413)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.own_grad_0 = nn.Linear(8, 8, bias=False)
    def forward(self, x):
        x = self.first(x)
        x = OwnGrad.apply(x, self.own_grad_0.weight)
        x = x + x.kthvalue(2, 1, keepdim=True).values.detach()
        x = (
            F.pixel_unshuffle(
                F.pixel_shuffle(x.reshape(-1, 8, 1, 1)[:, :, :, :].expand(-1, 8, 2, 2)[:, :4], 2), 2
            )
            .mean((-1, -2))
            .repeat(1, 2)
            .view_as(x)
        )
        return x
net = Net()
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
""",
        ("learned", "tight"),
    ),
}
