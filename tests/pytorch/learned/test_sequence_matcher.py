"""Tests of matching a step with a planned one: operators of the graph match in order."""

from __future__ import annotations

import pytest

from rekindle.pytorch.learned._sequence_matcher import (
    BACKWARD,
    FAR,
    GRAPH,
    MISMATCH,
    UNMATCHED,
    SequenceMatcher,
    is_of,
)


def steps(words: str) -> list[int]:
    """Capitals are of the graph, those after "|" in the backward pass; small letters are not."""
    forward, _, backward = words.partition("|")
    met = [ord(word) << 2 | GRAPH * word.isupper() for word in forward]
    return met + [ord(word) << 2 | GRAPH | BACKWARD for word in backward]


def places(shape: list[int], step: list[int]) -> list[int] | None:
    """Return the index in `shape` of each operator of `step`, or None if it is another shape."""
    walk = SequenceMatcher(shape)
    found = [walk.meets(met) for met in step]
    return None if MISMATCH in found else found


@pytest.mark.parametrize(
    "step",
    [
        "AmB|CD",  # as it was
        "AB|CD",  # an operator that is not of the graph is missing
        "AmxB|CD",  # something came in between
        "xmAmB|CD",  # or before
        "XYAmB|CD",  # nothing of a backward pass: no step begins so
    ],
)
def test_similar_steps_match_shape(step: str) -> None:
    assert is_of(steps("AmB|CD"), steps(step))


@pytest.mark.parametrize(
    "step",
    [
        "AmB|CDD",  # continues
        "AmBAmB|CD",
        "AmB|C",  # ends early
        "AmBX|CD",  # another operator of the graph
        "A|CD",
        "|ABCD",
        "",
    ],
)
def test_steps_of_another_shape(step: str) -> None:
    assert not is_of(steps("AmB|CD"), steps(step))


def test_operators_after_backward_pass_are_unmatched() -> None:
    shape = steps("AB|CD")
    step = [*shape, *steps("X")]
    assert places(shape, step) == [0, 1, 2, 3, UNMATCHED]
    assert is_of(shape, step)


def test_places_lists_positions_or_is_none() -> None:
    assert places(steps("AmnB|C"), steps("xAnyB|C")) == [UNMATCHED, 0, 2, UNMATCHED, 3, 4]
    assert places(steps("AB|C"), steps("AX")) is None


def test_next_graph_operator_is_found_past_missing_ones() -> None:
    shape = steps("A" + "m" * 3 * FAR + "n" + "B")
    walk = SequenceMatcher(shape)
    assert [walk.meets(met) for met in steps("AnB")] == [0, UNMATCHED, len(shape) - 1]
    assert walk.complete


def test_mismatch_keeps_position() -> None:
    walk = SequenceMatcher(steps("AB"))
    assert [walk.meets(met) for met in steps("AXB")] == [0, MISMATCH, 1]
