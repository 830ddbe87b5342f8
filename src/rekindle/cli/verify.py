"""`rekindle verify`: is a script's training step the same within a budget?"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.cli._options import size

if TYPE_CHECKING:
    from rekindle.pytorch import Verification


@click.command
@click.argument("target", metavar="SCRIPT.py[:STEP]")
@click.option(
    "--budget",
    required=True,
    metavar="SIZE",
    callback=size,
    help="The budget of the third run, such as 6GiB.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, nothing else.")
@click.pass_context
def command(ctx: click.Context, target: str, budget: Bytes, as_json: bool) -> None:
    """Run a training step with and without a budget, and compare.

    SCRIPT.py is run once, not as __main__, to define what the step needs; package.module is
    imported instead. STEP is the name of a function in it without arguments, "step" if not given,
    which does one training step and the same each time. It runs twice without the budget and once
    within it: results, gradients, buffers, random numbers and calls of hooks are compared bit for
    bit. The exit code is 1 if anything differs.
    """
    from rekindle.pytorch import verify

    step = _step(ctx, target)
    try:
        found = verify(step, budget=budget)
    except OutOfBudget as error:
        raise click.ClickException(
            f"{error}\nOn this command line: --budget {error.smallest_budget}"
        ) from None
    click.echo(json.dumps(_data(found), indent=2) if as_json else str(found))
    ctx.exit(0 if found.ok else 1)


def _step(ctx: click.Context, target: str) -> Callable[[], Any]:
    """The function that `target` names; refused with what there is instead."""
    place, _, name = target.partition(":")
    name = name or "step"
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise click.UsageError(f"there is no file {place}", ctx)
        sys.path.insert(0, str(Path(place).resolve().parent))  # as if it were run itself
        found = runpy.run_path(place, run_name=Path(place).stem)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = vars(importlib.import_module(place))
        except ModuleNotFoundError as error:
            raise click.UsageError(f"{error}; write a file such as train.py:step", ctx) from None
    step = found.get(name)
    if not callable(step):
        functions = [key for key, value in found.items() if callable(value) and key[0] != "_"]
        raise click.UsageError(
            f"{place} has no function {name!r}; write {place}:NAME, where NAME is one of "
            f"{', '.join(functions) or '(it has none)'}",
            ctx,
        )
    return step


def _data(found: Verification) -> dict[str, Any]:
    def site(place: Any) -> dict[str, str] | None:
        return {"operator": place.operator, "line": place.line} if place is not None else None

    return {
        "ok": found.ok,
        "budget": found.budget,
        "peak": found.peak,
        "evictions": found.evictions,
        "recomputations": found.recomputations,
        "operators": found.operators,
        "compared": found.compared,
        "differing": found.differing,
        "unstable": found.unstable,
        "recomputed_differently": [site(place) for place in found.recomputed_differently],
        "first_unstable": site(found.first_unstable),
        "first_differing": site(found.first_differing),
    }
