"""Tests of `SequenceMatcher`, which compares a running step with a recorded one, by operators."""

from __future__ import annotations

import pytest

from rekindle.pytorch.learned._step_plan import GRAPH, has_shape
from rekindle.pytorch.native import core

BACKWARD = 2  #: bit of an operator's number: it runs in the backward pass
UNMATCHED, MISMATCH = -1, -2
FAR = 64  #: most recorded operators outside the graph that a step may leave out in a row


def steps(words: str) -> list[int]:
    """Return the operator ids of a step, in which each letter stands for one operator.

    Operators with capital letters need gradients. Those after "|" belong to the backward pass.
    """
    forward, _, backward = words.partition("|")
    op_ids = [ord(word) << 2 | GRAPH * word.isupper() for word in forward]
    return op_ids + [ord(word) << 2 | GRAPH | BACKWARD for word in backward]


def places(shape: list[int], step: list[int]) -> list[int]:
    """Return the index in `shape` (a recorded step) of each operator of `step`.

    The index is `UNMATCHED` if the recorded step lacks the operator, and `MISMATCH` if the steps
    do not match there.
    """
    return core().places_in(shape, step)


@pytest.mark.parametrize(
    "step",
    [
        "AmB|CD",  # equal to the recorded step
        "AB|CD",  # an operator without gradient is missing
        "AmxB|CD",  # an additional operator in between
        "xmAmB|CD",  # an additional operator before
        "XYAmB|CD",  # more additional operators, all before the backward pass
    ],
)
def test_sequence_matcher_accepts_step_with_few_differences(step: str) -> None:
    assert has_shape(steps("AmB|CD"), steps(step))


@pytest.mark.parametrize(
    "step",
    [
        "AmB|CDD",  # has more operators than recorded
        "AmBAmB|CD",
        "AmB|C",  # ends before the recorded step
        "AmBX|CD",  # another operator that needs gradients
        "A|CD",
        "|ABCD",
        "",
    ],
)
def test_sequence_matcher_rejects_step_with_other_operators(step: str) -> None:
    assert not has_shape(steps("AmB|CD"), steps(step))


def test_sequence_matcher_ignores_operators_after_backward() -> None:
    shape = steps("AB|CD")
    step = [*shape, *steps("X")]
    assert places(shape, step) == [0, 1, 2, 3, UNMATCHED]
    assert has_shape(shape, step)


def test_sequence_matcher_finds_positions_in_recorded_step() -> None:
    assert places(steps("AmnB|C"), steps("xAnyB|C")) == [UNMATCHED, 0, 2, UNMATCHED, 3, 4]
    assert places(steps("AB|C"), steps("AX")) == [0, MISMATCH]


def test_sequence_matcher_finds_operator_behind_missing_ones() -> None:
    shape = steps("A" + "m" * 3 * FAR + "n" + "B")
    assert places(shape, steps("AnB")) == [0, UNMATCHED, len(shape) - 1]
    near = steps("A" + "m" * (FAR - 1) + "nB")
    assert places(near, steps("AnB")) == [0, FAR, FAR + 1]


def test_sequence_matcher_keeps_its_position_after_mismatch() -> None:
    assert places(steps("AB"), steps("AXB")) == [0, MISMATCH, 1]
