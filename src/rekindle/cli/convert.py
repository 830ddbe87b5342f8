"""`rekindle convert`: convert a trace from one format to another."""

from __future__ import annotations

from pathlib import Path

import click

from rekindle._errors import RekindleError
from rekindle.cli._options import examples
from rekindle.trace.formats import load, save


@click.command(
    epilog=examples(
        "rekindle convert step.jsonl step.log",
        "rekindle convert resnet.log.gz resnet.jsonl",
        exits="1: SOURCE cannot be read.",
    )
)
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--format",
    "as_format",
    type=click.Choice(["native", "dtr"]),
    help="The format of TARGET. Default: dtr if its name ends in .log or .log.gz, else native.",
)
def command(source: Path, target: Path, as_format: str | None) -> None:
    """Read the trace SOURCE in any known format and write it to TARGET.

    SOURCE is a trace of Rekindle (.jsonl), a log of the DTR paper or a graph of Checkmate. SOURCE
    may be gzipped; TARGET is gzipped if its name ends in .gz.
    """
    suffixes = [suffix for suffix in target.suffixes if suffix != ".gz"]
    chosen = as_format or ("dtr" if suffixes[-1:] == [".log"] else "native")
    try:
        trace = load(source)
        save(trace, target, as_format=chosen)
    except (RekindleError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{target}: {len(trace.ops)} operators, in the format {chosen}")
