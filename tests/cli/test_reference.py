"""docs/cli.md is what the commands say of themselves, and each says enough."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from rekindle.cli import main
from rekindle.cli._reference import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
NAMES = main.list_commands(click.Context(main))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "write: python -m rekindle.cli._reference > docs/cli.md"


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_examples_and_exit_codes(name: str) -> None:
    # A command keeps the names of its option for help, as it was asked for them first.
    above = click.Context(main, **main.context_settings)
    command = main.get_command(above, name)
    assert command is not None
    help_text = command.get_help(click.Context(command, info_name=name, parent=above))
    assert f"    rekindle {name}" in help_text
    assert "Exit code 0" in help_text
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(option.help for option in options)
