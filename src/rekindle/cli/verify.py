"""`rekindle verify`: check that a training step gives the same results within a budget."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.cli._options import examples, size
from rekindle.cli._program import function
from rekindle.cli._watched import smallest

if TYPE_CHECKING:
    from rekindle.pytorch import Verification


@click.command(
    epilog=examples(
        "rekindle verify train.py:step --budget 6GiB",
        "rekindle verify train.py --budget 512MB --json",
        exits="1: something differs, or the budget cannot be kept.",
    )
)
@click.argument("target", metavar="SCRIPT.py[:STEP]")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--budget",
    required=True,
    metavar="SIZE",
    callback=size,
    help="The budget of the third run, such as 6GiB.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
@click.pass_context
def command(
    ctx: click.Context, target: str, arguments: tuple[str, ...], budget: Bytes, as_json: bool
) -> None:
    """Run a training step with and without a budget, and compare.

    STEP is the name of a function without arguments that makes one training step; the default is
    "step". SCRIPT.py runs once, not as __main__, to define this function. A module,
    package.module:STEP, is imported instead. The function must do the same at each call. It runs
    twice without the budget and once within it. Results, gradients, buffers, random numbers and
    calls of hooks are compared bit for bit. The script finds ARGUMENTS in sys.argv; put -- before
    arguments that begin with a dash.
    """
    from rekindle.pytorch import verify

    place, _, name = target.partition(":")
    sys.argv = [place, *arguments]
    step = function(place, name or "step")
    try:
        found = verify(step, budget=budget)
    except OutOfBudget as error:
        error.for_command_line(f"--budget {smallest(error.rehearse())}")
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(_data(found), indent=2) if as_json else str(found))
    ctx.exit(0 if found.ok else 1)


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
