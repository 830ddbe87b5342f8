"""Train with a second model.

`--teacher`: the model imitates another one, which runs without gradients, like the reference model
of TRL's DPO. `--adversary`: two networks train in turn, like PyTorch's DCGAN example.
"""

import argparse

import torch
from torch import nn


def network():
    layers = ((nn.Linear(256, 256), nn.GELU()) for _ in range(12))
    return nn.Sequential(*(layer for pair in layers for layer in pair))


parser = argparse.ArgumentParser()
parser.add_argument("--teacher", action="store_true")
parser.add_argument("--adversary", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
one, other = network(), network()
steps = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
for step in range(4):
    x = torch.randn(2048, 256)
    y = one(x)
    losses = []
    if args.teacher:
        with torch.no_grad():
            target = other(x)
        losses.append((y - target).square().mean())
    if args.adversary:
        judged = other(y.detach()).mean() - other(torch.randn(2048, 256)).mean()
        judged.backward()
        steps[1].step()
        steps[1].zero_grad()
        losses.append(-other(y).mean())
    losses[0].backward()
    steps[0].step()
    steps[0].zero_grad()
    print(step, losses[0].item())
