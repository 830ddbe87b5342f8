"""Test of the function that decides where the cache folder is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle._cache import OFF, cache_folder, core_folder, switch_off

HOME = Path("/home/somebody")


@pytest.mark.parametrize(
    ("rekindle", "xdg", "learned", "cores"),
    [
        (None, None, HOME / ".cache/rekindle", HOME / ".cache/rekindle/cores"),
        (None, "/caches", Path("/caches/rekindle"), Path("/caches/rekindle/cores")),
        (None, "relative", HOME / ".cache/rekindle", HOME / ".cache/rekindle/cores"),
        ("/mine", "/caches", Path("/mine"), Path("/mine/cores")),
        ("mine", "/caches", Path.cwd() / "mine", Path.cwd() / "mine/cores"),
        ("off", "/caches", None, Path("/caches/rekindle/cores")),
        ("", "", HOME / ".cache/rekindle", HOME / ".cache/rekindle/cores"),
    ],
)
def test_cache_folder_follows_environment_variables(
    rekindle: str | None,
    xdg: str | None,
    learned: Path | None,
    cores: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(HOME))
    for name, value in (("REKINDLE_CACHE", rekindle), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_folder() == learned
    assert core_folder() == cores


def test_cache_that_is_switched_off_keeps_folder_of_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in (str(tmp_path), OFF, ""):
        monkeypatch.setenv("REKINDLE_CACHE", folder)
        cores = core_folder()
        for _ in range(2):
            switch_off()
            assert cache_folder() is None
            assert core_folder() == cores
