"""`rekindle demo`: train a small model with and without a budget, and compare both runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.cli._options import examples, multiple_of, size

if TYPE_CHECKING:
    from rekindle.cli._demo_training import Identical, Settings, Trained


def _number(name: str, default: int, text: str, least: int = 1, **more: Any) -> Callable[..., Any]:
    return click.option(
        name,
        type=click.IntRange(min=least),
        metavar="N",
        default=default,
        show_default=True,
        help=text,
        **more,
    )


@click.command(
    epilog=examples(
        "rekindle demo",
        "rekindle demo --layers 4 --steps 8 --fraction 0.5",
        "rekindle demo --budget 120MiB --json",
        exits="1: the results differ, or the budget is too small.",
    )
)
@click.option(
    "--budget",
    metavar="SIZE",
    callback=size,
    help="The budget, such as 200MB or 1.5GiB, instead of --fraction.",
)
@click.option(
    "--fraction",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    default=0.4,
    show_default=True,
    help="The budget as a part of the activation memory, on top of what cannot be evicted "
    "(weights, gradients, optimizer state).",
)
@_number("--layers", 12, "The number of blocks of the model.")
@_number(
    "--width", 128, "The number of values per character between blocks.", callback=multiple_of(4)
)
@_number("--context", 128, "The number of characters that the model sees at once.")
@_number("--batch", 16, "The number of pieces of text in one step.")
@_number("--steps", 24, "The number of steps of each of the two runs.")
@_number("--seed", 0, "The seed of the weights, of dropout and of the choice of text.", least=0)
@click.option(
    "--json", "as_json", is_flag=True, help=("Print the results as JSON, and nothing else.")
)
@click.pass_context
def command(
    ctx: click.Context, budget: Bytes | None, fraction: float, as_json: bool, **sizes: int
) -> None:
    """Train a small GPT without a budget and within one, and compare.

    The model learns the text of Python's standard library, character by character. The first run
    measures how much memory training takes. The second run has less memory, and must give the same
    losses and the same weights, bit for bit. If they differ, the exit code is 1.
    """
    given = ctx.get_parameter_source("fraction") is not ParameterSource.DEFAULT
    if budget is not None and given:
        raise click.UsageError(
            "got both --budget and --fraction, which set the same budget; write only one of them"
        )

    # OpenMP reads this variable when torch is loaded. It stops idle threads from spinning, which
    # would make training many times slower on a machine that is busy with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from rekindle.cli import _demo_training as demo
    from rekindle.cli import _demo_view
    from rekindle.pytorch import why_no_native_core

    why_no_native_core()  # compile the core now, so that its progress does not disturb the table
    settings = demo.Settings(**sizes)
    try:
        text = demo.read_text(settings.context)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    with _demo_view.live(settings, quiet=as_json) as view:
        free = demo.train(settings, text, watch=view.watch())
        budget = budget or free.budget_at(fraction)
        try:
            tight = demo.train(settings, text, budget, view.watch(budget))
        except OutOfBudget as error:
            raise click.ClickException(
                f"{error}\nOn this command line: rekindle demo --budget {error.worth_trying}"
            ) from None
    same = demo.compare(free, tight)
    if as_json:
        click.echo(json.dumps(_data(settings, free, tight, same), indent=2))
    else:
        view.compare(free, tight, same)
    ctx.exit(0 if same.losses and same.weights else 1)


def _data(settings: Settings, free: Trained, tight: Trained, same: Identical) -> dict[str, Any]:
    """Return the figures that `--json` prints, in bytes and nanoseconds."""
    return {
        "settings": vars(settings),
        "free": _figures(free),
        "tight": _figures(tight),
        "identical": same._asdict(),
    }


def _figures(run: Trained) -> dict[str, Any]:
    from rekindle.cli._demo_training import COUNTS

    names = ("budget", "peak", "constants", "step_ns")
    losses = [step.loss for step in run.steps]
    return {name: getattr(run, name) for name in (*names, *COUNTS)} | {"losses": losses}
