"""Tests of reports: text, JSON and HTML show equal figures, and the page needs no other file."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rekindle import InvalidArgument, InvalidFile, OutOfBudget
from rekindle.policies import DTR
from rekindle.report import Choice, Holders, Profile, Report, Timeline, _html
from rekindle.report._data import Swapped
from rekindle.schedule import verify
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder, chain, keep_all_peak

MIB = 2**20
TAGS_WITHOUT_END = {"meta", "wbr"}


def training(layers: int = 8) -> Trace:
    """Return the trace of a forward and backward pass through `layers`.

    Each gradient needs the activation of its layer.
    """
    builder = TraceBuilder("training", held=False)
    values = [builder.source(MIB, "batch")]
    for _ in range(layers):
        values += builder.call("tanh", 1_000_000, [values[-1]], [MIB])
    gradient = builder.call("ones", 10_000, [values[-1]], [MIB], replayable=False)[0]
    for value in reversed(values[1:]):
        following = builder.call("d_tanh", 1_000_000, [value, gradient], [MIB], replayable=False)[0]
        builder.release(gradient)
        builder.release(value)
        gradient = following
    return builder.build()


@pytest.fixture(scope="module")
def report() -> Report:
    trace = training()
    record = replay(trace, budget=6 * MIB, policy=DTR())
    assert verify(trace, record.schedule, 6 * MIB).recomputations == record.recomputations > 0
    modules = [f"Net.layers.{number}" for number in range(len(trace.ops))]
    kinds = ["inputs"] + ["saved for backward"] * 8 + ["gradients"] * (len(trace.storages) - 9)
    return Report(
        budget=6 * MIB,
        peak=record.peak,
        compute_ns=record.compute_ns,
        recompute_ns=record.recompute_ns,
        evictions=record.evictions,
        recomputations=record.recomputations,
        at_peak=Holders(
            record.peak,
            5_000_000,
            "/home/me/train.py:12",
            {"inputs": MIB, "saved for backward": record.peak - MIB},
            {
                "Net.layers.0": 2 * MIB,
                "Net.layers.1": 2 * MIB,
                "Net.<script>": record.peak - 4 * MIB,
            },
            {"/home/me/net.py:7": record.peak},
            {"tanh": record.peak - MIB},
        ),
        choices=(
            Choice(10 * MIB, 20_000_000, 1.1, 0, 0),
            Choice(8 * MIB, 22_000_000, 1.3, 2_000_000, 2),
            Choice(6 * MIB, 30_000_000, 1.9, 8_000_000, 9),
        ),
        smallest_budget=6 * MIB,
        plain_ns=18_000_000,
        advice=("Write less.",),
    ).over_time(trace, record, kinds=kinds, modules=modules)


def test_report_memory_timeline_equals_simulation(report: Report) -> None:
    """The report computes memory from the actions of a run, the simulator while it runs."""
    line = report.timeline
    totals = [sum(band) for band in zip(*line.bands.values(), strict=True)]
    assert max(totals) == report.peak
    assert line.clock[-1] == report.compute_ns + report.recompute_ns
    assert list(line.clock) == sorted(line.clock)
    assert sum(line.recomputed) == report.recompute_ns
    assert sum(line.evicted) >= MIB


@pytest.mark.parametrize("layers", [3, 400])
def test_shortened_memory_timeline_keeps_peak(layers: int) -> None:
    trace = training(layers)
    record = replay(trace, budget=keep_all_peak(trace), policy=DTR())
    plain = Report(None, record.peak, record.compute_ns, 0, 0, 0)
    kinds, modules = ["x"] * len(trace.storages), [""] * len(trace.ops)
    line = plain.over_time(trace, record, kinds=kinds, modules=modules).timeline
    assert len(line.clock) <= 600
    assert max(line.bands["x"]) == record.peak


def test_report_sorts_recomputed_operators_by_time(report: Report) -> None:
    times = [row.ns for row in report.recomputed]
    assert sum(times) == report.recompute_ns
    assert times == sorted(times, reverse=True)
    assert sum(row.times for row in report.recomputed) == report.recomputations
    assert {row.operator for row in report.recomputed} == {"tanh"}


def test_report_text_has_all_figures_in_aligned_columns(report: Report) -> None:
    lines = report.text().splitlines()
    assert lines[0].split() == ["budget", "6.0", "MiB"]
    assert lines[1].split()[:3] == ["peak", *f"{report.peak / MIB:.1f} MiB".split()]
    assert f"evictions       {report.evictions:>11}" in lines
    assert "  Net.layers.* (2)      4.0 MiB" in report.text()
    ends = {line.index("MiB") for line in lines[:2]}
    assert len(ends) == 1
    assert "\x1b" not in str(report)
    assert lines[-1] == "Write less."


def test_report_has_color_on_terminal_unless_switched_off(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(file: io.StringIO) -> str:
        report.show(file)
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in shown(Terminal())
    assert shown(io.StringIO()) == report.text() + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == report.text() + "\n"


def test_report_read_from_its_json_is_equal(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("rekindle report", "a song", "format"),
        ('"version": 1', '"version": 2', "version"),
        ('"peak": ', '"peak": 0.5, "pike": ', "peak"),
        ('"advice"', '"advise"', "fields of a Rekindle report"),
        ('"clock": [', '"clock": 7, "clack": [', "fields of a Rekindle report"),
        ("{", "", "JSON"),
    ],
)
def test_report_from_changed_json_is_refused(
    report: Report, old: str, new: str, field: str
) -> None:
    text = report.to_json()
    assert old in text
    with pytest.raises(InvalidFile, match=field):
        Report.from_json(text.replace(old, new, 1))


class Page(HTMLParser):
    """Collect the text of a page, and complain about unclosed elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href")
        ]
        if tag not in TAGS_WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def test_report_page_loads_no_other_files(report: Report) -> None:
    text = report.to_html()
    page = Page(text)
    assert page.open == []
    assert page.links == []
    assert not page.tags & {"link", "script", "img", "iframe"}
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text
    words = " ".join(page.words)
    for title in ("Memory over time", "Who held the peak", "By module", "What was recomputed"):
        assert title in words
    assert "What another budget would cost" in words
    assert "6.0 MiB" in words
    assert "<script>" in "".join(page.words)  # an operator's name with markup is shown as text


def test_memory_category_has_same_color_in_all_reports() -> None:
    """The color does not depend on the other categories. No two categories have the same color."""
    several = ["optimizer state", "saved for backward", "something else", "parameters"]
    alone = _html._colors(["saved for backward"])
    beside = _html._colors(several)
    assert alone["saved for backward"] == beside["saved for backward"]
    assert _html._colors(several[::-1]) == beside
    assert len(set(beside.values())) == len(several)
    assert len(_html._colors([str(number) for number in range(20)])) == 20


def test_report_page_of_empty_run_has_no_chart() -> None:
    page = Page(Report(None, 0, 0, 0, 0, 0).to_html())
    assert page.open == []
    assert "Memory over time" not in page.words


def test_report_in_notebook_is_html_without_page_frame(report: Report) -> None:
    page = Page(report._repr_html_())
    assert page.open == []
    assert not page.tags & {"html", "body", "head"}


def png_size(path: Path) -> tuple[int, int]:
    return struct.unpack(">II", path.read_bytes()[16:24])


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
def test_report_page_fits_width_of_browser(report: Report, tmp_path: Path, width: int) -> None:
    """A real browser reports the width of the page's contents."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    (tmp_path / "page.html").write_text(report.to_html())
    # A headless browser's window has a minimum width; a frame in the window has none.
    (tmp_path / "frame.html").write_text(
        f'<iframe style="border:0; height:9000px; width:{width}px" '
        'onload="document.title = this.contentDocument.documentElement.scrollWidth" '
        f'srcdoc="{escape(report.to_html())}"></iframe>'
    )
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path}/profile", f"--window-size={width},2000"]

    def chrome(*words: str) -> str:
        run = subprocess.run([*command, *words], check=True, capture_output=True, timeout=120)
        return run.stdout.decode()

    shot = tmp_path / "shot.png"
    chrome(f"--screenshot={shot}", f"file://{tmp_path}/page.html")
    assert png_size(shot) == (width, 2000)
    assert f"<title>{width}</title>" in chrome("--dump-dom", f"file://{tmp_path}/frame.html")


def profile(report: Report) -> Profile:
    return Profile(report, chain(3))


def test_profile_interpolates_time_between_points_of_its_curve(report: Report) -> None:
    answers = profile(report)
    assert answers.smallest_budget == 6 * MIB
    assert answers.step_ns("10MiB") == answers.step_ns("1GiB") == 20_000_000
    assert answers.step_ns(9 * MIB) == 21_000_000
    assert answers.step_ns(6 * MIB) == 30_000_000
    assert answers.slowdown(10 * MIB) == pytest.approx(1.1)
    assert answers.fits("6MiB")
    assert not answers.fits(6 * MIB - 1)
    with pytest.raises(OutOfBudget) as caught:
        answers.step_ns("5MiB")
    assert caught.value.smallest_budget == 6 * MIB
    assert str(caught.value).splitlines()[0].endswith(f"rekindle.budget({6 * MIB})")


def test_profile_budget_for_slowdown_is_smallest_sufficient(report: Report) -> None:
    answers = profile(report)
    assert answers.budget_for(slowdown=1.1) == 10 * MIB
    assert answers.budget_for(slowdown=1.2) == pytest.approx(9 * MIB, rel=1e-6)
    assert answers.budget_for(slowdown=1.3) == 8 * MIB
    assert answers.budget_for(slowdown=5.0) == 6 * MIB


def test_profile_budget_for_too_low_slowdown_says_why(report: Report) -> None:
    answers = profile(report)
    with pytest.raises(InvalidArgument) as caught:
        answers.budget_for(slowdown=1.05)
    assert str(caught.value) == (
        "profile.budget_for(slowdown=1.05): wanted at least 1.100, the figure without any "
        f"eviction, within rekindle.budget({10 * MIB}); Rekindle's bookkeeping takes that long; "
        "write profile.budget_for(slowdown=1.10)"
    )
    with pytest.raises(InvalidArgument, match="noisy: the same step took up to 20% longer"):
        replace(answers, noise=0.2).budget_for(slowdown=1.05)
    with pytest.raises(InvalidArgument, match=r"slowdown=0\.5\): wanted a number of at least 1\.0"):
        answers.budget_for(slowdown=0.5)


def test_memory_timeline_of_empty_run_is_none() -> None:
    record = replay(TraceBuilder().build(), budget=None, policy=DTR())
    plain = Report(None, 0, 0, 0, 0, 0)
    assert (
        plain.over_time(TraceBuilder().build(), record, kinds=(), modules=()).timeline == Timeline()
    )


def test_report_time_lost_includes_waiting_for_copies(report: Report) -> None:
    swapping = replace(report, lost_ns=2_000_000, swapped=Swapped(waiting_ns=34_000_000))
    assert swapping.time_lost == 36_000_000
    assert swapping.overhead == 36_000_000 / report.compute_ns
    (line,) = (line for line in swapping.text().splitlines() if line.startswith("time lost"))
    assert "36.0 ms" in line
