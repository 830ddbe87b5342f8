"""Tests of the progress line that slow functions show on a terminal or write to a log."""

from __future__ import annotations

import io

import pytest

from rekindle import _progress
from rekindle._progress import ProgressLine


class Screen(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose one number is the time in seconds that `ProgressLine` reads."""
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    return now


def shown(stream: io.StringIO, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what `ProgressLine` writes to `stream` if it is called once a second, 24 times."""
    monkeypatch.setattr("sys.stderr", stream)
    progress = ProgressLine()
    for second in range(24):
        progress(f"second {second}")
        clock[0] += 1.0
    progress.done()
    return stream.getvalue()


def test_progress_in_log_writes_line_after_each_10_seconds(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = shown(io.StringIO(), clock, monkeypatch)
    assert written == "rekindle: second 11\nrekindle: second 22\n"


def test_progress_line_on_terminal_is_updated_and_erased_at_end(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = shown(Screen(), clock, monkeypatch)
    assert written.startswith("\r\x1b[Krekindle: second 3\r\x1b[Krekindle: second 4\r")
    assert written.endswith("second 23\r\x1b[K")
    assert "\n" not in written


def test_progress_of_short_work_shows_nothing(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    progress = ProgressLine()
    progress("begins")
    clock[0] += 1.0
    progress("ends")
    progress.done()
    assert not screen.getvalue()
