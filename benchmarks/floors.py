"""Compare the smallest budget of each model with lower bounds.

    scripts/bench floors [--models gpt bert ...]

The step is a whole training step after the optimizer has its state. For each model:

`bound`: the most memory that one operator of the step needs, in addition to weights, gradients,
    optimizer state and batches. No schedule of this step needs less.
`held`: the same, but also with the tensors that variables of the program hold while the operator
    runs. `evict="saved"` does not evict these tensors.
`simulated`: the smallest budget that suffices in a simulation of the online engine.
`real`: the smallest budget within which a new process takes two steps, by bisection to 1 %.
    `short_of_room` is the operator that did not fit into the largest budget that failed.

The results give each amount in bytes, and as a multiple of `bound`. The script measures no time.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, conditions, earlier_by, write
from restarts import MODELS, in_a_process, program, start

import rekindle
from rekindle.policies import Thrifty
from rekindle.simulator import smallest_budget
from rekindle.trace import Call, Drop, Trace, Use, largest_need

RESULTS = ROOT / "benchmarks" / "results"
KEY = ("model",)


def traced(name: str) -> Trace:
    """Return the trace of the third step, when every operator has been measured."""
    step = program(name)
    for _ in range(2):
        with rekindle.budget.unlimited():
            step()
    return rekindle.capture(step)


def need_of_what_is_held(trace: Trace) -> tuple[int, str]:
    """Return the most bytes that one operator needs, and the operator's name.

    The bytes include the tensors that variables of the program hold while the operator runs.
    """
    held: set[int] = set()
    most, operator = 0, ""
    for event in trace.events:
        if isinstance(event, Call):
            op = trace.ops[event.op]
            taken_over = {trace.values[source] for _, source in op.overwrites}
            makes = {trace.values[value] for value in op.outputs if trace.is_root(value)}
            reads = {trace.values[value] for value in op.inputs}
            held -= taken_over
            there = (held | reads | makes) - taken_over
            need = sum(trace.storages[storage] for storage in there) + op.workspace
            if need > most:
                most, operator = need, op.name
            if event.held:
                held |= makes
        elif isinstance(event, Use):
            held.add(trace.values[event.value])
        elif isinstance(event, Drop):
            held.discard(trace.values[event.value])
    return most, operator


def bounds(name: str) -> dict[str, Any]:
    trace = traced(name)
    held, operator = need_of_what_is_held(trace)
    return {
        "bound": largest_need(trace),
        "held": held,
        "operator": operator,
        "simulated": smallest_budget(trace, Thrifty()),
        "peak": max(held, rekindle.simulate(trace).peak),
    }


def real(name: str, low: int, high: int) -> tuple[int, str]:
    """Return the smallest budget that suffices, and the operator that fails just below it.

    Args:
        name: The model.
        low: A budget (bytes) that is too small.
        high: A budget that suffices.
    """
    os.environ["REKINDLE_CACHE"] = "off"
    short = ""
    while high - low > high // 100:
        middle = (low + high) // 2
        answer = in_a_process(lambda: start(name, middle))  # noqa: B023 - called at once
        if answer:
            low, short = middle, answer.get("where", answer.get("failed", ""))
        else:
            high = middle
    return high, short


def measure(name: str) -> dict[str, Any]:
    found = in_a_process(lambda: bounds(name))
    if "failed" in found:
        return found
    found["real"], found["short_of_room"] = real(name, found["bound"] // 2, 2 * found["peak"])
    over = ("held", "simulated", "real")
    return found | {f"{key}_over_bound": round(found[key] / found["bound"], 3) for key in over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS, "gan", "resnet"])
    parser.add_argument("--out", type=Path, default=RESULTS / "floors.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    now = conditions()
    rows = earlier_by(options.out, KEY)
    for name in options.models:
        rows[name,] = {"model": name} | measure(name) | {"commit": now["commit"]}
        print({key: value for key, value in rows[name,].items() if key != "commit"}, flush=True)
        write("floors", now | {"rows": [*rows.values()]}, options.out)


if __name__ == "__main__":
    main()
