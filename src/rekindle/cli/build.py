"""`rekindle build`: compile the native cores ahead of time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from rekindle.cli._options import examples

_TRAINING: Final = (sys.executable, "-m", "rekindle.cli._core_training")


@click.command(
    epilog=examples(
        "rekindle build",
        "rekindle build --guided",
        "CXX=clang++ rekindle build",
        "rekindle build --into prebuilt",
        exits="1: a core cannot be built.",
    )
)
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also copy the cores into this folder, for a wheel that contains them.",
)
@click.option(
    "--guided",
    is_flag=True,
    help="Compile the core for budgets once more, with profile-guided optimization.",
)
@click.pass_context
def command(ctx: click.Context, into: Path | None, guided: bool) -> None:
    """Compile the native cores now, not when they are first needed.

    There are two native cores, one for budgets and one for the simulator. They are compiled for the
    installed PyTorch and compiler, which takes under a minute on two CPUs. They are kept in the
    user's cache (`rekindle doctor` shows where), for all environments with the same PyTorch.

    With --guided, the compiler also counts which code three small models use, and compiles the core
    for budgets again with the counts (profile-guided optimization). That takes about three minutes
    on two CPUs, and needs g++. Programs of many small operators then run faster.
    """
    from rekindle import native
    from rekindle.pytorch import ship_native_core, why_no_native_core

    if guided:
        try:
            native.rebuild_torch_extension(_TRAINING)
        except native.Unbuildable as reason:
            raise click.ClickException(f"--guided: {reason}") from None
    simulator = "" if native.engine() is not None else native.why_not(native.ENGINE)
    reasons = {"simulator": simulator, "budgets": why_no_native_core()}
    for name, reason in reasons.items():
        click.echo(f"native core, {name}: {f'not there, {reason}' if reason else 'ready'}")
    if into is not None:
        native.ship_engine(into)
        ship_native_core(into)
    ctx.exit(1 if any(reasons.values()) else 0)
