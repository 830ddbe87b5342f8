"""Tests that the documents are true: examples run; commands, scripts and linked files exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from rekindle.cli import main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
names = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> set[str]:
    return set(re.findall(r"`rekindle ([a-z]+)", text))


@names
def test_examples_in_each_document_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the examples of a document one after the other, as a reader would."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for example in examples(document.read_text()):
        exec(compile(example, str(document), "exec"), namespace)


def test_readme_example_prints_report(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = examples((ROOT / "README.md").read_text())
    exec(compile(example, "README.md", "exec"), {})
    assert "recomputations" in capsys.readouterr().out


@names
def test_each_command_in_documents_exists(document: Path) -> None:
    for command in commands(document.read_text()):
        assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0, command


@names
def test_each_script_and_linked_file_in_documents_exists(document: Path) -> None:
    text = document.read_text()
    for script in re.findall(r"\bscripts/[a-z]+\b", text):
        assert (ROOT / script).is_file(), script
    for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (document.parent / link).exists(), link


@names
def test_each_test_cited_in_documents_exists(document: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text()):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_design_page_defines_every_rule_that_code_cites() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    sections = re.split(r"^### ", design.partition("\n## Budget")[0], flags=re.MULTILINE)[1:]
    assert [section.partition(":")[0] for section in sections] == [f"R{n}" for n in range(1, 13)]
    assert [section for section in sections if "`tests/" not in section] == []
    files = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".h", ".cpp")]
    cited = {rule for path in files for rule in re.findall(r"\bR\d+\b", path.read_text())}
    assert "R4" in cited
    assert cited <= {f"R{n}" for n in range(1, 13)}


def test_environment_page_lists_every_variable_that_code_reads() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    sources = [
        ROOT / "hatch_build.py",
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "src").rglob("*.cpp"),
    ]
    read = {
        name
        for path in sources
        for name in re.findall(r'"(REKINDLE_[A-Z]+)"', path.read_text(encoding="utf-8"))
    }
    assert "REKINDLE_POISON" in read
    assert [name for name in sorted(read) if f"`{name}=" not in page] == []


def test_each_row_of_conformance_page_names_test() -> None:
    lines = (ROOT / "docs" / "reference" / "conformance.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| with")]
    assert len(rows) > 100
    assert [row for row in rows if "`tests/" not in row] == []


def test_docs_check_finds_examples_and_commands_of_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(examples(readme)) == 1
    assert {"plan", "simulate"} <= commands(readme)
    assert CliRunner().invoke(main, ["plam", "--help"]).exit_code != 0


def test_committed_benchmarks_page_equals_generated_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # the example runs as if from its folder
    page = runpy.run_path(str(ROOT / "benchmarks" / "page.py"))["page"]()
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page, "python benchmarks/page.py"


HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))


def test_conformance_row_becomes_item_with_test_links() -> None:
    rows = "| with | | test |\n|---|---|---|\n| DDP | yes | `tests/test_docs.py::examples` |"
    path = "tests/test_docs.py"
    line = (ROOT / path).read_text().splitlines().index("def examples(text: str) -> list[str]:") + 1
    item = HOOKS["conformance"](rows, "https://host/")
    assert item == f"- **DDP**: yes ([test](https://host/{path}#L{line}))"


def test_docs_page_that_cites_missing_test_is_not_built() -> None:
    row = "| DDP | yes | `tests/test_docs.py::test_nothing` |"
    with pytest.raises(LookupError, match="has no test test_nothing"):
        HOOKS["conformance"](row, "")
