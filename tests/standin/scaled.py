"""Time plans of the models of the DTR paper, an eighth as large in each dimension.

Width, words and times are divided by `PART`. So each tensor has 1/`PART**2` of its bytes, and each
matrix product 1/`PART**3` of its operations. The simulated clock of the stand-in device has the
same fractions of the speed of an H100 in float32. So its times are an estimate (roofline model) of
the times of the whole models on an H100.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from tests.pytorch import networks
from tests.standin.timed import timed_passes

PART = 8
# Speed of the whole device, per us: bytes of memory, operations of products, bytes of copies.
BYTES, FLOPS, COPIED = 2.6e6, 45e6, 50e3


def _bert(width: int, layers: int) -> nn.Module:
    return networks.Encoder(
        vocabulary=30522 // PART, width=width // PART, layers=layers, context=512 // PART
    )


def _gpt2() -> nn.Module:
    return networks.GPT(
        vocabulary=50257 // PART, width=768 // PART, heads=12, layers=12, context=1024 // PART
    )


#: Model, words, batch that fits in plain PyTorch, length of its rows, factor for the larger batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, int, int]] = {
    "BERT-base": (lambda: _bert(768, 12), 30522, 16, 512, 2),
    "BERT-large": (lambda: _bert(1024, 24), 30522, 8, 512, 2),
    "GPT-2": (_gpt2, 50257, 8, 1024, 3),
}


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).float().flatten(0, 1), tokens.flatten())


def scaled_plans(standin: Any, name: str) -> dict[str, Any]:
    """Plan a larger batch within the memory that the smaller one needs, and time its passes."""
    standin.clock(BYTES / PART**2, FLOPS / PART**3, COPIED / PART**2)
    torch.manual_seed(0)
    build, words, rows, length, factor = MODELS[name]
    model = _WithLoss(build()).cuda()
    larger = torch.randint(words // PART, (rows * factor, length // PART)).cuda()

    def run(network: nn.Module, tokens: Tensor) -> tuple[float, list[Tensor], int]:
        """Return the time (us) of the second pass, the gradients, and the peak memory."""
        took, gradients = timed_passes(standin, model, network, tokens, passes=2)
        model.zero_grad()
        # Requested bytes, because the allocator rounds these small tensors up by several percent.
        return took, gradients, torch.cuda.memory_stats()["requested_bytes.all.peak"]

    _, _, budget = run(model, larger[:rows].clone())
    plain, expected, _ = run(model, larger)
    found: dict[str, Any] = {"plain ms": plain / 1000}
    for way, options in {"recomputed": {}, "swapped": {"swap": "4GiB"}}.items():
        start = time.perf_counter()
        plan = rekindle.plan(model, (larger,), budget=budget, check=False, **options)
        took, gradients, peak = run(plan.apply(), larger)
        found[way] = {
            "overhead": took / plain - 1,
            "planned": plan.overhead,
            "bound": plan.lower_bound,
            "equal": all(map(torch.equal, gradients, expected)),
            "peak over budget": peak / budget,
            "GiB swapped out": plan.plan.swapped_out * PART**2 / 2**30,
            "seconds": time.perf_counter() - start,
        }
    return found
