"""Tests of the measuring clocks, whose speed tests can choose."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

import rekindle
from rekindle import _clock
from rekindle._clock import Speed
from rekindle.pytorch.native import core
from tests.pytorch import cores


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("", None),
        ("slow", Speed(10.0)),
        ("fast", Speed(0.1)),
        ("random:7", Speed(1.0, seed=7)),
    ],
)
def test_clock_setting_names_speed(text: str, speed: Speed | None) -> None:
    assert Speed.of(text) == speed


@pytest.mark.parametrize("text", ["quick", "random", "random:", "random:x", "10"])
def test_unknown_clock_setting_raises(text: str) -> None:
    with pytest.raises(ValueError, match="write slow, fast, or random:1"):
        Speed.of(text)


def test_scaled_clock_multiplies_time_between_readings() -> None:
    times, factors = iter([100, 200, 210, 205, 1205]), iter([10.0, 0.5, 10.0, 1.0])
    clock = _clock._Scaled(lambda: next(times), lambda: next(factors))
    assert [clock() for _ in range(4)] == [1100, 1105, 1105, 2105]


def test_clock_setting_reaches_other_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from rekindle import _clock; print(_clock.scaled(1000))"],
        env=os.environ | {_clock.SETTING: "slow"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "10000\n"


def test_clock_of_core_runs_at_given_speed() -> None:
    """At a million times the speed, one operator takes longer than the whole step."""
    module = core()
    assert module is not None
    speed = _clock.SPEED or Speed(1.0)
    weight = torch.rand(64, 64, requires_grad=True)
    cores.forget_signatures()
    module.set_clock_speed(1e6, -1)
    try:
        began = time.perf_counter_ns()
        with rekindle.budget("1GiB", learn=False) as run:
            (weight @ weight).sum().backward()
        assert run.compute_ns > time.perf_counter_ns() - began
    finally:
        module.set_clock_speed(speed.factor, speed.seed)
        cores.forget_signatures()
