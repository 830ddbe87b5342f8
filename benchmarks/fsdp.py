"""Measure the smallest budget of a GPT with `fully_shard` (FSDP2) and without it.

    scripts/bench fsdp [--ranks 1 2 4] [--parameters none stays freed]

Each block of the GPT is an FSDP unit, and the model is the root unit. The ranks are processes of
this machine, connected by gloo. The rows differ in when a unit's gathered parameters are freed:

`none`: the same model without FSDP, each rank alone.
`stays`: after the backward pass (`reshard_after_forward=False`).
`freed`: after the forward pass too (`reshard_after_forward=True`, FSDP's default for all units but
    the root).

`constants` are rank 0's parameters and gradients, `peak` is its peak without a limit. `smallest` is
the smallest budget within which all ranks take two steps, by bisection to 1 % of the activations.
`share` = (smallest - constants) / (peak - constants). `recomputed` counts the operators that rank 0
recomputed within `smallest`. The script measures no time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import ROOT, conditions, earlier_by, write
from tests.pytorch.networks import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rekindle

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("ranks", "parameters")
AFTER_FORWARD = {"none": None, "stays": False, "freed": True}
WORDS, LENGTH, SEQUENCES = 256, 128, 8


class Block(nn.ModuleList):
    """Attention and MLP of a GPT's block, as one module that FSDP can call."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = x + part(x)
        return x


class Model(GPT):
    """A GPT whose blocks are modules with a forward pass of their own."""

    def __init__(self) -> None:
        super().__init__(vocabulary=WORDS, width=128, heads=4, layers=8, context=LENGTH)
        self.blocks = nn.ModuleList(Block(block) for block in self.blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def shard(model: Model, after_forward: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=after_forward)


def take_steps(parameters: str, budget: int | None) -> dict[str, Any]:
    """Take two steps within `budget` in this rank."""
    torch.manual_seed(1)
    model = Model()
    after_forward = AFTER_FORWARD[parameters]
    if after_forward is not None:
        shard(model, after_forward)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tokens = torch.randint(WORDS, (SEQUENCES, LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    step()
    with rekindle.budget(budget, learn=False) as run:
        step()
        step()
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return {
        "constants": 2 * sum(p.untyped_storage().nbytes() for p in local),
        "peak": run.peak,
        "recomputed": run.recomputations,
    }


def in_ranks(ranks: int, parameters: str, budget: int | None) -> dict[str, Any] | None:
    """Return what rank 0 measured, or None if a rank ran out of budget."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                code = 1
                try:
                    dist.init_process_group(
                        "gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks
                    )
                    found = take_steps(parameters, budget)
                    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
                    dist.barrier()
                    code = 0
                except rekindle.OutOfBudget:
                    code = 2
                finally:
                    os._exit(code)  # ends this rank; the others see the closed connections
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            assert 2 in codes, f"a rank failed: {codes}"
            return None
        found: dict[str, Any] = json.loads(Path(folder, "0.json").read_text(encoding="utf-8"))
        return found


def measure(ranks: int, parameters: str) -> dict[str, Any]:
    roomy = in_ranks(ranks, parameters, None)
    assert roomy is not None
    constants, peak = roomy["constants"], roomy["peak"]
    low, high, there = constants, peak, roomy
    while high - low > (peak - constants) // 100:
        middle = (low + high) // 2
        found = in_ranks(ranks, parameters, middle)
        if found is None:
            low = middle
        else:
            high, there = middle, found
    return {
        "constants": constants,
        "peak": peak,
        "smallest": high,
        "share": round((high - constants) / (peak - constants), 3),
        "recomputed": there["recomputed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--parameters", nargs="+", choices=AFTER_FORWARD, default=[*AFTER_FORWARD])
    parser.add_argument("--out", type=Path, default=RESULTS / "fsdp.json")
    options = parser.parse_args()
    now = conditions()
    os.environ["REKINDLE_CACHE"] = "off"
    rows = earlier_by(options.out, KEY)
    for ranks in options.ranks:
        for parameters in options.parameters:
            row = {"ranks": ranks, "parameters": parameters} | measure(ranks, parameters)
            rows[ranks, parameters] = row | {"commit": now["commit"]}
            print(row, flush=True)
            write("fsdp", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
