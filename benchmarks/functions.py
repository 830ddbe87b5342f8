"""Measure the smallest budgets of models made of `autograd.Function`s, recomputed and not.

    scripts/bench functions [--styles Liger Unsloth ...]

The model is a LLaMA of 8 blocks (`_fused.py`) in the styles of libraries of fused kernels. It
trains on a CPU by SGD without momentum, on batches of four rows of 256 words. The figures `kept`
have the functions unchanged, so their results stay in memory. For the figures `units`, each
function was passed to `rekindle.recomputable`. `smallest` is the smallest budget by bisection, in a
process that has taken steps before. It is given as a share of the activations: the bytes above
weights, gradients and tables of sines and cosines.

`first` is the smallest share within which a new process takes its first two steps. In these steps
Rekindle does not know the operators' workspaces yet, and it must run every function twice before it
may recompute it. The search raises the share by hundredths. `equal` is true if the gradients within
0.35 of the activations equal those without a budget, bit for bit. `recomputed` counts the operators
that ran again for these gradients. `backward_alone` is the most memory that the backward pass of
one function allocates at once, as a share of the activations. Variables of the function hold this
memory, so it cannot be evicted. The script measures no time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import ROOT, conditions, earlier_by, write
from _fused import FUNCTIONS, STYLES, Llama
from restarts import in_a_process
from torch import Tensor

import rekindle
from rekindle import Run

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("style",)


class Training:
    """One model and its steps."""

    def __init__(self, style: str) -> None:
        torch.manual_seed(0)
        self.model = Llama(style)
        self.tokens = torch.randint(512, (4, 256))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.step()
        self.state = {name: each.clone() for name, each in self.model.state_dict().items()}
        weights = sum(each.nbytes for each in self.model.parameters())
        self.constant = 2 * weights + self.model.cos.nbytes + self.model.sin.nbytes

    def step(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens)
        F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.optimizer.step()

    def within(self, budget: int | None) -> tuple[Run, list[Tensor]]:
        """Run a step from the initial weights; return the `Run` and the gradients."""
        self.model.load_state_dict(self.state)
        with rekindle.budget(budget, learn=False) as run:
            self.step()
        return run, [each.grad.clone() for each in self.model.parameters() if each.grad is not None]

    def smallest(self, peak: int) -> int:
        low, high = self.constant, peak
        while high - low > 0.01 * (peak - self.constant):
            middle = (low + high) // 2
            try:
                self.within(middle)
                high = middle
            except rekindle.OutOfBudget:
                low = middle
        return high


def choose(*, units: bool) -> None:
    for each in FUNCTIONS if units else ():
        rekindle.recomputable(each)


def begins(style: str, share: float, activations: int, *, units: bool) -> dict[str, Any]:
    """Return {"fits": True} if the first two steps fit within `share` of the activations.

    The caller runs this function in a new process, in which Rekindle knows no workspaces yet.
    """
    choose(units=units)
    training = Training(style)
    try:
        for _ in range(2):
            training.within(training.constant + int(share * activations))
    except rekindle.OutOfBudget:
        return {"fits": False}
    return {"fits": True}


def measure(style: str, *, units: bool) -> dict[str, Any]:
    choose(units=units)
    training = Training(style)
    training.model.load_state_dict(training.state)
    training.step()
    wanted = [each.grad.clone() for each in training.model.parameters() if each.grad is not None]
    peak = training.within(None)[0].peak
    activations = peak - training.constant
    found: dict[str, Any] = {
        "activations": activations,
        "smallest": round((training.smallest(peak) - training.constant) / activations, 3),
    }
    if units:
        run, got = training.within(training.constant + int(0.35 * activations))
        found["equal"] = all(map(torch.equal, got, wanted))
        found["recomputed"] = run.recomputations
        found["backward_alone"] = round(backward_alone(training) / activations, 3)
        found["advice"] = [each for each in run.report().advice if "not recomputed" in each]
    return found


class Given:
    """A replacement for the `ctx` of an `autograd.Function`, to call its backward pass alone."""

    def __init__(self, saved: tuple[Tensor, ...]) -> None:
        self.saved_tensors = saved


def backward_alone(training: Training) -> int:
    """Return the most bytes, without weights, that a backward pass of one function needs."""
    calls: dict[Any, tuple[tuple[Tensor, ...], tuple[Any, ...]]] = {}
    originals = {kind: kind.backward for kind in FUNCTIONS}

    def noting(kind: Any) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            calls[kind] = ctx.saved_tensors, gradients
            return originals[kind](ctx, *gradients)

        return staticmethod(backward)

    for kind in FUNCTIONS:
        kind.backward = noting(kind)  # pyright: ignore[reportAttributeAccessIssue]
    training.step()
    most = 0
    for kind, (saved, gradients) in calls.items():
        with torch.no_grad(), rekindle.budget(None) as run:
            made = originals[kind](Given(saved), *gradients)
        del made
        weights = sum(each.nbytes for each in saved if isinstance(each, torch.nn.Parameter))
        most = max(most, run.peak - weights)
    for kind, original in originals.items():
        kind.backward = staticmethod(original)  # pyright: ignore[reportAttributeAccessIssue]
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--styles", nargs="+", default=[*STYLES])
    parser.add_argument("--out", type=Path, default=RESULTS / "functions.json")
    options = parser.parse_args()
    now = conditions()
    rows = earlier_by(options.out, KEY)
    for style in options.styles:
        row: dict[str, Any] = {"style": style}
        for name, units in (("kept", False), ("units", True)):
            found = in_a_process(lambda: measure(style, units=units))  # noqa: B023 - called at once
            share, activations = found["smallest"], found["activations"]
            while not in_a_process(
                lambda: begins(style, share, activations, units=units)  # noqa: B023
            )["fits"]:
                share += 0.01
            row[name] = found | {"first": round(share, 3)}
        rows[style,] = row | {"commit": now["commit"]}
        print({key: value for key, value in rows[style,].items() if key != "commit"}, flush=True)
        write("functions", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
