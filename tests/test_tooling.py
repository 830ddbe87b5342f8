"""Tests that configuration, scripts, documents and workflows agree with each other and the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.test_architecture import ALLOWED, ALLOWED_EVERYTHING

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TOOL = PYPROJECT["project"], PYPROJECT["tool"]

SCRIPTS = sorted(
    path for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"] if path.name[0] != "_"
)
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


def declared() -> list[str]:
    """Return every dependency in pyproject.toml, including extras and tools."""
    lists = [*PROJECT["optional-dependencies"].values(), *PYPROJECT["dependency-groups"].values()]
    return [*PROJECT["dependencies"], *(line for lines in lists for line in lines)]


def pins() -> dict[str, str]:
    """Return the versions that constraints.txt pins; fail on any other kind of line."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9._-]+)==([0-9][0-9a-z.]*)", line)
            assert match, f"constraints.txt: {line!r} is not name==version"
            found[_normal(match[1])] = match[2]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("requirement", declared())
def test_every_dependency_is_pinned_in_constraints(requirement: str) -> None:
    match = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?(?:==(.*)|>=.*)", requirement)
    assert match, f"{requirement!r} says neither == nor >="
    version = pins()[_normal(match[1])]
    assert match[2] in (None, version)


@pytest.mark.parametrize(
    "path",
    [
        PROJECT["readme"],
        *PROJECT["license-files"],
        TOOL["hatch"]["version"]["path"],
        *TOOL["hatch"]["build"]["targets"]["wheel"]["packages"],
        *TOOL["pytest"]["ini_options"]["testpaths"],
        *TOOL["ruff"]["src"],
        *TOOL["pyright"]["include"],
    ],
)
def test_each_path_in_pyproject_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_pyright_is_strict_everywhere_except_in_pytorch_folder() -> None:
    parts = {part for part in ALLOWED.keys() | ALLOWED_EVERYTHING if not part.startswith("_")}
    listed = {f"src/rekindle/{part}" for part in parts - {"pytorch"}}
    assert {*TOOL["pyright"]["strict"]} == listed | {"src/rekindle/*.py"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_run_from_any_folder_and_stop_at_first_failure(script: Path) -> None:
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")  # the second line states the purpose of the script
    assert "set -euo pipefail" in lines
    assert any(line.startswith("CDPATH='' cd -- ") for line in lines)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_only_scripts_that_exist(document: str) -> None:
    named = re.findall(r"scripts/(\w+)", (ROOT / document).read_text(encoding="utf-8"))
    assert named
    assert {*named} <= {script.name for script in SCRIPTS}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_link_only_to_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_changelog_has_heading_for_unreleased_changes() -> None:
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


GITHUB = ROOT / ".github"


def test_ci_matrix_has_every_supported_torch_version() -> None:
    (torch,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    oldest = re.fullmatch(r"torch>=(\d+)\.(\d+),<\d+", torch)
    assert oldest is not None
    first = int(oldest[2])
    text = (GITHUB / "workflows" / "test.yml").read_text(encoding="utf-8")
    listed = re.findall(r'"(\d+\.\d+)"', re.findall(r"torch: \[(.*?)\]", text)[0])
    assert listed == [f"{oldest[1]}.{minor}" for minor in range(first, first + len(listed))]
    assert pins()["torch"].rpartition(".")[0] in listed


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_run_only_existing_scripts(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)
    for script in re.findall(r"(?:scripts|\.ci)/\w+", path.read_text(encoding="utf-8")):
        assert (ROOT / script).is_file() or "script.py" in script, script


def test_issue_templates_link_to_documentation() -> None:
    links = [
        link
        for path in (GITHUB / "ISSUE_TEMPLATE").iterdir()
        for link in re.findall(r"https://\S+", path.read_text(encoding="utf-8"))
    ]
    assert links
    for link in links:
        page = link.removeprefix(PROJECT["urls"]["Documentation"]).strip("/")
        assert (ROOT / "docs" / f"{page}.md").is_file(), link


def test_citation_file_names_papers_and_version() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    source = (ROOT / TOOL["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert f'__version__ = "{citation["version"]}"' in source
    cited = {
        each["value"].removeprefix("arXiv:")
        for reference in citation["references"]
        for each in reference.get("identifiers", ())
    }
    papers = (ROOT / "docs" / "explanation" / "papers.md").read_text(encoding="utf-8")
    assert set(re.findall(r"arXiv (\d+\.\d+)", papers)) <= cited


def hooks() -> dict[str, dict[str, str]]:
    """Return the hooks of pre-commit by name."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    return {hook["id"]: hook for repo in yaml.safe_load(text)["repos"] for hook in repo["hooks"]}


def test_pre_commit_hooks_are_formatters_and_linters() -> None:
    assert [*hooks()] == ["ruff-format", "ruff-check", "clang-format", "subject"]
    assert "scripts/check" not in {hook["entry"] for hook in hooks().values()}


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("docs: say what a recipe is", True),
        ("engine, native: evict the cheapest first\n\nWhy.", True),
        ('Revert "docs: say what a recipe is"', True),
        ("Say what a recipe is", False),
        (f"docs: {'x' * 67}", False),
        (f"docs: {'x' * 66}\n", True),
    ],
)
def test_commit_subject_without_area_or_too_long_is_refused(subject: str, good: bool) -> None:
    assert bool(re.search(hooks()["subject"]["entry"], subject, flags=re.MULTILINE)) == good


SOURCES = sorted(path for end in ("py", "h", "cpp") for path in (ROOT / "src").rglob(f"*.{end}"))
LONGEST_NAME = 60
NO_SUMMARY = re.compile(r"(What|Whether|Who|Whose|Whoever|Those|Likewise|Nobody)\b")
AVOIDED = re.compile(r"(?i)\b(amid|anew|lets go of|let go of|husks?|obituar(y|ies)|bereft)(_|\b)")


def test_each_test_name_has_at_most_60_characters() -> None:
    names = [
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"\bdef (test_\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) > LONGEST_NAME] == []


@pytest.mark.parametrize("begin", ["What is kept.", "Those who read it.", "Return it", ""])
def test_docstring_check_finds_summary_without_period(begin: str) -> None:
    assert not good_summary(begin)
    assert good_summary("Return the whole budget.")


def test_each_docstring_begins_with_a_summary() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {text.partition(chr(10))[0]}"
        for path in SOURCES
        if path.suffix == ".py"
        for text in docstrings(path.read_text(encoding="utf-8"))
        if not good_summary(text)
    ]
    assert wrong == []


def test_sources_contain_no_forbidden_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in AVOIDED.finditer(line)
    ]
    assert len(SOURCES) > 300
    assert found == []


def docstrings(text: str) -> list[str]:
    """Return the docstrings of the module with the source `text`."""
    found = [
        ast.get_docstring(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [each for each in found if each is not None]


def good_summary(docstring: str) -> bool:
    """Return True if the first line of `docstring` is a sentence with a period."""
    return docstring.partition("\n")[0].endswith(".") and not NO_SUMMARY.match(docstring)


def test_units_that_are_checked_have_all_native_files(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            "bash",
            "-c",
            '. scripts/_native.sh; for u in "${NATIVE_UNITS[@]}"; do native_unit "$u" "$0"; done',
            tmp_path,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    included = {
        name
        for unit in run.stdout.split()
        for name in re.findall(r'#include "(.*)"', Path(unit).read_text(encoding="utf-8"))
    }
    native = ROOT / "src" / "rekindle" / "native"
    assert {str(path) for path in native.rglob("*.cpp")} == included
