"""Tests of the example notebook: it runs, and its styles apply only to its own output."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))


def run(cells: list[dict[str, Any]]) -> list[str]:
    """Run the cells in order; return the HTML of the last expression of each."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    shown: list[str] = []
    for number, cell in enumerate(cells):
        name = f"<ipython-input-{number}>"
        tree = ast.parse("".join(cell["source"]), name)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            shown.append(value._repr_html_())  # type: ignore[attr-defined]
    return shown


def test_example_notebook_runs_and_shows_reports(capsys: pytest.CaptureFixture[str]) -> None:
    profile, report = run([cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"])
    assert capsys.readouterr().out.count(" of 24.0 MiB, peak ") == 5
    assert "What another budget would cost" in profile
    assert "By line of your program" in profile
    assert "ipython-input-0" in profile  # the profile lists lines of the notebook
    assert "<polygon" in report
    for part in (profile, report):
        check_scope(part)


def check_scope(part: str) -> None:
    """Check that each rule of the style sheet applies inside the report only."""
    assert "<html" not in part
    assert "<body" not in part
    (style,) = re.findall(r"<style>(.*?)</style>", part, re.DOTALL)
    rules = re.sub(r"@media[^{]*\{", "", style)
    for selectors in re.findall(r"([^{}]+)\{", rules):
        for selector in selectors.split(","):
            assert selector.strip().startswith(".rekindle"), selector


def test_notebook_check_refuses_style_rule_for_whole_page() -> None:
    with pytest.raises(AssertionError, match="body"):
        check_scope("<div><style>body { margin: 0 } .rekindle p { margin: 0 }</style></div>")
