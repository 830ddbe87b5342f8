"""Train a small GPT, and print a digest of its weights.

The next numbers are the bytes of weights, gradients and Adam's state, and by how much the resident
memory of the process grew.
"""

from __future__ import annotations

import hashlib
import resource
import sys

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 16, 192, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        heads = (
            part.view(n, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).split(WIDTH, 2)
        )
        found = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.places(torch.arange(LENGTH))))


def train(layers: int, steps: int) -> GPT:
    torch.manual_seed(7)
    model = GPT(layers)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (4, LENGTH + 1))
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(layers=1, steps=1)  # loads PyTorch's libraries
    before = most_resident()
    model = train(LAYERS, steps=3)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().clone().numpy().tobytes())  # an array pins its memory
    print(digest.hexdigest())
    if len(sys.argv) > 1:
        torch.save(model.state_dict(), sys.argv[1])
    print(16 * sum(each.numel() for each in model.parameters()))
    print(most_resident() - before)
