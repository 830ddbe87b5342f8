"""Tests that docs/reference/cli.md lists every command and option."""

from __future__ import annotations

import runpy
from pathlib import Path

import click
import pytest

from rekindle.cli import main

HOOKS = Path(__file__).resolve().parents[2] / "docs" / "hooks.py"
NAMES = main.list_commands(click.Context(main))


def test_cli_reference_page_shows_every_command_and_option() -> None:
    page = runpy.run_path(str(HOOKS))["commands"]()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## `rekindle {name}`" for name in NAMES
    ]
    context = click.Context(main)
    for name in NAMES:
        command = main.get_command(context, name)
        assert command is not None
        for option in command.params:
            assert isinstance(option, click.Argument) or option.opts[0] in page, option.opts


@pytest.mark.parametrize("name", NAMES)
def test_help_of_each_command_has_examples_and_exit_codes(name: str) -> None:
    # The parent context comes first, because click caches the names of a command's help option.
    above = click.Context(main, **main.context_settings)
    command = main.get_command(above, name)
    assert command is not None
    help_text = command.get_help(click.Context(command, info_name=name, parent=above))
    assert f"    rekindle {name}" in help_text
    assert "Exit code 0" in help_text
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(option.help for option in options)
