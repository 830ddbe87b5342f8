"""Networks of the test models: small, each with a typical difficulty for recomputation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention from single operators: a mask, views of one projection, dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = (batch, time, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(split[-1])
        future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    """Pre-norm transformer blocks with dropout; the embedding is also the output projection."""

    def __init__(self, *, vocabulary: int, width: int, heads: int, layers: int, context: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, 0.1))
            mlp = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            )
            self.blocks.append(nn.ModuleList([attention, mlp]))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            for part in block:
                x = x + part(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Encoder(nn.Module):
    """BERT: post-norm layers, learned positions, an untied embedding."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        heads = max(1, width // 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, F.gelu, batch_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Residual(nn.Module):
    """Convolution, batch norm, in-place ReLU and in-place sum; sometimes skipped as a whole."""

    def __init__(self, channels: int, out: int, stride: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.branch = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.drop and isinstance(self.shortcut, nn.Identity) and torch.rand(()) < self.drop:
            return x  # stochastic depth: the graph differs in each step
        y = self.branch(x)
        y += self.shortcut(x)
        return self.activation(y)


class ResNet(nn.Module):
    def __init__(self, *, width: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage and block == 0 else 1
                layers.append(Residual(channels, width * 2**stage, stride, drop=0.3))
                channels = width * 2**stage
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classify = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3, 1x1 with batch norm and in-place ReLU (He et al., CVPR 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.branch = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        y += self.shortcut(x)
        return F.relu_(y)


class ResNet50(nn.Module):
    """ResNet-50: stages of 3, 4, 6 and 3 bottlenecks."""

    def __init__(self, *, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, channels = [], width
        for stage, depth in enumerate((3, 4, 6, 3)):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.blocks(self.stem(images)).mean((2, 3)))


class DenseLayer(nn.Module):
    """Norm, ReLU, 1x1 convolution, norm, ReLU, 3x3 convolution of all earlier results."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
            nn.Dropout2d(0.1),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.layers(torch.cat(features, 1))


class DenseNet(nn.Module):
    def __init__(self, *, growth: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for block, depth in enumerate(blocks):
            self.blocks.append(
                nn.ModuleList(DenseLayer(channels + i * growth, growth) for i in range(depth))
            )
            channels += depth * growth
            shrink = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            if block + 1 < len(blocks):
                shrink += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
            self.transitions.append(nn.Sequential(*shrink))
        self.classify = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in block:
                features.append(layer(features))
            x = transition(torch.cat(features, 1))
        return self.classify(x.mean((2, 3)))


def _twice(channels: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first in (channels, out):
        layers += [nn.Conv2d(first, out, 3, 1, 1), nn.GroupNorm(4, out), nn.LeakyReLU(0.1, True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net whose caller holds the skips; odd sizes are padded."""

    def __init__(self, *, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_twice(i, o) for i, o in zip([1, *widths], widths, strict=False))
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, 2) if w > width else nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * w, w, 1)
            )
            for w in widths[-2::-1]
        )  # fmt: skip
        self.up = nn.ModuleList(_twice(2 * w, w) for w in widths[-2::-1])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            skip, x = skips.pop(), rise(x)
            height, width = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
            x = block(torch.cat([skip, F.pad(x, (0, width, 0, height))], 1))
        return self.out(x)


class Cell(nn.Module):
    """An LSTM cell from single operators, with layer norm of the gates."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(inputs, 4 * width)
        self.of_state = nn.Linear(width, 4 * width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = self.norm(self.of_input(x) + self.of_state(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class UnrolledLSTM(nn.Module):
    """LSTM cells called one by one; the next batch starts with the state of the last one."""

    def __init__(self, *, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(Cell(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(width, vocabulary)
        self.state: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.state
        if state is None:
            zeros = torch.zeros(tokens.shape[0], self.embed.embedding_dim)
            state = [(zeros, zeros) for _ in self.cells]
        outputs = []
        for x in self.embed(tokens).unbind(1):
            for layer, cell in enumerate(self.cells):
                state[layer] = cell(self.dropout(x), *state[layer])
                x = state[layer][0]
            outputs.append(x)
        self.state = [(h.detach(), c.detach()) for h, c in state]
        return self.out(torch.stack(outputs, 1))


@dataclass(frozen=True, slots=True)
class Tree:
    """A node of a sentence's tree; a leaf has one vector for each sentence of the batch."""

    children: tuple[Tree, ...] = ()
    words: Tensor | None = None


class TreeLSTM(nn.Module):
    """Child-sum Tree-LSTM (Tai et al., ACL 2015), recursive over the tree of the step."""

    def __init__(self, *, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.gates = nn.Linear(2 * width, 3 * width)
        self.forget_input = nn.Linear(width, width)
        self.forget_state = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(width, classes)
        self.nothing = nn.Parameter(torch.zeros(width))

    def forward(self, tree: Tree) -> Tensor:
        """Return the classes of the whole sentence and of all its parts, summed over nodes."""
        scores: list[Tensor] = []
        self._node(tree, scores)
        return torch.stack(scores).mean(0)

    def _node(self, tree: Tree, scores: list[Tensor]) -> tuple[Tensor, Tensor]:
        below = [self._node(child, scores) for child in tree.children]
        if tree.words is not None:
            x = self.embed(tree.words)
            total = self.nothing.expand_as(x)
        else:
            x = self.nothing.expand_as(below[0][0])
            total = torch.stack([h for h, _ in below]).sum(0)
        i, o, u = self.gates(torch.cat([x, total], 1)).chunk(3, dim=1)
        c = i.sigmoid() * u.tanh()
        forget = self.forget_input(x) if below else None
        for h, c_below in below:
            c = c + torch.sigmoid(forget + self.forget_state(h)) * c_below
        h = o.sigmoid() * c.tanh()
        scores.append(self.classify(self.dropout(h)))
        return h, c


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.wide(x).chunk(2, dim=-1)
        return self.narrow(F.silu(gate) * value)


class SparseMLP(nn.Module):
    """Send each token to its best experts: sizes depend on data, and results are added in place."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.register_buffer("load", torch.zeros(experts))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router(flat)
        if self.training:
            logits = logits + 0.1 * torch.randn_like(logits)
        weights, chosen = logits.softmax(-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            if len(token):
                result.index_add_(0, token, expert(flat[token]) * weights[token, rank, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        with torch.no_grad():
            self.load.mul_(0.9).add_(share, alpha=0.1)
        self.balance = (share * logits.softmax(-1).mean(0)).sum() * len(self.experts)
        return result.view_as(x)


class MixtureOfExperts(nn.Module):
    """A transformer with fused attention and sparse MLPs."""

    def __init__(self, *, vocabulary: int, width: int, heads: int, layers: int, experts: int):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.sparse = nn.ModuleList(SparseMLP(width, experts, 2) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        balance = x.new_zeros(())
        for layer, (project, sparse) in enumerate(zip(self.projections, self.sparse, strict=True)):
            qkv = project(self.norms[2 * layer](x))
            q, k, v = qkv.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attended.transpose(1, 2).reshape(x.shape)
            x = x + sparse(self.norms[2 * layer + 1](x))
            balance = balance + sparse.balance
        return self.out(x), balance


class GAN(nn.Module):
    """A generator with batch norm and a critic without, for small images."""

    def __init__(self, *, noise: int, width: int) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, 4 * width * 16),
            nn.Unflatten(1, (4 * width, 4, 4)),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 1, 3, 1, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, 2 * width, 3, 1, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 2 * width, 4, 2, 1),
            nn.GELU(),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(4 * width * 16, 1),
        )

    def generate(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.noise))
