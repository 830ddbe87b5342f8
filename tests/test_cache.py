"""Test of the function that decides where the cache folder is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle._cache import cache_folder, core_folder

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
