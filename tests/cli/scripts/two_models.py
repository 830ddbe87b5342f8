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
group = parser.add_mutually_exclusive_group(required=True)
group.add_argument("--teacher", action="store_true")
group.add_argument("--adversary", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
one, other = network(), network()
optimizers = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
for step in range(4):
    x = torch.randn(2048, 256)
    y = one(x)
    if args.teacher:
        with torch.no_grad():
            target = other(x)
        loss = (y - target).square().mean()
    else:
        optimizers[1].zero_grad()
        judged = other(y.detach()).mean() - other(torch.randn(2048, 256)).mean()
        judged.backward()
        optimizers[1].step()
        loss = -other(y).mean()
    loss.backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    print(step, loss.item())
