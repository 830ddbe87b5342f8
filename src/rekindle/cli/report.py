"""`rekindle report`: show a report of a run or a profile that was saved as JSON."""

from __future__ import annotations

from pathlib import Path

import click

from rekindle._errors import InvalidFile
from rekindle._files import what_is
from rekindle.cli._options import examples


@click.command(
    epilog=examples(
        "rekindle profile train.py:step -o step.json",
        "rekindle report step.json",
        "rekindle report step.json --html step.html",
        exits="1: FILE is not a report.",
    )
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report to this file as a web page, which needs no network, and print nothing.",
)
@click.option(
    "--json", "as_json", is_flag=True, help=("Print the report as JSON, checked and indented.")
)
def command(file: Path, html: Path | None, as_json: bool) -> None:
    """Show the report in FILE, written by run.report().to_json() or rekindle profile -o."""
    from rekindle.report import Report

    try:
        report = Report.from_json(file.read_text(encoding="utf-8"))
    except InvalidFile as error:
        raise click.ClickException(str(error.at(str(file)))) from None
    except UnicodeDecodeError:
        raise click.ClickException(
            f"{file}: expected a Rekindle report as JSON, got {what_is(file)}"
        ) from None
    if html is not None:
        html.write_text(report.to_html(), encoding="utf-8")
    if as_json:
        click.echo(report.to_json())
    elif html is None:
        report.show()
