"""Fill in the generated parts of pages. MkDocs calls this file when it builds the site.

The reference of the command line is generated from the help texts of the commands, the changelog
from CHANGELOG.md, links to tests from the test files, and the repository's address from
`[project.urls]` in pyproject.toml.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def on_config(config: Any) -> Any:
    """Take the repository's address from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project["urls"]["Repository"]
    config.repo_name = "GitHub"
    config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill the generated part of a page; other pages stay as they are."""
    match page.file.src_uri:
        case "reference/cli.md":
            return markdown.replace("<!-- commands -->", commands())
        case "reference/conformance.md":
            return conformance(markdown, f"{config.repo_url}/blob/main/")
        case "design.md":
            return _linked(markdown, f"{config.repo_url}/blob/main/")
        case "changelog.md":
            text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
            return markdown.replace("<!-- changelog -->", text.partition("\n")[2])
        case _:
            return markdown


def commands() -> str:
    """Describe `rekindle` and each of its commands, as Markdown."""
    from rekindle.cli import main

    above = click.Context(main, info_name="rekindle", **main.context_settings)
    parts = []
    for name in main.list_commands(above):
        command = main.get_command(above, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=above)
        parts += [f"## `rekindle {name}`", *_described(command, context)]
    return "\n\n".join(parts)


def _described(command: click.Command, context: click.Context) -> Iterator[str]:
    yield _escaped(inspect.cleandoc(command.help or ""))
    usage = [context.command_path, *command.collect_usage_pieces(context)]
    yield f"```text\n{' '.join(usage)}\n```"
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            names, text = record
            rows.append(f"`{names}`\n:   {_escaped(' '.join(text.split()))}\n")
    yield "\n".join(row for row in rows if "--help`" not in row)  # the same everywhere
    for heading, lines in _epilog(command.epilog or ""):
        yield f"{heading}\n\n```sh\n{lines}\n```" if lines else heading


def _epilog(text: str) -> Iterator[tuple[str, str]]:
    """Yield heading and lines of each part after the options: examples and exit codes."""
    for part in text.replace("\b", "").split("\n\n"):
        heading, _, rest = part.strip().partition("\n")
        if rest and heading.endswith(":"):
            yield heading, "\n".join(line.strip() for line in rest.splitlines())
        elif part.strip():
            yield _escaped(" ".join(part.split())), ""


def _escaped(text: str) -> str:
    return text.replace("\b", "").replace("*", r"\*").replace("<", "&lt;")


def conformance(markdown: str, source: str) -> str:
    """Turn each row of a table into an item of a list, which a phone can show, with its tests.

    Args:
        markdown: The page. A row is a subject, what holds for it, and the tests that show it.
        source: The start of a file's address, to which its path is appended.
    """
    lines = []
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or cells[2] == "test" or not cells[2].strip("- "):
            if not line.startswith("|"):
                lines.append(line)
            continue
        tests = ", ".join(f"[test]({source}{path}#L{at})" for path, at in _tests(cells[2]))
        lines.append(f"- **{cells[0]}**: {cells[1]} ({tests})")
    return "\n".join(lines)


def _linked(text: str, source: str) -> str:
    """Turn each test that `text` names into a link."""

    def link(found: re.Match[str]) -> str:
        ((path, at),) = _tests(found[0])
        return f"[`{found[2]}`]({source}{path}#L{at})"

    return TEST.sub(link, text)


def _tests(text: str) -> Iterator[tuple[str, int]]:
    """Yield file and line of each test that `text` names.

    Raises:
        LookupError: `text` names a test that does not exist.
    """
    for path, name in TEST.findall(text):
        for at, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
            if re.match(rf" *def {name}\(", line):
                yield path, at
                break
        else:
            raise LookupError(f"{path} has no test {name}")
