"""Count how often a script must be restarted with the budget that `OutOfBudget` names.

    scripts/bench restarts [--models gpt bert ...] [--zoo] [--fractions 0.1 0.3]

The first budget is the model's constants (weights, gradients, the optimizer's state) and a fraction
of its activation memory that is too small. Each start is a new process that knows only what earlier
processes stored in the cache. It takes two training steps; the optimizer has its state only in the
second. `last` is the budget of the start that succeeded, and `floor` the smallest budget that
succeeds, by bisection. Both are given as fractions of the activation memory, above the constants.
The script measures no time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, conditions, earlier_by, write
from _trainer import Trainer, activations
from _workloads import WORKLOADS
from tests.pytorch.models import ALL_CASES
from tests.zoo.architectures import ALL_ARCHITECTURES, loss_of
from tests.zoo.runs import step_of

import rekindle

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("model", "fraction")
FRACTIONS = (0.1, 0.3)  #: budgets, as fractions of the activation memory
MODELS = ("gpt", "bert", "resnet50", "unet", "densenet", "lstm", "tree_lstm", "moe")
MOST = 30  #: limit on the number of starts
CASES = {case.name: case for case in ALL_CASES}  #: models of the tests
CLOSE = 0.02  #: precision of `floor`, as a fraction of the activation memory


def in_a_process(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `ask` in a forked process that has run no operator yet, and return its answer."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        try:
            answer = ask()
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        with os.fdopen(writes, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"failed": "died"}


def program(name: str) -> Callable[[], object]:
    """Return a new training step."""
    if name in WORKLOADS:
        return Trainer(WORKLOADS[name], "cpu").step
    if name in CASES:
        return partial(CASES[name].build().step, 1)
    model, batch = next(each for each in ALL_ARCHITECTURES if each.name == name).build()
    return step_of(model, lambda: loss_of(model(**batch)))


def sizes(name: str) -> dict[str, Any]:
    """Return the bytes of constants and activations in plain PyTorch, by the allocator's events."""
    if name in WORKLOADS:
        trainer = Trainer(WORKLOADS[name], "cpu")
        trainer.step()
        return {"constants": trainer.constants(), "activations": activations(trainer, "cpu")}
    step = program(name)
    with rekindle.budget.unlimited() as run:
        for _ in range(2):
            step()
    return {"constants": run.memory, "activations": run.peak - run.memory}


def start(name: str, budget: int) -> dict[str, Any]:
    """Run two steps within `budget`.

    Returns:
        {} if the steps succeed. Otherwise `next`, the budget to try, or `failed`, the reason.
    """
    step = program(name)
    try:
        with rekindle.budget(budget, learn=False):
            for _ in range(2):
                step()
    except rekindle.OutOfBudget as error:
        return {"next": error.rehearse(), "where": error.operator}
    return {}


def follow(name: str, budget: int) -> dict[str, Any]:
    """Start with `budget`, then with each budget that `OutOfBudget` names, until one succeeds.

    Returns:
        The number of `restarts`, all budgets `tried`, and the `last` one, which succeeded.
    """
    tried = [budget]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REKINDLE_CACHE"] = folder
        while len(tried) <= MOST:
            answer = in_a_process(lambda: start(name, tried[-1]))
            if "failed" in answer:
                return answer
            if not answer:
                return {"restarts": len(tried) - 1, "last": tried[-1], "tried": tried}
            tried.append(max(answer["next"], tried[-1] + 1))
    return {"failed": f"{MOST} starts were not enough", "tried": tried}


def floor(name: str, low: int, high: int, close: int) -> int:
    """Return the smallest budget that suffices, by bisection to `close` bytes.

    Args:
        name: The program.
        low: A budget (bytes) that is too small.
        high: A budget that suffices.
        close: The precision of the result.
    """
    os.environ["REKINDLE_CACHE"] = "off"
    while high - low > close:
        middle = (low + high) // 2
        if in_a_process(partial(start, name, middle)):
            low = middle
        else:
            high = middle
    return high


def measure(name: str, fraction: float) -> dict[str, Any]:
    about = in_a_process(lambda: sizes(name))
    if "failed" in about:
        return about
    constants, base = about["constants"], about["activations"]
    found = follow(name, constants + int(fraction * base))
    if "failed" in found:
        return found
    if found["restarts"]:
        least = floor(name, found["tried"][0], found["last"], int(CLOSE * base))
        found["floor"] = round((least - constants) / base, 3)
    found["tried"] = [round((budget - constants) / base, 3) for budget in found["tried"]]
    return found | {"last": found["tried"][-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--zoo", action="store_true", help="the zoo's architectures instead")
    parser.add_argument("--fractions", nargs="+", type=float, default=[*FRACTIONS])
    parser.add_argument("--out", type=Path, default=RESULTS / "restarts.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    now = conditions()
    rows = earlier_by(options.out, KEY)
    names = [each.name for each in ALL_ARCHITECTURES] if options.zoo else options.models
    for key in [(name, fraction) for name in names for fraction in options.fractions]:
        rows[key] = dict(zip(KEY, key, strict=True)) | measure(*key) | {"commit": now["commit"]}
        print({name: value for name, value in rows[key].items() if name != "commit"}, flush=True)
        write("restarts", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
