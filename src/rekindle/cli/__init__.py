"""The command line: one file for each command, imported only when the command is used.

A file `<name>.py` in this folder defines one click command called `command`. Neither this module
nor the top of such a file imports torch, so that `rekindle --help` answers immediately.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import Any

import click

from rekindle import __version__
from rekindle._errors import RekindleError


class _Commands(click.Group):
    """Click group whose commands are the files of this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"{__name__}.{cmd_name}").command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and show Rekindle's own errors without a traceback.

        The messages of these errors contain all that the user needs.
        """
        try:
            return super().invoke(ctx)
        except RekindleError as error:
            raise click.ClickException(str(error)) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known, asked = self.list_commands(ctx), args[0]
        if asked not in known and not asked.startswith("-"):
            close = difflib.get_close_matches(asked, known, n=1)
            hint = f"did you mean 'rekindle {close[0]}'?" if close else f"there is: {_all(known)}."
            raise click.UsageError(f"No such command {asked!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


def _all(names: list[str]) -> str:
    return ", ".join(names)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rekindle")
def main() -> None:
    """Train PyTorch models inside a memory budget given in bytes.

    Every command has --help with examples. The exit code is 0 if all is well, 1 if the answer is no
    or something cannot be done, 2 if the command line is wrong.
    """
