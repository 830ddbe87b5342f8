"""Train three steps on one rank of an Accelerate job on CPUs, and print the sum of the weights."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import accelerate
import torch

import rekindle
from tests.distributed.ranks import leave

accelerator = accelerate.Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(96, 32), batch_size=16)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
with rekindle.budget(sys.argv[1]) if len(sys.argv) > 1 else nullcontext():
    for batch in data:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum().item()
sys.stdout.write(f"{os.environ['RANK']} {accelerator.device} {total.hex()}\n")
leave()
