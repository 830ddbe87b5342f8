"""A step along a shape: operators of the graph in order, others as they come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rekindle.pytorch.learned._walk import ASIDE, BACKWARD, FAR, GRAPH, LOST, Walk, is_of, places
from rekindle.pytorch.operators import operator, signature_of
from rekindle.pytorch.operators._signature import Invocation


def steps(words: str) -> list[int]:
    """Capitals are of the graph, those after "|" in the backward pass; others are beside it."""
    forward, _, backward = words.partition("|")
    met = [ord(word) << 2 | GRAPH * word.isupper() for word in forward]
    return met + [ord(word) << 2 | GRAPH | BACKWARD for word in backward]


@pytest.mark.parametrize(
    "step",
    [
        "AmB|CD",  # as it was
        "AB|CD",  # something beside the graph is missing
        "AmxB|CD",  # something came in between
        "xmAmB|CD",  # or before
        "XYAmB|CD",  # nothing of a backward pass: no step begins so
    ],
)
def test_steps_of_one_shape(step: str) -> None:
    assert is_of(steps("AmB|CD"), steps(step))


@pytest.mark.parametrize(
    "step",
    [
        "AmB|CDD",  # goes on
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


def test_what_is_logged_after_the_backward_pass_is_aside() -> None:
    shape = steps("AB|CD")
    step = [*shape, *steps("X")]
    assert places(shape, step) == [0, 1, 2, 3, ASIDE]
    assert is_of(shape, step)


def test_where_operators_are_found() -> None:
    assert places(steps("AmnB|C"), steps("xAnyB|C")) == [ASIDE, 0, 2, ASIDE, 3, 4]
    assert places(steps("AB|C"), steps("AX")) is None


def test_the_next_operator_of_the_graph_is_found_however_many_beside_it_are_missing() -> None:
    shape = steps("A" + "m" * 3 * FAR + "n" + "B")
    walk = Walk(shape)
    assert [walk.meets(met) for met in steps("AnB")] == [0, ASIDE, len(shape) - 1]
    assert walk.complete


def test_a_lost_walk_stays_where_it_is() -> None:
    walk = Walk(steps("AB"))
    assert [walk.meets(met) for met in steps("AXB")] == [0, LOST, 1]


NUMBERS = """
import torch
from tests.pytorch.learned.test_walk import numbers
print(numbers())
"""


def numbers() -> list[int]:
    """Of some signatures."""
    x = torch.ones(3, 4)
    addmm = operator(torch.ops.aten.addmm.default)
    to = operator(torch.ops.aten._to_copy.default)
    invocations = [
        Invocation(addmm, (x[0], x, x.t()), {}),
        Invocation(addmm, (x[0], x, x.t()), {"beta": 2}),
        Invocation(addmm, (x[1], x, x.t()), {}),
        Invocation(addmm, (x[1], x.double(), x.t()), {}),
        Invocation(to, (x,), {"dtype": torch.bfloat16, "device": torch.device("cpu")}),
        Invocation(to, (x,), {"dtype": torch.bfloat16, "copy": True}),
        Invocation(to, (x,), {"dtype": torch.bfloat16, "copy": None}),
    ]
    return [signature_of(each.operator, each.key).number for each in invocations]


def test_numbers_of_signatures_are_those_of_every_process() -> None:
    ours = numbers()
    assert len(set(ours)) == len(ours)
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-c", NUMBERS]
    theirs = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert theirs.stdout.strip() == str(ours)
