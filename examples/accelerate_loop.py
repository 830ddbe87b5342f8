"""A loop with Accelerate, within a budget. python examples/accelerate_loop.py"""

import torch
from accelerate import Accelerator

import rekindle

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(12)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.randn(4096, 256), batch_size=1024)
model, optimizer, data = accelerator.prepare(model, optimizer, data)

with rekindle.budget("32MiB") as run:
    for batch in data:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

print(run.report())
