"""Drop the plans that a process has learned, so that tests do not depend on each other."""

from __future__ import annotations

from rekindle.pytorch.learned import _step_plans


def forget_plans() -> None:
    """Drop all recorded steps and plans of this process."""
    while _step_plans._plans:
        _step_plans._plans.popitem()[1].forget()
