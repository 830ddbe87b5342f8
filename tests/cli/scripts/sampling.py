"""Train a character model with growing batches, evaluate it, and sample text at the end.

`--phases training` only trains. `--by-hand` updates the weights without an optimizer.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--phases", default="training evaluation sampling")
parser.add_argument("--by-hand", action="store_true")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

WIDTH, TOKENS = 48, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, -1).transpose(1, 3).unbind(2)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def batch(size, length):
    tokens = torch.randint(TOKENS, (size, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


torch.manual_seed(0)
model = Model()
optimizer = None if args.by_hand else torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    tokens, targets = batch(8, 16 + 4 * step)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    if optimizer is None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    else:
        optimizer.step()
        optimizer.zero_grad()
    print(f"{step}: {loss.item():.6f}")
model.eval()
if "evaluation" in args.phases:
    with torch.no_grad():
        for _ in range(3):
            tokens, targets = batch(96, 64)
            print(f"{F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item():.6f}")
if "sampling" in args.phases:
    tokens = torch.zeros(16, 1, dtype=torch.long)
    with torch.inference_mode():
        for _ in range(40):
            logits = model(tokens)[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    print(tokens[0].tolist())
