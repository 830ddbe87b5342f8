"""The page docs/cli.md, written by the commands: `python -m rekindle.cli._reference` prints it."""

from __future__ import annotations

from typing import Any

import click

from rekindle.cli import main

_HEAD = """# The command line

<!-- Written by `python -m rekindle.cli._reference > docs/cli.md`; a test sees to that. -->

`rekindle COMMAND --help` prints what is on this page. A mistyped command or option gets the nearest
one as a hint.
"""


def reference() -> str:
    """The help of `rekindle` and of every command, as Markdown."""
    context = _context(main, "rekindle", None)
    parts = [_HEAD, _block(main, context)]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        inner = _context(command, name, context)
        parts += [f"\n## `rekindle {name}`\n", _block(command, inner)]
    return "\n".join(parts) + "\n"


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    """As on the command line, but always of one width."""
    settings: dict[str, Any] = {**command.context_settings}
    settings |= {"terminal_width": 88, "max_content_width": 88}
    return click.Context(command, info_name=name, parent=parent, **settings)


def _block(command: click.Command, context: click.Context) -> str:
    return f"```text\n{command.get_help(context)}\n```"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
