"""Train within a budget on each rank: `torchrun ... budgets.py OUT [EXTENSION]`.

Each rank trains within a budget of its own, and afterwards within a budget of "auto". EXTENSION is
the compiled stand-in device `cuda`; without it the ranks train on the CPU.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.standin.device import install

EXTENSION = Path(sys.argv[2]) if len(sys.argv) > 2 else None
if EXTENSION is not None:
    install(EXTENSION)  # before anything imports torch

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import rekindle  # noqa: E402
from rekindle.pytorch.context._auto import available  # noqa: E402
from tests.distributed.ranks import leave  # noqa: E402

DEVICES = 2


def trained(device: torch.device, budget: rekindle.budget | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with budget or nullcontext() as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(256, 64, device=device)).square().mean().backward()
            # copied to the CPU, because gloo supports no other device
            for parameter in model.parameters():
                gradient = parameter.grad.cpu()
                dist.all_reduce(gradient)
                parameter.grad.copy_(gradient)
            optimizer.step()
    return model, run


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    if EXTENSION is not None:
        device = torch.device("cuda", rank % DEVICES)
        torch.cuda.set_device(device)
    expected, run = trained(device, rekindle.budget(None, device=device))
    own = int((0.5 + 0.1 * rank) * run.peak)
    model, within = trained(device, rekindle.budget(own, device=device))
    weights = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    found = {
        "own": own,
        "peak": within.peak,
        "evictions": within.evictions,
        "equal": all(torch.equal(one, other) for one, other in weights),
        "auto": trained(device, rekindle.budget("auto", device=device))[1].budget,
        "alone": available(device, 1),
        "common": rekindle.distributed.common_budget("auto", device=device),
    }
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
