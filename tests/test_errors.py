"""Tests of sending errors to another process, and of raising them again."""

from __future__ import annotations

import copy
import pickle

import pytest

import rekindle
from rekindle import RekindleError, _errors

SOME = [
    _errors.InvalidArgument("no"),
    _errors.InvalidFile(3, "cost", "a number", "'x'", path="step.jsonl"),
    _errors.InvalidTrace("order", "it is not so"),
    _errors.InvalidSchedule(2, "Free(3)", "it is free"),
    _errors.OutOfBudget("too little", needed=3, budget=2, held={"a": 1}, smallest_budget=4),
    _errors.SwapFailed("the disk"),
    _errors.Unsupported("not so"),
    _errors.VerificationFailed("a table"),
]


@pytest.mark.parametrize("error", SOME, ids=lambda error: type(error).__name__)
def test_error_is_equal_after_pickle_and_copy(error: RekindleError) -> None:
    error.add_note("and more")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)
        assert again.__notes__ == ["and more"]


def test_traceback_shows_public_name_of_error() -> None:
    kinds = {name: getattr(rekindle, name) for name in rekindle.__all__}
    public = {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, RekindleError)
    }
    assert len(public) >= 7
    for name, kind in public.items():
        assert f"{kind.__module__}.{kind.__qualname__}" == f"rekindle.{name}"


def test_error_class_can_be_raised_again_with_longer_text() -> None:
    """Pyro and PyTorch's data loader raise `type(error)(text)`."""
    of_files = (_errors.InvalidFile, _errors.InvalidSchedule, _errors.InvalidTrace)
    for error in SOME:
        if not isinstance(error, of_files):
            again = type(error)(f"{error}\nTrace shapes: none")
            assert type(again) is type(error)
            assert str(again) == f"{error}\nTrace shapes: none"
