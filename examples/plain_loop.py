"""A training loop in plain PyTorch, within a budget. python examples/plain_loop.py"""

import torch

import rekindle

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(12)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with rekindle.budget("32MiB") as run:
    for step in range(5):
        batch = torch.randn(1024, 256)
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}  peak {run.peak / 2**20:.1f} MiB")

print(run.report())
