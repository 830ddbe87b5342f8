"""Train a small transformer whose blocks are compiled, like the training scripts of torchtitan."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width=64, heads=2):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.queries(self.before_attention(x))
        parts = parts.view(rows, length, 3, self.heads, width // self.heads)
        found = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.before_mlp(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fullgraph", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        block.compile(fullgraph=args.fullgraph)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(args.steps):
        loss = model(torch.randn(8, 128, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
