"""`python -m tests.standin.answers EXTENSION QUESTION...`: asks the stand-in, answers in JSON.

A question is a program, a mode, and how the streams run: "mlp online late".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.standin.device import install

STANDIN = install(Path(sys.argv[1]))  # before anything imports torch

import torch  # noqa: E402

import rekindle  # noqa: E402
from tests.standin.programs import PROGRAMS, STEPS  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "online": {},
    "swap": {"swap": "1GiB"},
    "learned": {"learn": "wait"},
    "anything": {"evict": "anything"},
}
FRACTION = 0.6


def _trained(name: str, **budget: Any) -> tuple[list[torch.Tensor], int, Any]:
    """Parameters and buffers after training, the allocator's peak, and the last run."""
    torch.manual_seed(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    model, step = PROGRAMS[name]()
    run = None
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        if budget:
            with rekindle.budget(**budget) as run:
                step()
        else:
            step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return [value.detach().cpu() for value in model.state_dict().values()], peak, run


_plain: dict[str, tuple[list[torch.Tensor], int, int]] = {}


def answer(question: str) -> dict[str, Any]:
    """Whether the bits are those without a budget, and the allocator's peak over the budget."""
    name, mode, streams = question.split()
    if name not in _plain:
        STANDIN.late(False)
        values, peak, _ = _trained(name)
        _plain[name] = values, peak, torch.cuda.memory_allocated()
    expected, most, constant = _plain[name]
    amount = constant + int(FRACTION * (most - constant))
    STANDIN.late(streams == "late")
    values, peak, run = _trained(name, amount=amount, **MODES[mode])
    return {
        "equal": all(map(torch.equal, values, expected)),
        "peak over budget": peak / amount,
        "evictions": run.evictions,
        "recomputations": run.recomputations,
    }


def main() -> None:
    found: dict[str, Any] = {}
    for question in sys.argv[2:]:
        try:
            found[question] = answer(question)
        except Exception as error:
            found[question] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
