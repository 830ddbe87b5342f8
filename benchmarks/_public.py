"""Training steps in the style of PyTorch's public examples, in sizes for a CPU, without data sets.

Each function builds one program. It returns the program's training step, and the tensors that exist
before the step. A program has the same layers as the example of its name, so it runs the same
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _common import ROOT as _ROOT  # this import makes `tests` importable
from tests.pytorch import networks
from torch import Tensor, nn

assert _ROOT


class Program(NamedTuple):
    step: Callable[[], None]
    inputs: list[Tensor]


Optimizer = Callable[..., torch.optim.Optimizer]


def training(
    model: nn.Module,
    loss: Callable[[], Tensor],
    inputs: Iterable[Tensor],
    optimizer: Optimizer = torch.optim.Adam,
) -> Program:
    """Return a training step of `model`, and its weights and `inputs`."""
    used = optimizer(model.parameters())

    def step() -> None:
        used.zero_grad()
        loss().backward()
        used.step()

    return Program(step, [*model.parameters(), *model.buffers(), *inputs])


class MNIST(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.early, self.late = nn.Dropout(0.25), nn.Dropout(0.5)
        self.wide, self.out = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        x = F.relu(self.wide(torch.flatten(self.early(x), 1)))
        return F.log_softmax(self.out(self.late(x)), dim=1)


def mnist() -> Program:
    model, x, y = MNIST(), torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    return training(model, lambda: F.nll_loss(model(x), y), [x, y], torch.optim.Adadelta)


def mnist_half() -> Program:
    """The program `mnist`, with all layers in half precision, log_softmax included."""
    model, x, y = (
        MNIST().bfloat16(),
        torch.randn(64, 1, 28, 28).bfloat16(),
        torch.randint(10, (64,)),
    )
    return training(model, lambda: F.nll_loss(model(x), y), [x, y], torch.optim.Adadelta)


class Rows(nn.Module):
    """A recurrent network that reads an image as a sequence of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(28, 64, batch_first=True)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout2d(0.25)
        self.wide, self.out = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn(x.view(-1, 28, 28))
        x = self.dropout(self.norm(x[:, -1, :])[:, :, None, None]).flatten(1)
        return F.log_softmax(self.out(F.relu(self.wide(x))), dim=1)


def mnist_rnn() -> Program:
    model, x, y = Rows(), torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
    return training(model, lambda: F.nll_loss(model(x), y), [x, y], torch.optim.Adadelta)


def super_resolution() -> Program:
    model = nn.Sequential(
        nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(),
        nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 9, 3, 1, 1), nn.PixelShuffle(3),
    )  # fmt: skip
    x, y = torch.randn(4, 1, 85, 85), torch.randn(4, 1, 255, 255)
    return training(model, lambda: F.mse_loss(model(x), y), [x, y])


class WordModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.words = nn.Embedding(2000, 200)
        if kind in ("LSTM", "GRU"):
            self.rnn: nn.Module = getattr(nn, kind)(200, 200, 2, dropout=0.2)
        else:
            self.rnn = nn.RNN(200, 200, 2, nonlinearity=kind, dropout=0.2)
        self.out = nn.Linear(200, 2000)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.rnn(self.dropout(self.words(x)))
        return F.log_softmax(self.out(self.dropout(found)).view(-1, 2000), dim=1)


def words(kind: str) -> Program:
    model, x, y = WordModel(kind), torch.randint(2000, (35, 20)), torch.randint(2000, (700,))
    return training(model, lambda: F.nll_loss(model(x), y), [x, y], torch.optim.SGD)


def words_half() -> Program:
    """The program `words_lstm`, under autocast."""
    model, x, y = WordModel("LSTM"), torch.randint(2000, (35, 20)), torch.randint(2000, (700,))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.nll_loss(model(x), y)

    return training(model, loss, [x, y], torch.optim.SGD)


def words_transformer() -> Program:
    layer = nn.TransformerEncoderLayer(200, 2, 200, 0.2)
    model = nn.Sequential(
        nn.Embedding(2000, 200), nn.TransformerEncoder(layer, 2), nn.Linear(200, 2000)
    )
    x, y = torch.randint(2000, (35, 20)), torch.randint(2000, (700,))
    mask = torch.full((35, 35), float("-inf")).triu(1)

    def loss() -> Tensor:
        found = model[1](model[0](x) * 200**0.5, mask=mask)
        return F.nll_loss(F.log_softmax(model[2](found).view(-1, 2000), dim=1), y)

    return training(model, loss, [x, y, mask], torch.optim.SGD)


def sine_waves() -> Program:
    """The example time_sequence_prediction: LSTM cells in double precision."""
    cells = nn.ModuleList([nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)]).double()
    x, y = torch.randn(97, 200).double(), torch.randn(97, 200).double()

    def loss() -> Tensor:
        states = [tuple(torch.zeros(97, 51).double() for _ in range(2)) for _ in range(2)]
        found = []
        for item in x.split(1, dim=1):
            states[0] = cells[0](item, states[0])
            states[1] = cells[1](states[0][0], states[1])
            found.append(cells[2](states[1][0]))
        return F.mse_loss(torch.cat(found, dim=1), y)

    return training(cells, loss, [x, y])


def vae() -> Program:
    model = nn.ModuleList(
        [
            nn.Linear(784, 400),
            nn.Linear(400, 20),
            nn.Linear(400, 20),
            nn.Linear(20, 400),
            nn.Linear(400, 784),
        ]
    )
    x = torch.rand(512, 784)

    def loss() -> Tensor:
        hidden = F.relu(model[0](x))
        mean, log_variance = model[1](hidden), model[2](hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        found = torch.sigmoid(model[4](F.relu(model[3](z))))
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy(found, x, reduction="sum") + divergence

    return training(model, loss, [x])


def dcgan() -> Program:
    def up(before: int, after: int, stride: int, padding: int) -> list[nn.Module]:
        made = nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False)
        return [made, nn.BatchNorm2d(after), nn.ReLU(True)]

    def down(before: int, after: int) -> list[nn.Module]:
        made = nn.Conv2d(before, after, 4, 2, 1, bias=False)
        return [made, nn.BatchNorm2d(after), nn.LeakyReLU(0.2, True)]

    make = nn.Sequential(
        *up(100, 128, 1, 0), *up(128, 64, 2, 1), *up(64, 32, 2, 1), *up(32, 16, 2, 1),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True), *down(16, 32),
        *down(32, 64), *down(64, 128), nn.Conv2d(128, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
    )  # fmt: skip
    optimizers = [torch.optim.Adam(each.parameters(), 2e-4, (0.5, 0.999)) for each in (judge, make)]
    x, noise = torch.randn(32, 3, 64, 64), torch.randn(32, 100, 1, 1)
    ones, zeros = torch.ones(32), torch.zeros(32)

    def step() -> None:
        judge.zero_grad()
        F.binary_cross_entropy(judge(x).view(-1), ones).backward()
        fake = make(noise)
        F.binary_cross_entropy(judge(fake.detach()).view(-1), zeros).backward()
        optimizers[0].step()
        make.zero_grad()
        F.binary_cross_entropy(judge(fake).view(-1), ones).backward()
        optimizers[1].step()

    kept = [each for model in (judge, make) for each in (*model.parameters(), *model.buffers())]
    return Program(step, [*kept, x, noise, ones, zeros])


def siamese() -> Program:
    trunk, head = networks.ResNet(width=32, depths=(2, 2, 2), classes=128), nn.Linear(256, 1)
    model = nn.ModuleList([trunk, head])
    first, second, y = (
        torch.randn(32, 3, 28, 28),
        torch.randn(32, 3, 28, 28),
        torch.rand(32, 1).round(),
    )

    def loss() -> Tensor:
        found = torch.sigmoid(head(torch.cat((trunk(first), trunk(second)), 1)))
        return F.binary_cross_entropy(found, y)

    return training(model, loss, [first, second, y], torch.optim.Adadelta)


def imagenet(layout: torch.memory_format = torch.contiguous_format) -> Program:
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    )

    def block(before: int, after: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip

    class ResNet18(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = stem
            widths = [
                (64, 64, 1),
                (64, 64, 1),
                (64, 128, 2),
                (128, 128, 1),
                (128, 256, 2),
                (256, 256, 1),
                (256, 512, 2),
                (512, 512, 1),
            ]
            self.blocks = nn.ModuleList(block(*each) for each in widths)
            self.shortcuts = nn.ModuleList(
                nn.Identity()
                if a == b
                else nn.Sequential(nn.Conv2d(a, b, 1, s, bias=False), nn.BatchNorm2d(b))
                for a, b, s in widths
            )
            self.out = nn.Linear(512, 100)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for one, shortcut in zip(self.blocks, self.shortcuts, strict=True):
                x = F.relu(one(x) + shortcut(x), inplace=True)
            return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))

    model = ResNet18()
    model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]  # not in torch's stubs
    x, y = torch.randn(16, 3, 112, 112).to(memory_format=layout), torch.randint(100, (16,))
    return training(model, lambda: F.cross_entropy(model(x), y), [x, y], torch.optim.SGD)


def neural_style() -> Program:
    def layer(before: int, after: int, kernel: int, stride: int) -> list[nn.Module]:
        made = nn.Conv2d(before, after, kernel, stride)
        return [
            nn.ReflectionPad2d(kernel // 2),
            made,
            nn.InstanceNorm2d(after, affine=True),
            nn.ReLU(),
        ]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Sequential(*layer(64, 64, 3, 1), *layer(64, 64, 3, 1)[:-1])

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x) + x

    model = nn.Sequential(
        *layer(3, 16, 9, 1), *layer(16, 32, 3, 2), *layer(32, 64, 3, 2), Residual(), Residual(),
        nn.Upsample(scale_factor=2), *layer(64, 32, 3, 1), nn.Upsample(scale_factor=2),
        *layer(32, 16, 3, 1), *layer(16, 3, 9, 1)[:2],
    )  # fmt: skip
    x = torch.randn(4, 3, 96, 96)

    def loss() -> Tensor:
        found = model(x).flatten(2)
        style = found @ found.transpose(1, 2) / found.shape[-1]
        return F.mse_loss(found, x.flatten(2)) + style.square().mean()

    return training(model, loss, [x])


def gcn() -> Program:
    first, second = nn.Linear(500, 128, bias=False), nn.Linear(128, 7, bias=False)
    x, y = torch.rand(2708, 500), torch.randint(7, (2708,))
    places = torch.randint(2708, (2, 10_000))
    graph = torch.sparse_coo_tensor(places, torch.rand(10_000), (2708, 2708)).coalesce()

    def loss() -> Tensor:
        hidden = F.dropout(F.relu(torch.mm(graph, first(x))))
        return F.nll_loss(F.log_softmax(torch.mm(graph, second(hidden)), dim=1), y)

    return training(nn.ModuleList([first, second]), loss, [x, y, places])


def gat() -> Program:
    class Layer(nn.Module):
        def __init__(self, before: int, after: int, heads: int) -> None:
            super().__init__()
            self.heads, self.after = heads, after
            self.weight = nn.Parameter(0.1 * torch.randn(before, heads * after))
            self.attention = nn.Parameter(0.1 * torch.randn(heads, 2 * after, 1))

        def forward(self, x: Tensor, graph: Tensor) -> Tensor:
            h = F.dropout((x @ self.weight).view(len(x), self.heads, self.after).permute(1, 0, 2))
            left, right = h @ self.attention[:, : self.after], h @ self.attention[:, self.after :]
            scores = F.leaky_relu(left + right.mT, 0.2)
            scores = torch.where(graph > 0, scores, -9e16 * torch.ones_like(scores))
            return F.elu((F.dropout(F.softmax(scores, dim=-1)) @ h).permute(1, 0, 2).flatten(1))

    model = nn.ModuleList([Layer(300, 8, 8), Layer(64, 7, 1)])
    x, y, graph = (
        torch.rand(700, 300),
        torch.randint(7, (700,)),
        (torch.rand(700, 700) < 0.01).float(),
    )
    return training(
        model,
        lambda: F.nll_loss(F.log_softmax(model[1](model[0](x, graph), graph), dim=1), y),
        [x, y, graph],
    )


def vision_transformer() -> Program:
    patches, out = nn.Conv2d(3, 128, 4, 4), nn.Linear(128, 10)
    layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, F.gelu, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    model = nn.ModuleList([patches, blocks, out])

    def loss() -> Tensor:
        return F.cross_entropy(out(blocks(patches(x).flatten(2).mT).mean(1)), y)

    return training(model, loss, [x, y])


def actor_critic() -> Program:
    body, actor, critic = nn.Linear(64, 512), nn.Linear(512, 8), nn.Linear(512, 1)
    x, rewards = torch.randn(400, 16, 64), torch.randn(400, 16)

    def loss() -> Tensor:
        losses = []
        for state, reward in zip(x, rewards, strict=True):
            hidden = F.relu(body(state))
            chances = torch.distributions.Categorical(F.softmax(actor(hidden), dim=-1))
            value = critic(hidden).squeeze(-1)
            action = chances.sample()
            losses.append((-chances.log_prob(action) * (reward - value.detach())).sum())
            losses.append(F.smooth_l1_loss(value, reward))
        return torch.stack(losses).sum()

    return training(nn.ModuleList([body, actor, critic]), loss, [x, rewards])


def translation() -> Program:
    model = nn.Transformer(128, 4, 2, 2, 256, batch_first=False)
    words, out = nn.Embedding(1500, 128), nn.Linear(128, 1500)
    source, target = torch.randint(1500, (30, 32)), torch.randint(1500, (25, 32))
    mask = torch.full((24, 24), float("-inf")).triu(1)

    def loss() -> Tensor:
        found = out(model(words(source), words(target[:-1]), tgt_mask=mask))
        return F.cross_entropy(found.flatten(0, 1), target[1:].flatten())

    return training(nn.ModuleList([model, words, out]), loss, [source, target, mask])


def snli() -> Program:
    words, rnn = nn.Embedding(2000, 100), nn.LSTM(100, 150, 1, bidirectional=True)
    out = nn.Sequential(
        nn.Linear(1200, 300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 300), nn.ReLU(),
        nn.Linear(300, 3),
    )  # fmt: skip
    first, second, y = (
        torch.randint(2000, (25, 64)),
        torch.randint(2000, (15, 64)),
        torch.randint(3, (64,)),
    )

    def loss() -> Tensor:
        ends = [
            rnn(F.relu(words(each)))[1][0].transpose(0, 1).flatten(1) for each in (first, second)
        ]
        both = torch.cat((*ends, (ends[0] - ends[1]).abs(), ends[0] * ends[1]), 1)
        return F.cross_entropy(out(both), y)

    return training(nn.ModuleList([words, rnn, out]), loss, [first, second, y])


PUBLIC: dict[str, Callable[[], Program]] = {
    "mnist": mnist,
    "mnist_rnn": mnist_rnn,
    "super_resolution": super_resolution,
    "words_lstm": lambda: words("LSTM"),
    "words_gru": lambda: words("GRU"),
    "words_tanh": lambda: words("tanh"),
    "words_transformer": words_transformer,
    "sine_waves": sine_waves,
    "vae": vae,
    "dcgan": dcgan,
    "siamese": siamese,
    "imagenet": imagenet,
    "imagenet_channels_last": lambda: imagenet(torch.channels_last),
    "neural_style": neural_style,
    "gcn": gcn,
    "gat": gat,
    "vision_transformer": vision_transformer,
    "actor_critic": actor_critic,
    "translation": translation,
    "snli": snli,
    "mnist_half": mnist_half,
    "words_half": words_half,
}
