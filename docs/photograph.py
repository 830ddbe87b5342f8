"""Take the pictures of the documentation with Chromium: python docs/photograph.py [NAME ...].

run: the page of a run. terminal: a running `rekindle run --progress`. notebook: the example as a
notebook shows it.
"""

from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
COLUMNS = 88
TERMINAL = (
    "<body style='margin:0;background:#1e2229'><pre style='margin:0;padding:14px;color:#d8dee9;"
    "font:13px/1.45 monospace'>{}</pre>"
)
NOTEBOOK = """<body style="margin:0;padding:24px;background:white;font:15px sans-serif;color:#222">
<style>pre{{margin:0;font:13px/1.4 monospace}} .in{{background:#f5f5f5;border:1px solid #ddd;
padding:8px;margin:14px 0 6px}} .out{{padding:2px 8px;margin-bottom:14px}}</style>{}"""


def run() -> str:
    namespace = _cells(io.StringIO())[1]
    return namespace["run"].report().to_html()


def terminal() -> str:
    """Return the screen of `rekindle run --progress` while a script runs that has no budget."""
    words = ["--budget", "2MiB", "--progress", "tests/cli/scripts/plain.py", "--epochs=2"]
    surroundings = {"COLUMNS": str(COLUMNS), "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rekindle", "run", *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | surroundings, stdout=theirs, stderr=theirs
    ):
        os.close(theirs)
        seen = bytearray()
        with contextlib.suppress(OSError):  # raised at the end of the output of a terminal
            while data := os.read(ours, 1024):
                seen += data
    text = seen.decode()
    told = [found.start() for found in re.finditer("Loss: ", text)]
    end = re.compile(r"time lost [\d.]+%").search(text, told[len(told) // 2])
    assert end is not None
    screen = _screen(text[: end.end()])
    prompt = "$ rekindle run " + " ".join(words)
    return TERMINAL.format(html.escape("\n".join([prompt, *screen])))


def notebook() -> str:
    return NOTEBOOK.format("".join(_cells(io.StringIO())[0]))


def _screen(text: str) -> list[str]:
    """Return the lines that a terminal shows after it received `text`."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part.startswith("\x1b"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part
            column += len(part)
    return [line.rstrip() for line in lines]


def _cells(printed: io.StringIO) -> tuple[list[str], dict[str, Any]]:
    """Return the cells of the example notebook with their output, and the names they define."""
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = source.startswith("# ")
            title, _, rest = source.removeprefix("# ").partition("\n")
            shown.append(f"<h1>{title}</h1>{rest}" if heading else f"<p>{source}</p>")
            continue
        tree = ast.parse(source, f"<ipython-input-{number}>")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"<ipython-input-{number}>", "exec"), namespace)
        shown.append(f"<pre class=in>{html.escape(source)}</pre><div class=out>")
        shown.append(f"<pre>{html.escape(printed.getvalue())}</pre>")
        printed.truncate(printed.seek(0))
        if isinstance(last, ast.Expr):
            name = f"<ipython-input-{number}>"
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            shown.append(value._repr_html_())
        shown.append("</div>")
    return shown, namespace


PICTURES: dict[str, tuple[Callable[[], str], int, int]] = {
    "run": (run, 1000, 900),
    "terminal": (terminal, 700, 150),
    "notebook": (notebook, 1000, 3700),
}
"""By picture: the function that makes its page, and width and height of the window."""


def photograph(page: str, name: str, width: int, height: int) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("docs/photograph.py: there is no chromium; install one")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(f"<!DOCTYPE html><meta charset=utf-8>{page}", encoding="utf-8")
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--window-size={width},{height}", f"--user-data-dir={folder}/profile"]
        words += [f"--screenshot={IMAGES / name}.png", path.as_uri()]
        subprocess.run([browser, *words], check=True, capture_output=True)


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        make, width, height = PICTURES[name]
        photograph(make(), name, width, height)


if __name__ == "__main__":
    main()
